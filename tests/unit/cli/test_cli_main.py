"""The frame around every verb: help, exit codes, one sentence per failure, clean stdout."""

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeds import __version__
from edgeds.cli import main as cli
from edgeds.cli.output import emit_json, emit_line, emit_text
from edgeds.errors import BundleError, InputError, MissingDependency, SpecError


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a verb ``probe`` whose run() is the given function."""

    def install(run: Callable[[argparse.Namespace], int]) -> None:
        module = types.ModuleType("edgeds.cli.probe")
        module.SUMMARY, module.EXAMPLES, module.run = "s", "examples:\n  edgeds probe", run  # type: ignore[attr-defined]
        module.add_arguments = lambda parser: parser.add_argument("--json", action="store_true")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "edgeds.cli.probe", module)
        monkeypatch.setitem(cli.VERBS, "probe", "a verb for tests")

    return install


def raiser(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(_args: argparse.Namespace) -> int:
        raise error

    return run


def test_help_lists_every_verb_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for verb, summary in cli.VERBS.items():
        assert verb in out
        assert summary in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"edgeds {__version__}\n"


def test_no_verb_is_wrong_use_and_stdout_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "verbs:" in err


@pytest.mark.parametrize(("verb", "near"), [("modles", "models"), ("quantise", "quantize"), ("zzz", "doctor")])
def test_unknown_verbs_name_the_nearest(verb: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb]) == 2
    err = capsys.readouterr().err
    assert near in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    module = importlib.import_module(f"edgeds.cli.{verb}")
    assert module.SUMMARY.split()[0] in out
    assert f"edgeds {verb}" in module.EXAMPLES
    assert module.EXAMPLES.strip().splitlines()[-1].strip() in out


@pytest.mark.parametrize("verb", cli.VERBS)
def test_unknown_options_are_wrong_use(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--no-such-option"]) == 2
    assert f"edgeds {verb}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("bad size"), 2),
        (BundleError("x.zip: damaged"), 1),
        (InputError("image 3 is empty"), 1),
        (MissingDependency("onnxruntime", extra="cpu", purpose="running"), 1),
        (FileNotFoundError(2, "No such file or directory", "/data/x"), 1),
        (OSError(28, "No space left on device", "/data/x"), 1),
        (MemoryError("Unable to allocate 9 GiB"), 1),
    ],
)
def test_failures_are_one_sentence_and_the_right_code(
    probe: Callable[..., None], capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    probe(raiser(error))
    assert cli.main(["probe"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("edgeds probe: error: ")
    assert len(err.splitlines()) == 1
    assert "bug" not in err


def test_an_unexpected_error_says_it_is_a_bug_and_how_to_see_more(
    probe: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe(raiser(KeyError("first\nsecond")))
    assert cli.main(["probe"]) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "bug in edgeds" in err
    assert "--debug" in err
    assert cli.main(["probe", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("EDGEDS_DEBUG", "1")
    assert cli.main(["probe"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_bad_debug_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EDGEDS_DEBUG", "yes please")
    assert cli.main(["models", "list"]) == 2
    assert "EDGEDS_DEBUG" in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_130(probe: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    probe(raiser(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == "edgeds probe: interrupted\n"


def test_json_is_alone_on_stdout_whatever_prints(
    probe: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_args: argparse.Namespace) -> int:
        print("a library talks")
        emit_line({"a": 1})
        print("and again")
        emit_line({"b": [2]})
        return 0

    probe(run)
    assert cli.main(["probe", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [{"a": 1}, {"b": [2]}]
    assert "a library talks" in err
    assert cli.main(["probe"]) == 0
    assert "a library talks" in capsys.readouterr().out


def test_emit_json_refuses_nan_and_survives_odd_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        emit_json({"fps": float("nan")})
    emit_json({"label": "Fuß \udcff", "path": Path("a")})
    assert json.loads(capsys.readouterr().out) == {"label": "Fuß \udcff", "path": "a"}


def test_file_names_that_are_not_utf8_are_printed_as_they_are() -> None:
    code = "import sys; from edgeds.cli import main, output; main._use_lenient_streams(); output.emit_text('a\\udcff')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60)
    assert done.stdout == b"a\xff\n", done.stderr


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-m", "edgeds", "models", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == cli.BROKEN_PIPE
    assert err == b""


@pytest.mark.parametrize(
    ("options", "shown"),
    [([], ["warn"]), (["-v"], ["info", "warn"]), (["-vv"], ["debug", "info", "warn"]), (["-q"], [])],
)
def test_logging_goes_to_stderr_and_is_undone(
    probe: Callable[..., None], capsys: pytest.CaptureFixture[str], options: list[str], shown: list[str]
) -> None:
    logger = logging.getLogger("edgeds.something")

    def run(_args: argparse.Namespace) -> int:
        logger.debug("debug")
        logger.info("info")
        logger.warning("warn")
        return 0

    probe(run)
    before = list(logging.getLogger("edgeds").handlers)
    for arguments in (["probe", *options], [*options, "probe"]):
        assert cli.main(arguments) == 0
        out, err = capsys.readouterr()
        assert out == ""
        assert [line.split(": ")[1] for line in err.splitlines()] == shown
    assert logging.getLogger("edgeds").handlers == before


def test_python_dash_m_works() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for module in ("edgeds", "edgeds.cli"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--version"], capture_output=True, text=True, env=environment, timeout=60
        )
        assert done.stdout == f"edgeds {__version__}\n"


def test_emit_text_reaches_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    emit_text("/a/path")
    assert capsys.readouterr().out == "/a/path\n"
