"""The output folder: refused before the work, one writer at a time, nothing of the user's replaced by mistake."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_yolo import write_images

from edgeds.errors import BundleError, EdgedsError, SpecError
from edgeds.workshop import outfolder, parts
from edgeds.workshop.outfolder import claim_folder
from edgeds.workshop.package import create_bundle


def claim(out: Path, *, replace: bool = False) -> Any:
    return claim_folder(out, replace=replace, ours={"bundle.json"}, what="a bundle")


def test_places_that_cannot_become_a_folder_are_refused_before_any_work(tmp_path: Path, model: Path) -> None:
    taken = tmp_path / "taken"
    write_images(taken, count=1)
    (tmp_path / "file").write_text("x", encoding="utf-8")
    wrong: list[tuple[Path, type[EdgedsError], str]] = [
        (taken, SpecError, "not an empty directory"),
        (tmp_path / "file", SpecError, "not an empty directory"),
        (tmp_path / "file" / "below", BundleError, "Not a directory"),
        (tmp_path / "b.zip", SpecError, "edgeds bundle zip"),
        (Path(), SpecError, "current folder"),
        (Path("/"), SpecError, "current folder or one above"),
        (tmp_path / ("n" * 300), BundleError, "name too long"),
        (Path("/proc/edgeds"), BundleError, "/proc"),
    ]
    for out, error, message in wrong:
        with pytest.raises(error, match=message):
            create_bundle(model, out=out, task="detect", calib=tmp_path / "is-not-looked-at")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "taken", "tiny.onnx"]


def test_replace_gives_up_only_what_is_ours(tmp_path: Path) -> None:
    write_images(tmp_path / "photos", count=1)
    with (
        pytest.raises(SpecError, match=r"holds '000\.png', which is not of a bundle"),
        claim(tmp_path / "photos", replace=True),
    ):
        pass
    assert (tmp_path / "photos" / "000.png").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "bundle.json").write_text("{}", encoding="utf-8")
    with claim(tmp_path / "old", replace=True):
        assert (tmp_path / "old" / "bundle.json").exists()


def test_second_writer_is_refused_and_the_first_is_not_disturbed(tmp_path: Path) -> None:
    out = tmp_path / "b"
    with claim(out):
        with pytest.raises(BundleError, match="another edgeds is writing it"), claim(out):
            pass
        with claim(tmp_path / "c"):  # a neighbour is free
            pass
    with claim(out):
        pass
    assert list(tmp_path.iterdir()) == []


def test_writer_that_was_killed_leaves_no_claim(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from edgeds.workshop.outfolder import claim_folder\n"
        f"with claim_folder(Path({str(tmp_path / 'b')!r}), replace=False, ours=(), what='x'):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(outfolder.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": root}, check=False)
    assert done.returncode == -9
    with claim(tmp_path / "b"):
        pass


def test_two_creates_at_once_give_one_bundle(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_started = threading.Barrier(2, timeout=20)
    original = parts.quantize_model

    def slow(*args: Any, **options: Any) -> Any:
        both_started.wait()  # the other has been refused by then
        return original(*args, **options)

    monkeypatch.setattr(parts, "quantize_model", slow)
    outcomes: list[Any] = []

    def create() -> None:
        try:
            outcomes.append(create_bundle(model, out=tmp_path / "b", task="detect", calib=images, quiet=True))
        except BundleError as error:
            outcomes.append(str(error))
            both_started.wait()

    callers = [threading.Thread(target=create) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert sorted(isinstance(item, Path) for item in outcomes) == [False, True]
    assert "another edgeds is writing it" in next(item for item in outcomes if isinstance(item, str))


def test_parents_made_for_a_failed_run_are_removed_again(tmp_path: Path) -> None:
    def fail() -> None:
        with claim(tmp_path / "a" / "b" / "c"):
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert list(tmp_path.iterdir()) == []
