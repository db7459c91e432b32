"""``edgeds build --rtx`` with the real TensorRT-RTX: ahead of time, without a GPU, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edgeds.bundle import open_bundle, verify_bundle
from edgeds.doctor_proof import write_proof_bundle
from edgeds.engines.engine_manifest import check_plan, read_engine_manifest

pytestmark = pytest.mark.tensorrt
ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, cache: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "edgeds", "build", str(folder), "--json", "-q", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "EDGEDS_CACHE": str(cache),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        },
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_an_engine_is_built_ahead_of_time_found_again_and_not_called_checked(rtx: ModuleType, tmp_path: Path) -> None:
    folder = write_proof_bundle(tmp_path / "b")
    code, first, errors = build(folder, tmp_path / "cache", "--rtx", "86")
    assert code == 0, errors
    assert first["golden_max_error"] is None
    assert any("golden check was not possible" in note for note in first["notes"])
    assert first["device"] == {"gpu": None, "compute_capability": "8.6", "board": None}
    stored = Path(first["engine"]).parent
    manifest = read_engine_manifest(stored)
    assert check_plan(stored, manifest).read_bytes()[:4] == b"vtrt"
    assert manifest.tensorrt == rtx.__version__
    assert len(manifest.profiles) == 2
    code, again, errors = build(folder, tmp_path / "cache", "--rtx", "sm_86")
    assert (code, again["cached"], again["engine"]) == (0, True, first["engine"]), errors
    code, other, errors = build(folder, tmp_path / "cache", "--rtx", "89", "--max-batch", "1", "--sizes", "32")
    assert (code, other["cached"]) == (0, False), errors
    assert other["fingerprint"] != first["fingerprint"]
    assert verify_bundle(folder) == []


def test_what_tensorrt_refuses_leaves_the_bundle_as_it_was(rtx: ModuleType, tmp_path: Path) -> None:
    folder = write_proof_bundle(tmp_path / "b")
    code, found, errors = build(folder, tmp_path / "cache", "--rtx", "11")
    assert (code, found) in ((1, {}), (2, {}))
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1, errors
    assert list(folder.glob("engines/*")) == []
    with open_bundle(folder) as bundle:
        assert bundle.has_golden()
