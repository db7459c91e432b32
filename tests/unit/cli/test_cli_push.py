"""``edgeds push``: JSON keys, exit codes and usage errors, without a network."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from install_fakes import make_bundle

from edgeds.cli.main import main
from edgeds.engines import push
from edgeds.engines.push import PushReport
from edgeds.engines.push_device import PushCheck
from edgeds.errors import BuildError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "b").close()
    return tmp_path / "b"


def answer(monkeypatch: pytest.MonkeyPatch, *, ok: bool = True, build: dict[str, Any] | None = None) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def fake(bundle: Any, host: str, **options: Any) -> PushReport:
        seen.update(options, host=host, task=bundle.manifest.task)
        return PushReport(
            host=host,
            remote_dir="/home/j/edgeds/b",
            sent=("model.onnx",),
            sent_bytes=5,
            installed=False,
            checks=(PushCheck(name="golden", ok=ok, required=True, message="passed"),),
            build=build,
        )

    monkeypatch.setattr(push, "push_bundle", fake)
    return seen


def test_json_has_checks_and_the_keys_of_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built = {"engine": "/e", "fingerprint": "f", "cached": True, "golden_max_error": 0.01}
    seen = answer(monkeypatch, build=built)
    options = ["--port", "2222", "--remote-dir", "/data/b", "--max-batch", "2", "--precision", "int8"]
    assert main(["push", str(folder), "j@orin", "--json", "-q", *options, "--ssh-option", "ProxyJump=g"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {key: data[key] for key in built} == built
    assert data["checks"] == [{"name": "golden", "ok": True, "required": True, "message": "passed"}]
    assert (seen["host"], seen["port"], seen["remote_dir"]) == ("j@orin", 2222, "/data/b")
    assert seen["build_options"] == ["--precision", "int8", "--max-batch", "2"]
    assert seen["ssh_options"] == ["ProxyJump=g"]


def test_without_a_build_the_keys_are_null_and_text_tells_the_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = answer(monkeypatch)
    assert main(["push", str(folder), "j@orin", "--json", "-q", "--no-build"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] is None
    assert seen["build"] is False
    assert main(["push", str(folder), "j@orin", "-q"]) == 0
    assert "j@orin:/home/j/edgeds/b is ready" in capsys.readouterr().out


def test_exit_codes(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, ok=False)
    assert main(["push", str(folder), "j@orin", "-q"]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert main(["push", str(folder), "j@orin", "-q", "--bench-seconds", "-1"]) == 2
    assert main(["push", str(folder / "nothing"), "j@orin", "-q"]) == 1

    def fail(*_args: Any, **_options: Any) -> Any:
        raise BuildError("j@orin: the build failed: no")

    monkeypatch.setattr(push, "push_bundle", fail)
    assert main(["push", str(folder), "j@orin", "-q"]) == 1
    assert "the build failed" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["push", str(folder), "-x@orin", "-q"]) == 2
    assert main(["push", str(folder), "a;b@orin", "-q"]) == 2
