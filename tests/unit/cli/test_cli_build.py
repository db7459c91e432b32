"""``edgeds build``: JSON keys, exit codes, what people read, and usage errors."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from install_fakes import FakeBuilder, FakeEngine, fake_host, make_bundle

from edgeds.cli import build
from edgeds.cli.main import main
from edgeds.engines.build_host import parse_sm
from edgeds.errors import DeviceError, SpecError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEDS_CACHE", str(tmp_path / "cache"))
    make_bundle(tmp_path / "b").close()
    return tmp_path / "b"


def use(monkeypatch: pytest.MonkeyPatch, builder: Any = None, **changes: Any) -> None:
    host = fake_host(builder, **changes)
    monkeypatch.setattr(build, "open_host", lambda _args: host)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["build", "-q", "--json", "--no-measure", *arguments])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else {}


def test_json_has_the_keys_of_the_contract(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = FakeBuilder()
    use(monkeypatch, builder)
    code, first = run_json(capsys, str(folder), "--max-batch", "2", "--sizes", "8x8,8", "--optimization-level", "5")
    assert code == 0
    assert {"engine", "fingerprint", "cached", "golden_max_error"} <= set(first)
    assert Path(first["engine"]).is_file()
    assert first["fingerprint"] in first["engine"]
    assert (first["cached"], first["golden_max_error"]) == (False, 0.0)
    (options,) = builder.builds
    assert options.optimization_level == 5
    assert [profile["x"].max for profile in options.profiles] == [(2, 3, 8, 8)]
    code, second = run_json(capsys, str(folder), "--max-batch", "2", "--sizes", "8", "--optimization-level", "5")
    assert (code, second["cached"], second["engine"]) == (0, True, first["engine"])


def test_ahead_of_time_the_golden_error_is_null_and_the_note_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, open_plan=None, cannot_run="no GPU here")
    code, found = run_json(capsys, str(folder))
    assert (code, found["golden_max_error"], found["golden"]) == (0, None, None)
    assert "golden check was not possible: no GPU here" in found["notes"][0]


def test_what_people_read(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch)
    assert main(["build", "-q", str(folder)]) == 0
    out = capsys.readouterr().out
    for text in ("model.plan", "built in", "golden check: passed on 1 sample", "3x8x8: batch 1", "Orin on p3767-0005"):
        assert text in out
    assert main(["build", "-q", str(folder)]) == 0
    assert "was there already" in capsys.readouterr().out


def test_failures_exit_with_1_and_print_nothing_on_stdout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, open_plan=lambda plan: FakeEngine(3.0))
    assert run_json(capsys, str(folder)) == (1, {})

    def missing(_args: Any) -> Any:
        raise DeviceError("TensorRT's Python package is not installed")

    monkeypatch.setattr(build, "open_host", missing)
    assert run_json(capsys, str(folder)) == (1, {})
    assert main(["build", str(folder / "nothing")]) == 1
    assert "no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-batch", "0"],
        ["--workspace-mib", "-1"],
        ["--optimization-level", "6"],
        ["--sizes", "big"],
        ["--sizes", ""],
    ],
    ids=lambda item: " ".join(item),
)
def test_usage_errors_exit_with_2(
    folder: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch)
    assert run_json(capsys, str(folder), *arguments) == (2, {})


@pytest.mark.parametrize(("text", "expected"), [("86", "8.6"), ("8.9", "8.9"), ("sm_120", "12.0"), ("SM86", "8.6")])
def test_compute_capabilities_are_read_in_every_spelling(text: str, expected: str) -> None:
    assert parse_sm(text) == expected


@pytest.mark.parametrize("text", ["", "ampere", "8", "11", "7.4", "8.66", "-86", "86;rm"])
def test_other_text_is_no_compute_capability(text: str) -> None:
    with pytest.raises(SpecError, match="compute capability"):
        parse_sm(text)
