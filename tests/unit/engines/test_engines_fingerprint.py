"""Engine keys: equal when the engine would be, whatever the order things were given in (B63)."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from install_fakes import ORIN, FakeOptions, make_bundle, profile

from edgeds.engines.fingerprint import EngineKey, engine_key, fingerprint, model_digest, profiles_cover
from edgeds.engines.jetson import parse_jetson, read_jetson
from edgeds.specs import ShapeRange

BASE = {"model_sha256": "a" * 64, "profiles": (profile(),), "tensorrt": "tensorrt 10.3.0", "device": ORIN}


def key(**changes: object) -> EngineKey:
    options = changes.pop("options", FakeOptions())
    return engine_key(options=options, **(BASE | changes))  # type: ignore[arg-type]


def test_b63_the_order_of_options_profiles_and_inputs_does_not_matter() -> None:
    shapes = {"a": ShapeRange(min=(1,), opt=(2,), max=(4,)), "b": ShapeRange(min=(1,), opt=(1,), max=(1,))}
    other = {"a": ShapeRange(min=(8,), opt=(8,), max=(8,)), "b": ShapeRange(min=(2,), opt=(2,), max=(2,))}
    turned = dict(reversed(shapes.items()))
    first = key(profiles=(shapes, other), options=FakeOptions(flags=("p", "q")))
    second = key(profiles=(other, turned, shapes), options=FakeOptions(flags=("q", "p")))
    assert fingerprint(first) == fingerprint(second)
    assert len(fingerprint(first)) == 24


def test_what_does_not_change_the_plan_is_left_out() -> None:
    assert fingerprint(key(options=FakeOptions(timing_cache=Path("/x")))) == fingerprint(key())

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Newer(FakeOptions):
        added_in_a_later_release: bool = False

    assert fingerprint(key(options=Newer())) == fingerprint(key())
    assert fingerprint(key(options=Newer(added_in_a_later_release=True))) != fingerprint(key())


@pytest.mark.parametrize(
    "change",
    [
        {"model_sha256": "b" * 64},
        {"tensorrt": "tensorrt 10.16.2"},
        {"device": dataclasses.replace(ORIN, compute_capability="8.6")},
        {"device": dataclasses.replace(ORIN, gpu="Thor")},
        {"device": dataclasses.replace(ORIN, board="p3701-0005")},
        {"options": FakeOptions(sparsity=True)},
        {"options": FakeOptions(workspace_mib=64)},
        {"profiles": (profile(high=8),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_plan_changes_the_fingerprint(change: dict[str, object]) -> None:
    assert fingerprint(key(**change)) != fingerprint(key())


def test_b63_a_wider_engine_serves_a_narrower_request_and_not_the_other_way() -> None:
    wide, narrow = key(profiles=(profile(1, 8), profile(1, 8, side=16))), key(profiles=(profile(2, 4),))
    assert wide.serves(narrow)
    assert not narrow.serves(wide)
    assert not wide.serves(key(profiles=(profile(2, 4),), options=FakeOptions(sparsity=True)))
    assert not wide.serves(key(profiles=()))


def ranges(rank: int) -> st.SearchStrategy[ShapeRange]:
    dim = st.tuples(*[st.integers(1, 9)] * 3).map(sorted)
    return st.lists(dim, min_size=rank, max_size=rank).map(
        lambda dims: ShapeRange(
            min=tuple(d[0] for d in dims), opt=tuple(d[1] for d in dims), max=tuple(d[2] for d in dims)
        )
    )


@given(wide=st.lists(ranges(2), min_size=1, max_size=3), narrow=st.lists(ranges(2), min_size=1, max_size=3))
def test_covering_means_that_every_shape_of_the_narrow_is_allowed_by_the_wide(
    wide: list[ShapeRange], narrow: list[ShapeRange]
) -> None:
    covered = profiles_cover([{"x": r} for r in wide], [{"x": r} for r in narrow])
    corners = [[(low, high) for low, high in zip(r.min, r.max, strict=True)] for r in narrow]
    inside = [any(all(w.min[i] <= c[i][0] and c[i][1] <= w.max[i] for i in range(2)) for w in wide) for c in corners]
    assert covered == all(inside)


def test_profiles_of_other_inputs_or_ranks_are_not_covered() -> None:
    one, two = ShapeRange(min=(1,), opt=(1,), max=(9,)), ShapeRange(min=(1, 1), opt=(1, 1), max=(9, 9))
    assert not profiles_cover([{"x": one}], [{"y": one}])
    assert not profiles_cover([{"x": one}], [{"x": two}])
    assert profiles_cover([], [])


def test_the_model_digest_covers_external_data(tmp_path: Path) -> None:
    with make_bundle(tmp_path / "a", models={"float": "model.onnx", "extra": "model.onnx.data"}) as bundle:
        assert model_digest(bundle, "float") != bundle.manifest.files["model.onnx"].sha256
    with make_bundle(tmp_path / "b") as bundle:
        assert model_digest(bundle, "float") == bundle.manifest.files["model.onnx"].sha256


RELEASE = "# R{major} (release), REVISION: {rest}, GCID: 1, BOARD: generic, EABI: aarch64, DATE: Mon Jan  1 2025\n"


@pytest.mark.parametrize(
    ("major", "rest", "l4t", "jetpack", "note"),
    [
        ("35", "5.0", "35.5.0", "5.1.3", None),
        ("36", "4.4", "36.4.4", "6.2.1", None),
        ("39", "2.0", "39.2.0", "7.2", None),
        ("36", "9.1", "36.9.1", None, "36.5.2"),
        ("41", "1.0", "41.1.0", None, "39.2.1"),
        ("32", "7.1", "32.7.1", None, "35.1.0"),
    ],
)
def test_b121_known_and_unknown_releases(
    major: str, rest: str, l4t: str, jetpack: str | None, note: str | None
) -> None:
    found = parse_jetson(
        "nvidia,p3768-0000+p3767-0005-super\nnvidia,tegra234\n", RELEASE.format(major=major, rest=rest)
    )
    assert found is not None
    assert (found.l4t, found.jetpack, found.module) == (l4t, jetpack, "p3767-0005")
    assert (note is None) == (found.note is None)
    assert (note or "") in (found.note or "")


def test_b121_garbage_absent_and_no_jetson(tmp_path: Path) -> None:
    garbage = parse_jetson(None, "\x00\xff nonsense")
    assert garbage is not None
    assert garbage.l4t is None
    assert "not in the known form" in garbage.describe()
    container = parse_jetson("nvidia,p3737-0000+p3701-0000\nnvidia,tegra234", None)
    assert container is not None
    assert container.module == "p3701-0000"
    assert "inside a container" in str(container.note)
    assert parse_jetson("raspberrypi,4-model-b", None) is None
    assert read_jetson(tmp_path) is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_bytes(RELEASE.format(major=36, rest="4.3").encode() + b"\xff\x00")
    found = read_jetson(tmp_path)
    assert found is not None
    assert (found.jetpack, found.note) == ("6.2", None)
