"""Standard streams that are closed or full, and files that are no files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeds.errors import BundleError, InputError, ModelError, SpecError
from edgeds.files import open_regular, read_regular

ROOT = Path(__file__).parents[3]


def shell(command: str) -> subprocess.CompletedProcess[str]:
    script = command.replace("EDGEDS", f"'{sys.executable}' -m edgeds")
    return subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_failure(closed):
    done = shell(f"EDGEDS models list --json {closed}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_stdout_is_one_sentence_and_exit_code_1():
    done = shell("EDGEDS models list > /dev/full")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "stdout cannot be written: No space left on device" in done.stderr


def test_reader_that_goes_away_is_silent():
    done = shell("EDGEDS models list | true; exit ${PIPESTATUS[0]}")
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def test_pipes_and_devices_are_refused_instead_of_read_for_ever(tmp_path):
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    (tmp_path / "file").write_bytes(b"abc")
    assert read_regular(tmp_path / "file") == b"abc"


def test_every_reader_of_user_files_refuses_pipes(tmp_path):
    from edgeds.bundle.archive import peek_manifest
    from edgeds.cli.bundle import read_names
    from edgeds.engines.plan_file import split_engine
    from edgeds.graph.io import load_model, read_metadata
    from edgeds.imagefile import read_image
    from edgeds.pipelines.sources import open_sources
    from edgeds.report.dataset_yaml import read_data_yaml

    readers = {
        "m.onnx": (load_model, ModelError),
        "n.onnx": (read_metadata, ModelError),
        "e.engine": (split_engine, ModelError),
        "z.zip": (peek_manifest, BundleError),
        "i.jpg": (read_image, InputError),
        "list.txt": (open_sources, InputError),
        "v.mp4": (open_sources, InputError),
        "names.txt": (read_names, SpecError),
        "d.yaml": (read_data_yaml, SpecError),
    }
    for name, (read, error) in readers.items():
        os.mkfifo(tmp_path / name)
        with pytest.raises(error, match="not a regular file"):
            read(tmp_path / name)


def test_command_line_starts_without_heavy_imports():
    """Ctrl-C while numpy is imported must reach main, which answers with one line."""
    code = "import sys, edgeds.cli.main; print(sorted({'numpy', 'onnx', 'cv2', 'onnxruntime'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_import_is_an_interruption(monkeypatch, capsys, number, code):
    """onnxruntime turns Ctrl-C during its import into an ImportError; that must not read as 'not installed'."""
    from edgeds.cli import doctor as verb
    from edgeds.cli.main import main
    from edgeds.errors import MissingDependency

    def interrupted_import():
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        except BaseException as error:
            raise MissingDependency("onnxruntime", extra="cpu", purpose="this") from error

    monkeypatch.setattr(verb, "check_machine", interrupted_import)
    assert main(["doctor", "-q"]) == code
    assert "pip install" not in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_package_that_cannot_be_imported_is_no_bug_of_ours(monkeypatch, capsys):
    from edgeds.cli import doctor as verb
    from edgeds.cli.main import main

    def fail():
        raise ImportError("No module named 'tqdm'")

    monkeypatch.setattr(verb, "check_machine", fail)
    assert main(["doctor", "-q"]) == 1
    assert "cannot be imported (No module named 'tqdm'); see: edgeds doctor" in capsys.readouterr().err


def test_empty_path_is_not_the_current_folder(capsys):
    """--save "$UNSET" must not fill the folder one happens to be in."""
    from edgeds.cli.main import main

    assert main(["run", "x.bundle", "image.jpg", "--save", ""]) == 2
    assert "--save: the path is empty" in capsys.readouterr().err


def test_class_names_that_cannot_be_read_are_one_clear_sentence(tmp_path):
    from edgeds.cli.bundle import read_names

    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(SpecError, match=r"is not UTF-8 text \(byte 3\)"):
        read_names(tmp_path / "latin.txt")
    with pytest.raises(SpecError, match=r"cannot be read: No such file or directory$"):
        read_names(tmp_path / "missing.txt")
