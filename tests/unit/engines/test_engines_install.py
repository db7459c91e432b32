"""Installing engines: cache, golden check, refusal of foreign files, several processes, and killed ones."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from install_fakes import INPUT, ORIN, FakeBuilder, FakeEngine, fake_host, make_bundle, profile

from edgeds.bundle import Bundle, open_bundle, verify_bundle, zip_bundle
from edgeds.engines import engine_store
from edgeds.engines.engine_latency import shape_key
from edgeds.engines.engine_manifest import check_host, check_plan, read_engine_manifest
from edgeds.engines.install import explain_missing, find_installed, install_engine
from edgeds.engines.installed import remove_unfit
from edgeds.engines.variant import choose_variant
from edgeds.errors import BuildError, BundleError, EngineMismatch, SpecError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.setenv("EDGEDS_CACHE", str(tmp_path / "cache"))
    return make_bundle(tmp_path / "bundle")


def install(bundle: Bundle, build: Any = None, *, host: dict[str, Any] | None = None, **options: Any) -> Any:
    options = {"profiles": [profile()], "measure_seconds": 0.01, "quiet": True} | options
    return install_engine(bundle, host=fake_host(build, **(host or {})), **options)


def left_over(bundle: Bundle) -> list[str]:
    folder = bundle.root / "engines"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_an_engine_is_built_checked_measured_and_described(bundle: Bundle) -> None:
    builder = FakeBuilder()
    found = install(bundle, builder)
    assert not found.cached
    assert found.plan.read_bytes().startswith(b"ftrt")
    assert left_over(bundle) == [found.manifest.fingerprint]
    stored = read_engine_manifest(found.folder)
    assert stored == found.manifest
    assert check_plan(found.folder, stored) == found.plan
    assert stored.golden is not None
    assert stored.golden.ok
    assert found.golden_max_error == 0
    assert list(stored.latency_ms) == ["3x8x8"]
    assert list(stored.latency_ms["3x8x8"]) == [1, 2, 4]
    assert all(value >= 0 for value in stored.latency_ms["3x8x8"].values())
    assert (stored.device, stored.tensorrt, stored.precision) == (ORIN, "10.3.0", "float")
    assert stored.build == {"applied": ["fake"]}
    assert verify_bundle(bundle.root) == []


def test_b63_the_second_start_builds_nothing(bundle: Bundle) -> None:
    builder = FakeBuilder()
    first = install(bundle, builder, options={"flags": ("p", "q"), "sparsity": True})
    again = install(bundle, builder, options={"sparsity": True, "flags": ("q", "p")})
    narrower = install(
        bundle,
        builder,
        profiles=[profile(2, 3)],
        options={"sparsity": True, "flags": ("p", "q"), "timing_cache": Path("t")},
    )
    assert len(builder.builds) == 1
    assert [first.cached, again.cached, narrower.cached] == [False, True, True]
    assert {first.plan, again.plan, narrower.plan} == {first.plan}
    wider = install(bundle, builder, profiles=[profile(1, 8)], options={"sparsity": True, "flags": ("p", "q")})
    assert (wider.cached, len(builder.builds)) == (False, 2)
    assert not install(bundle, builder, options={"sparsity": True, "flags": ("p", "q")}, force=True).cached
    assert len(builder.builds) == 3


def test_two_models_do_not_share_engines(bundle: Bundle, tmp_path: Path) -> None:
    first = install(bundle)
    with make_bundle(tmp_path / "other", models={"float": "other.onnx"}) as other:
        assert install(other).manifest.fingerprint != first.manifest.fingerprint


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda plan: plan.write_bytes(plan.read_bytes()[:-1]), "expected"),
        (lambda plan: plan.write_bytes(plan.read_bytes()[:-1] + b"~"), "sha256"),
        (lambda plan: plan.unlink(), "cannot be read"),
        (lambda plan: plan.with_name("engine.json").write_text("{"), "not valid JSON"),
        (lambda plan: plan.with_name("engine.json").unlink(), "no engine.json"),
        (lambda plan: edit(plan, tensorrt="10.16.2"), "fingerprint"),
        (lambda plan: edit(plan, schema=9), "schema 9"),
        (lambda plan: edit(plan, plan="../../x"), "plain file name"),
        (lambda plan: edit(plan, unknown=1), "unknown key"),
    ],
    ids=["truncated", "changed", "missing", "json", "no-json", "edited", "newer", "path", "key"],
)
def test_a_damaged_engine_is_refused_and_built_again(
    bundle: Bundle, damage: Callable[[Path], object], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    builder = FakeBuilder()
    found = install(bundle, builder)
    damage(found.plan)
    with pytest.raises(EngineMismatch, match=text):
        check_plan(found.folder, read_engine_manifest(found.folder))
    assert find_installed(bundle, host=fake_host()) is None
    again = install(bundle, builder)
    assert (again.cached, len(builder.builds)) == (False, 2)
    assert "damaged engine" in caplog.text
    assert check_plan(again.folder, read_engine_manifest(again.folder)) == again.plan


def edit(plan: Path, /, **changes: Any) -> None:
    path = plan.with_name("engine.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_wrong_signature_and_wrong_product_are_refused(bundle: Bundle) -> None:
    with pytest.raises(BuildError, match="no usable plan"):
        install(bundle, FakeBuilder(magic=b"ELF!"))
    with pytest.raises(BuildError, match=r"plan of TensorRT-RTX, expected one of TensorRT;"):
        install(bundle, FakeBuilder(magic=b"vtrt"))
    assert left_over(bundle) == []
    wrong = b"vtrt" + bytes(20) + bytes([1, 6, 0, 9])
    with pytest.raises(BuildError, match=r"TensorRT-RTX 1\.6\.0, expected 1\.7\.1"):
        install(bundle, FakeBuilder(magic=wrong), host={"product": "rtx", "tensorrt": "1.7.1.116"})
    right = b"vtrt" + bytes(20) + bytes([1, 7, 1, 116])
    assert install(bundle, FakeBuilder(magic=right), host={"product": "rtx", "tensorrt": "1.7.1.116"}).plan.exists()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tensorrt": "10.16.2"}, "built with 10.3.0, this machine has 10.16.2"),
        ({"device": dataclasses.replace(ORIN, board="p3701-0005")}, "built for Orin on p3767-0005"),
        ({"device": dataclasses.replace(ORIN, compute_capability="8.6")}, "capability 8.7, this GPU has 8.6"),
        ({"product": "rtx"}, "built for tensorrt, this machine runs rtx"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_b126_a_foreign_engine_is_never_used(bundle: Bundle, changes: dict[str, Any], text: str) -> None:
    """B126: an engine that travelled with the folder is recognised as foreign, and a new one is built beside it."""
    found = install(bundle)
    host = fake_host(FakeBuilder(magic=b"vtrt" if "product" in changes else b"ftrt"), **changes)
    with pytest.raises(EngineMismatch, match=text):
        check_host(found.manifest, product=host.product, tensorrt=host.tensorrt, device=host.device)
    assert find_installed(bundle, host=host) is None
    assert text in explain_missing(bundle, host=host)
    if "product" not in changes:
        assert not install_engine(bundle, host=host, profiles=[profile()], measure_seconds=0).cached
        assert len(left_over(bundle)) == 2


def test_b126_a_zip_carries_no_engine_and_its_own_goes_to_the_cache(bundle: Bundle, tmp_path: Path) -> None:
    install(bundle)
    zip_bundle(bundle.root, tmp_path / "b.zip")
    builder = FakeBuilder()
    for expected in (False, True):
        with open_bundle(tmp_path / "b.zip") as packed:
            found = install(packed, builder)
        assert found.cached is expected
        assert found.folder.is_relative_to(tmp_path / "cache")
        assert found.plan.exists()
    assert len(builder.builds) == 1


def test_find_installed_prefers_what_the_bundle_is_meant_for(tmp_path: Path) -> None:
    models = {"float": "f.onnx", "int8": "q.onnx"}
    with make_bundle(tmp_path / "b", models=models, precision="int8") as bundle:
        assert find_installed(bundle, host=fake_host()) is None
        assert "no engine was built" in explain_missing(bundle, host=fake_host())
        install(bundle, precision="float")
        found = find_installed(bundle, host=fake_host())
        assert found is not None
        assert found.manifest.precision == "float"
        install(bundle, precision="int8")
        found = find_installed(bundle, host=fake_host())
        assert found is not None
        assert found.manifest.precision == "int8"
        assert "int8_fp16" in found.notes[0]
        assert find_installed(bundle, host=fake_host(), precision="float16") is None


def test_the_variant_follows_precision_and_typing(tmp_path: Path) -> None:
    models = {"float": "f.onnx", "int8": "q.onnx", "int8_fp16": "h.onnx"}
    with make_bundle(tmp_path / "b", models=models) as bundle:
        manifest = bundle.manifest
    assert choose_variant(manifest, precision="auto", typing="strong") == ("int8_fp16", "int8", None)
    assert choose_variant(manifest, precision="auto", typing="weak") == ("int8", "int8", None)
    assert choose_variant(manifest, precision="float16", typing="weak") == ("float", "float16", None)
    with pytest.raises(SpecError, match="no model for it"):
        choose_variant(manifest, precision="float16", typing="strong")
    with pytest.raises(SpecError, match="expected one of"):
        choose_variant(manifest, precision="fp8", typing="strong")


# --- golden check (B66) ---


def test_b66_a_wrong_engine_is_not_installed_and_the_old_one_stays(bundle: Bundle) -> None:
    good = install(bundle)
    before = good.plan.read_bytes()
    for gain in (1.1, float("nan"), float("inf"), 0.0):
        with pytest.raises(BuildError, match=r"wrong results.*output 'y'"):
            install(bundle, host={"open_plan": lambda plan, gain=gain: FakeEngine(gain)}, force=True)
    assert good.plan.read_bytes() == before
    assert left_over(bundle) == [good.manifest.fingerprint]


def test_without_golden_samples_or_device_the_engine_says_that_it_was_not_checked(tmp_path: Path) -> None:
    with make_bundle(tmp_path / "none", golden=False) as bundle:
        found = install(bundle)
        assert found.golden_max_error is None
        assert "no golden samples" in found.notes[0]
    with make_bundle(tmp_path / "far") as bundle:
        found = install(bundle, host={"open_plan": None, "cannot_run": "no GPU here"})
        assert found.golden_max_error is None
        assert found.manifest.latency_ms == {}
        assert "no GPU here" in found.notes[0]
        other = install(bundle, profiles=[profile(side=16)])
        assert "no golden sample fits" in other.notes[0]


# --- places (B59) ---


def test_b59_a_bundle_that_cannot_be_written_falls_back_to_the_cache_and_says_so(
    bundle: Bundle, tmp_path: Path
) -> None:
    """A file stands where the folder should be, since root writes everywhere."""
    (bundle.root / "engines").write_text("")
    builder = FakeBuilder()
    found = install(bundle, builder)
    assert found.folder.is_relative_to(tmp_path / "cache" / "engines")
    assert str(bundle.root / "engines") not in found.notes[-1]
    assert str(tmp_path / "cache") in found.notes[-1]
    assert "cannot be written" in found.notes[-1]
    assert install(bundle, builder).cached
    assert len(builder.builds) == 1


def test_b59_no_place_at_all_fails_before_the_build(bundle: Bundle, tmp_path: Path) -> None:
    (bundle.root / "engines").write_text("")
    (tmp_path / "cache").write_text("")
    builder = FakeBuilder()
    with pytest.raises(BundleError, match="EDGEDS_CACHE"):
        install(bundle, builder)
    assert builder.builds == []


def test_too_little_space_is_told_before_the_build(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1 << 20})()
    monkeypatch.setattr(engine_store.shutil, "disk_usage", lambda _path: usage)
    builder = FakeBuilder()
    with pytest.raises(BundleError, match="16 MiB are needed, 1 MiB are free"):
        install(bundle, builder)
    assert builder.builds == []


def test_a_disk_that_fills_up_leaves_nothing(bundle: Bundle) -> None:
    def fill(out: Path) -> None:
        out.write_bytes(b"ftrt half")
        raise OSError(errno.ENOSPC, "No space left on device", str(out))

    with pytest.raises(BuildError, match="disk is full"):
        install(bundle, FakeBuilder(before=fill))
    assert left_over(bundle) == []


# --- several processes, and processes that die (B62) ---


@pytest.mark.parametrize(
    "error", [BuildError("killed by signal 9: out of memory"), KeyboardInterrupt(), SystemExit(143)]
)
def test_b62_a_build_that_fails_or_is_interrupted_keeps_the_old_engine(bundle: Bundle, error: BaseException) -> None:
    good = install(bundle)

    def fail(out: Path) -> None:
        out.write_bytes(b"ftrt half")
        raise error

    with pytest.raises(type(error)):
        install(bundle, FakeBuilder(before=fail), force=True)
    assert left_over(bundle) == [good.manifest.fingerprint]
    assert install(bundle).cached


def test_two_builds_at_once_build_one_engine(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    started, release = threading.Event(), threading.Event()

    def wait(_out: Path) -> None:
        started.set()
        assert release.wait(20)

    builder = FakeBuilder(before=wait)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(install(bundle, builder))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert started.wait(20)
    time.sleep(0.6)  # longer than a poll: those who wait have seen the number of the process that builds
    release.set()
    for thread in threads:
        thread.join(20)
    assert len(builder.builds) == 1
    assert sorted(result.cached for result in results) == [False, True, True]
    assert f"process {os.getpid()} is building this engine" in caplog.text
    assert left_over(bundle) == [results[0].manifest.fingerprint]


CHILD = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from install_fakes import FakeBuilder, fake_host, profile
    from edgeds.bundle import open_bundle
    from edgeds.engines.install import install_engine
    def stuck(out):
        out.write_bytes(b"ftrt half")
        print("building", flush=True)
        time.sleep(60)
    host = fake_host(FakeBuilder(before=stuck))
    install_engine(open_bundle({root!r}), host=host, profiles=[profile()], measure_seconds=0, quiet=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_no_engine_and_no_lock(bundle: Bundle, number: signal.Signals) -> None:
    code = textwrap.dedent(CHILD.format(tests=str(Path(__file__).parent), root=str(bundle.root)))
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"building\n"
        assert find_installed(bundle, host=fake_host()) is None
        child.send_signal(number)
        child.wait(20)
    builder = FakeBuilder()
    found = install(bundle, builder)
    assert len(builder.builds) == 1
    assert left_over(bundle) == [found.manifest.fingerprint]
    assert found.plan.read_bytes() != b"ftrt half"


def test_what_killed_builds_of_other_engines_left_is_removed_and_running_ones_are_not(bundle: Bundle) -> None:
    store = bundle.root / "engines"
    store.mkdir()
    for name in ("dead", "alive"):
        (store / f".{name}-x1").mkdir()
        (store / f".{name}-x1" / "model.plan").write_bytes(b"ftrt half")
    with engine_store.engine_lock(store, "alive"):
        found = install(bundle)
        assert left_over(bundle) == [".alive-x1", ".alive.lock", found.manifest.fingerprint]


def test_latency_keys_are_those_of_the_batcher() -> None:
    from edgeds.runtime.rows import request_key

    other = dataclasses.replace(INPUT, name="z", shape=("n",))
    for inputs in ((INPUT,), (INPUT, other), (other,)):
        shapes = {spec.name: (2, 3, 8, 8) if spec.name == "x" else (2,) for spec in inputs}
        feeds = {name: np.zeros(shape) for name, shape in shapes.items()}
        assert shape_key(shapes, inputs) == request_key(feeds, inputs)


def test_where_a_signature_is_required_only_own_engines_run(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that came along with the bundle is code that nobody signed: it is built again."""
    install(bundle)
    assert install(bundle).cached
    monkeypatch.setenv("EDGEDS_REQUIRE_SIGNATURE", "1")
    assert install(bundle).cached  # this user built it here
    monkeypatch.setenv("EDGEDS_CACHE", str(tmp_path / "of another user"))
    host = fake_host(None)
    assert find_installed(bundle, host=host) is None
    assert not install(bundle).cached
    assert install(bundle).cached
    assert find_installed(bundle, host=host) is not None


def test_engines_that_fit_no_more_are_removed_when_asked(bundle: Bundle) -> None:
    old = install(bundle, host={"tensorrt": "10.3.0"}).folder
    kept = install(bundle, profiles=[profile(high=2, side=4)], host={"tensorrt": "10.7.0"}).folder
    new = install(bundle, host={"tensorrt": "10.7.0"})
    damaged = old.with_name("0123")
    damaged.mkdir()
    removed = remove_unfit(bundle, host=fake_host(None, tensorrt="10.7.0"), keep=new.manifest.fingerprint)
    assert {engine.folder for engine in removed} == {old, damaged}
    assert all(engine.reason for engine in removed)
    assert next(engine for engine in removed if engine.folder == old).size_bytes > 0
    assert set(left_over(bundle)) == {kept.name, new.folder.name}
    assert remove_unfit(bundle, host=fake_host(None, tensorrt="10.7.0"), keep=new.manifest.fingerprint) == ()
