"""A bundle that is written opens again, here, elsewhere and zipped; equal inputs give equal bytes."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeds.bundle import (
    FileEntry,
    Manifest,
    open_bundle,
    unzip_bundle,
    verify_bundle,
    write_bundle,
    zip_bundle,
)
from edgeds.errors import BundleError, EngineMismatch, SpecError
from edgeds.preproc import ImagePreprocess
from edgeds.specs import Resolution, TensorSpec, to_json


def make_manifest(**changes: Any) -> Manifest:
    preprocess = ImagePreprocess()
    values: dict[str, Any] = {
        "task": "detect",
        "models": {"float": "variants/float.onnx", "int8": "model.onnx"},
        "inputs": (TensorSpec(name="images", dtype="float32", shape=("n", 3, "h", None)),),
        "outputs": (TensorSpec(name="out", dtype="float32", shape=("n", 84, None)),),
        "preprocess": to_json(preprocess),
        "preprocess_digest": preprocess.digest(),
        "head": {"family": "yolov8", "classes": 2},
        "names": {0: "person", 1: "Fuß"},
        "buckets": (Resolution(320, 320), Resolution(320, 640)),
        "max_batch": 4,
        "precision": "int8",
        "calibration": {"method": "percentile", "samples": 3},
        "license": "Apache-2.0",
        "provenance": {"edgeds": "0.1"},
    }
    return Manifest(**{**values, **changes})


def golden_bytes(folder: Path) -> bytes:
    np.savez(folder / "g.npz", images=np.arange(6, dtype=np.float32).reshape(1, 2, 3), out=np.asfortranarray(np.eye(3)))
    return (folder / "g.npz").read_bytes()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "float.onnx").write_bytes(b"float" * 1000)
    files: dict[str, Path | bytes] = {
        "model.onnx": b"int8 weights",
        "variants/float.onnx": tmp_path / "src" / "float.onnx",
        "golden.npz": golden_bytes(tmp_path / "src"),
        "cost.json": b"{}",
    }
    return write_bundle(tmp_path / "a.bundle", files=files, manifest=make_manifest())


def test_written_bundle_opens_with_the_same_manifest_and_files(bundle: Path) -> None:
    with open_bundle(bundle) as opened:
        assert dataclasses.replace(opened.manifest, files={}) == make_manifest()
        assert opened.model_path("float").read_bytes() == b"float" * 1000
        assert opened.path("model.onnx").read_bytes() == b"int8 weights"
        assert opened.preprocess() == ImagePreprocess()
        golden = opened.golden()
    assert golden["images"].tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert golden["out"].tolist() == np.eye(3).tolist()
    golden["out"][0, 0] = 5  # owned by the caller, writable
    assert verify_bundle(bundle) == []


def test_equal_inputs_give_equal_bytes(bundle: Path, tmp_path: Path) -> None:
    with open_bundle(bundle) as opened:
        names = list(opened.manifest.files)
        assert names == sorted(names)
        again: dict[str, Path | bytes] = {name: opened.path(name) for name in reversed(names)}
        write_bundle(tmp_path / "b.bundle", files=again, manifest=make_manifest())
    assert (bundle / "bundle.json").read_bytes() == (tmp_path / "b.bundle" / "bundle.json").read_bytes()
    zip_bundle(bundle, tmp_path / "a.zip")
    zip_bundle(tmp_path / "b.bundle", tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_b126_packed_bundle_runs_elsewhere_without_foreign_engines(bundle: Path, tmp_path: Path) -> None:
    """B126: only ONNX and settings travel; an engine that lies there is neither checked, packed nor an error."""
    (bundle / "engines" / "sm87-trt10.3").mkdir(parents=True)
    (bundle / "engines" / "sm87-trt10.3" / "plan").write_bytes(b"ftrt foreign")
    (bundle / "engines" / "link").symlink_to("/etc")
    assert verify_bundle(bundle) == []
    zip_bundle(bundle, tmp_path / "a.zip")
    shutil.move(bundle, tmp_path / "gone")
    (tmp_path / "far").mkdir()
    out = unzip_bundle(tmp_path / "a.zip", tmp_path / "far" / "away")
    with open_bundle(out) as opened:
        assert opened.model_path("int8").read_bytes() == b"int8 weights"
    assert not (out / "engines").exists()


def test_engines_in_an_archive_are_left_out(bundle: Path, tmp_path: Path) -> None:
    (bundle / "engines").mkdir()
    (bundle / "engines" / "plan").write_bytes(b"x" * 10_000_000)
    shutil.make_archive(str(tmp_path / "made"), "zip", bundle)
    out = unzip_bundle(tmp_path / "made.zip", tmp_path / "out")
    assert not (out / "engines").exists()
    assert verify_bundle(tmp_path / "made.zip") == []


def test_zip_is_opened_through_a_temporary_folder_that_close_removes(bundle: Path, tmp_path: Path) -> None:
    zip_bundle(bundle, tmp_path / "a.zip")
    opened = open_bundle(tmp_path / "a.zip")
    path = opened.model_path("int8")
    assert path.exists()
    opened.close()
    opened.close()
    assert not path.exists()
    with pytest.raises(BundleError, match="closed"):
        opened.path("model.onnx")


def test_a_forgotten_zip_bundle_removes_its_folder_too(bundle: Path, tmp_path: Path) -> None:
    zip_bundle(bundle, tmp_path / "a.zip")
    opened = open_bundle(tmp_path / "a.zip")
    root = opened.root
    del opened
    assert not root.exists()


def test_opens_from_another_working_directory_and_through_a_link(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(bundle)
    monkeypatch.chdir(tmp_path)
    with open_bundle("link") as opened:
        monkeypatch.chdir("/")
        assert opened.model_path("int8").read_bytes() == b"int8 weights"


def test_links_inside_the_bundle_are_fine(bundle: Path) -> None:
    os.rename(bundle / "model.onnx", bundle / "cost.json.tmp")  # noqa: PTH104
    entry = bundle / "variants" / "float.onnx"
    data = entry.read_bytes()
    entry.unlink()
    (bundle / "engines").mkdir()
    (bundle / "engines" / "blob").write_bytes(data)
    entry.symlink_to("../engines/blob")
    os.rename(bundle / "cost.json.tmp", bundle / "model.onnx")  # noqa: PTH104
    assert verify_bundle(bundle) == []


@pytest.mark.parametrize("name", ["missing", "../a", "/etc/passwd", "engines/x", ""])
def test_only_listed_files_have_a_path(bundle: Path, name: str) -> None:
    with open_bundle(bundle) as opened, pytest.raises(BundleError, match="holds no file"):
        opened.path(name)


def test_a_missing_variant_names_those_that_exist(bundle: Path) -> None:
    with open_bundle(bundle) as opened, pytest.raises(BundleError, match=r"'fp16'.*float, int8"):
        opened.model_path("fp16")


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../b", "bundle.json", "engines/x", "engines", "", "a/", "c:x", "a\\b", "a\nb"]
)
def test_write_refuses_unsafe_names_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError):
        write_bundle(
            tmp_path / "o", files={"m.onnx": b"x", name: b"x"}, manifest=make_manifest(models={"float": "m.onnx"})
        )
    assert list(tmp_path.iterdir()) == []


def test_write_refuses_what_cannot_become_a_bundle(tmp_path: Path) -> None:
    manifest = make_manifest(models={"float": "m.onnx"})
    with pytest.raises(SpecError, match="not among the files"):
        write_bundle(tmp_path / "o", files={"other": b"x"}, manifest=manifest)
    with pytest.raises(SpecError, match="not a file that can be read"):
        write_bundle(tmp_path / "o", files={"m.onnx": tmp_path / "nowhere"}, manifest=manifest)
    with pytest.raises(SpecError, match="both a file and the folder"):
        write_bundle(tmp_path / "o", files={"m.onnx": b"x", "m.onnx/y": b"x"}, manifest=manifest)
    nan = make_manifest(models={"float": "m.onnx"}, accuracy={"map50": float("nan")})
    with pytest.raises(SpecError, match="JSON"):
        write_bundle(tmp_path / "o", files={"m.onnx": b"x"}, manifest=nan)
    assert list(tmp_path.iterdir()) == []


def test_write_keeps_an_existing_folder_unless_told(bundle: Path) -> None:
    files: dict[str, Path | bytes] = {"m.onnx": b"new"}
    manifest = make_manifest(models={"float": "m.onnx"})
    with pytest.raises(SpecError, match="not an empty directory"):
        write_bundle(bundle, files=files, manifest=manifest)
    assert verify_bundle(bundle) == []
    write_bundle(bundle, files=files, manifest=manifest, replace=True)
    with open_bundle(bundle) as opened:
        assert list(opened.manifest.files) == ["m.onnx"]


@pytest.mark.parametrize(
    "changes",
    [
        {"task": " "},
        {"models": {}},
        {"max_batch": 0},
        {"license": ""},
        {"preprocess_digest": None},
    ],
)
def test_manifest_refuses_values_that_no_bundle_can_have(changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(changes)).split("_")[0]):
        make_manifest(**changes)


def test_b49_changed_preprocessing_is_refused(bundle: Path) -> None:
    """B49: what the model was calibrated with is what it is served with; an edit is an error, not a silent drift."""
    path = bundle / "bundle.json"
    data = json.loads(path.read_text())
    data["preprocess"]["scale"] = 1.0
    path.write_text(json.dumps(data))
    with open_bundle(bundle) as opened, pytest.raises(EngineMismatch, match="calibrated with"):
        opened.preprocess()
    assert [problem.file for problem in verify_bundle(bundle)] == ["bundle.json"]


member_names = st.lists(st.text(alphabet="abc.é ", min_size=1, max_size=4), min_size=1, max_size=3).map("/".join)


@given(st.dictionaries(member_names, st.binary(max_size=100), max_size=5))
def test_any_set_of_safe_files_survives_write_zip_unzip(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    root = tmp_path_factory.mktemp("trip")
    files = {"model.onnx": b"x", **files}
    manifest = make_manifest(models={"float": "model.onnx"})
    try:
        write_bundle(root / "in", files=files, manifest=manifest)
    except SpecError:
        assert list(root.iterdir()) == []
        return
    zip_bundle(root / "in", root / "z.zip")
    unzip_bundle(root / "z.zip", root / "out")
    with open_bundle(root / "out") as opened:
        assert {name: opened.path(name).read_bytes() for name in opened.manifest.files} == files
        assert all(
            entry == FileEntry(sha256=entry.sha256, bytes=len(files[n])) for n, entry in opened.manifest.files.items()
        )
