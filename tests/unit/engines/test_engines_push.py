"""Pushing bundles, against a real sshd on a loopback port whose device is this tree on the CPU or a fake TensorRT.

Nothing here is a TensorRT run: the builder on the other side writes JSON behind a magic number.
"""

import ast
import base64
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from install_fakes import make_bundle
from ssh_server import ROOT, Server, serve_ssh

from edgeds.bundle import Bundle, Manifest, open_bundle, verify_bundle, write_bundle
from edgeds.bundle.keys import make_keys
from edgeds.bundle.manifest import SIGNATURE_NAME
from edgeds.bundle.signature import sign_bundle
from edgeds.doctor import TINY_MODEL
from edgeds.engines import push_device, push_ssh
from edgeds.engines.jetson import Jetson
from edgeds.engines.push import PushReport, find_json, push_bundle
from edgeds.engines.push_device import Facts, check_device
from edgeds.engines.push_ssh import Target, explain_rsync, explain_ssh
from edgeds.engines.push_wheel import REQUIRES, code_digest, pack_wheel
from edgeds.errors import BuildError, DeviceError, SpecError
from edgeds.specs import TensorSpec


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_ssh(tmp_path_factory.mktemp("ssh")) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        running = request.getfixturevalue("server")
        running.set_mode("")
        for name in ("edgeds", ".edgeds", "elsewhere"):
            shutil.rmtree(running.home / name, ignore_errors=True)


@pytest.fixture
def bundle(tmp_path: Path) -> Iterator[Bundle]:
    with make_bundle(tmp_path / "my bundle's") as made:
        yield made


def push(bundle: Bundle, server: Server, **options: Any) -> PushReport:
    values: dict[str, Any] = {
        "port": server.port,
        "identity": server.key,
        "ssh_options": server.options,
        "bench_seconds": 0,
        "quiet": True,
    }
    return push_bundle(bundle, server.host, **(values | options))


def messages(report: PushReport) -> dict[str, str]:
    return {check.name: check.message for check in report.checks}


def test_a_bundle_is_copied_built_and_checked_on_the_device(bundle: Bundle, server: Server) -> None:
    """Names with spaces and quotes; the second push sends nothing and builds nothing."""
    server.set_mode("tensorrt 10.3.0")
    first = push(bundle, server)
    assert first.ok
    assert Path(first.remote_dir) == server.home / "edgeds" / "my bundle's"
    assert set(first.sent) == {"bundle.json", "golden.npz", "model.onnx"}
    assert not first.installed
    assert first.build is not None
    assert (first.build["cached"], first.build["golden_max_error"]) == (False, 0.0)
    assert Path(first.build["engine"]).is_file()
    assert verify_bundle(Path(first.remote_dir)) == []
    assert "passed on the device" in messages(first)["golden"]
    again = push(bundle, server)
    assert (again.sent, again.sent_bytes) == ((), 0)
    assert again.build is not None
    assert again.build["cached"] is True


def test_a_required_signature_is_required_on_the_device_too(
    bundle: Bundle, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public key travels along, the device checks with it, and a bundle changed there is refused there."""
    pair = make_keys(tmp_path / "team.key")
    sign_bundle(bundle.root, key=pair.private)
    monkeypatch.setenv("EDGEDS_TRUSTED_KEYS", str(pair.public))
    monkeypatch.setenv("EDGEDS_REQUIRE_SIGNATURE", "1")
    server.set_mode("tensorrt 10.3.0")
    with open_bundle(bundle.root) as signed:
        report = push(signed, server)
        assert report.ok
        assert SIGNATURE_NAME in report.sent
        assert f"signed by key {pair.key_id}" in messages(report)["signature"]
        assert report.build is not None
        assert [path.name for path in Path(f"{report.remote_dir}.trusted").iterdir()] == [f"{pair.key_id}.pub"]
        assert not list(server.home.rglob("team.key"))  # the private key stays here
        again = push(signed, server)
        assert again.build is not None
        assert again.build["cached"] is True


def test_only_what_changed_is_sent_and_what_is_gone_is_removed(bundle: Bundle, server: Server, tmp_path: Path) -> None:
    push(bundle, server, build=False, remote_dir="elsewhere/b")
    remote = server.home / "elsewhere" / "b"
    (remote / "engines" / "f").mkdir(parents=True)
    (remote / "engines" / "f" / "model.plan").write_text("kept")
    files: dict[str, Path | bytes] = {"model.onnx": bundle.path("model.onnx"), "new.txt": b"new"}
    changed = write_bundle(tmp_path / "changed", files=files, manifest=bundle.manifest)
    with open_bundle(changed) as newer:
        report = push(newer, server, build=False, remote_dir="elsewhere/b")
    assert set(report.sent) == {"bundle.json", "new.txt"}
    assert not (remote / "golden.npz").exists()
    assert (remote / "engines" / "f" / "model.plan").read_text() == "kept"
    assert verify_bundle(remote) == []


def test_an_interrupted_copy_is_taken_up_again(bundle: Bundle, server: Server) -> None:
    """What a broken connection leaves: a folder that a push made, with partial files in it and no manifest."""
    report = push(bundle, server, build=False)
    folder = Path(report.remote_dir)
    (folder / "bundle.json").unlink()
    (folder / "model.onnx").unlink()
    (folder / ".edgeds-partial").mkdir()
    (folder / ".edgeds-partial" / "model.onnx").write_bytes(bundle.path("model.onnx").read_bytes()[:3])
    report = push(bundle, server, build=False)
    assert set(report.sent) == {"bundle.json", "model.onnx"}
    assert verify_bundle(folder) == []


def test_edgeds_is_installed_where_it_is_missing_or_another_one(bundle: Bundle, tmp_path: Path) -> None:
    """The wheel is packed from this tree and put into an environment of its own; no pip, no network."""
    with serve_ssh(tmp_path / "ssh", with_edgeds=False) as bare:
        options = {"build": False}
        report = push(bundle, bare, **options)
        assert report.installed
        assert "installed in" in messages(report)["edgeds"]
        program = bare.home / ".edgeds" / "venv" / "bin" / "edgeds"
        done = subprocess.run(
            [program, "bundle", "verify", report.remote_dir],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(bare.home / "bare"), "PATH": os.environ["PATH"], "HOME": str(bare.home)},
        )
        assert done.returncode == 0, done.stderr
        assert not push(bundle, bare, **options).installed
        installed = next((bare.home / ".edgeds" / "venv" / "lib").glob("python3*/site-packages/edgeds"))
        (installed / "buckets.py").write_text("raise SystemExit\n")
        assert push(bundle, bare, **options).installed
        assert "SystemExit" not in (installed / "buckets.py").read_text()
        assert [path.name for path in installed.parent.iterdir() if path.name.startswith(".edgeds")] == []


def test_the_bench_runs_on_the_cpu_of_a_device_without_tensorrt(server: Server, tmp_path: Path) -> None:
    specs = (TensorSpec(name="x", dtype="float32", shape=(2,)),)
    manifest = Manifest(
        task="other",
        models={"float": "model.onnx"},
        inputs=specs,
        outputs=(TensorSpec(name="y", dtype="float32", shape=(2,)),),
        precision="float",
        license="Apache-2.0",
    )
    model = base64.b64decode(TINY_MODEL)
    with open_bundle(write_bundle(tmp_path / "cpu", files={"model.onnx": model}, manifest=manifest)) as bundle:
        report = push(bundle, server, bench_seconds=0.2)
    assert report.ok
    assert report.build is None
    assert "runs on the CPU" in messages(report)["tensorrt"]
    assert report.bench is not None
    assert report.bench["backend"] == "onnxruntime"
    assert report.bench["fps"] > 0


def test_a_build_that_fails_there_is_told_here(
    bundle: Bundle, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    server.set_mode("tensorrt 10.3.0 fail")
    with pytest.raises(BuildError, match="node 'conv1': not supported"):
        push(bundle, server)
    with pytest.raises(BuildError, match="see the lines above"):
        push(bundle, server, quiet=False)
    assert "parsing the model" in capfd.readouterr().err  # what the build says there is seen here
    server.set_mode("tensorrt 10.3.0 wrong")
    with pytest.raises(BuildError, match="wrong results"):
        push(bundle, server)


def test_a_folder_with_other_files_is_left_alone(bundle: Bundle, server: Server) -> None:
    """``rsync --delete`` must never meet somebody's home directory."""
    precious = server.home / "elsewhere" / "photos"
    precious.mkdir(parents=True)
    (precious / "cat.jpg").write_text("cat")
    with pytest.raises(DeviceError, match="not a bundle"):
        push(bundle, server, remote_dir="elsewhere/photos")
    with pytest.raises(DeviceError, match="not a folder"):
        push(bundle, server, remote_dir="elsewhere/photos/cat.jpg")
    assert (precious / "cat.jpg").read_text() == "cat"
    with pytest.raises(DeviceError, match="cannot be written"):
        push(bundle, server, remote_dir="elsewhere/photos/cat.jpg/b")
    for folder in ("", "~", "/", ".", "a/..", "a\nb"):
        with pytest.raises(SpecError, match="remote-dir"):
            push(bundle, server, remote_dir=folder)


def test_what_a_user_types_never_reaches_a_shell(bundle: Bundle, server: Server) -> None:
    name = "elsewhere/$(touch pwned) ; touch pwned; `touch pwned` 'x' \"y\""
    report = push(bundle, server, build=False, remote_dir=name)
    assert Path(report.remote_dir) == server.home / name
    assert not list(server.home.glob("**/pwned"))
    assert verify_bundle(server.home / name) == []


def test_refused_logins_and_unreachable_devices(bundle: Bundle, server: Server) -> None:
    with pytest.raises(DeviceError, match="refused the login"):
        push(bundle, server, identity=server.folder / "stranger_key")
    with pytest.raises(DeviceError, match="no ssh server listens"):
        push(bundle, server, port=1)
    with pytest.raises(DeviceError, match="host key is not known"):
        push(bundle, server, ssh_options=[f"UserKnownHostsFile={os.devnull}", "StrictHostKeyChecking=yes"])
    with pytest.raises(SpecError, match="no such key file"):
        push(bundle, server, identity=server.folder / "nothing")
    with pytest.raises(SpecError, match="KEY=VALUE"):
        push(bundle, server, ssh_options=["-oProxyCommand"])


def test_a_device_or_a_workstation_without_the_programs(
    bundle: Bundle, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server.home / "bin").mkdir(exist_ok=True)
    python = server.home / "bin" / "python3"
    try:
        python.write_text(f'#!/bin/sh\nPATH=/nowhere exec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        with pytest.raises(DeviceError, match="rsync is not installed there"):
            push(bundle, server)
        python.write_text("#!/bin/sh\nexit 127\n")
        with pytest.raises(DeviceError, match="sudo apt install python3"):
            push(bundle, server)
    finally:
        python.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="rsync' is not installed here"):
        push(bundle, server)


def facts(**changes: Any) -> Facts:
    values: dict[str, Any] = {
        "home": "/home/j",
        "folder": "/home/j/edgeds/b",
        "problem": None,
        "files": {},
        "free_bytes": 1 << 40,
        "python": "3.10.12",
        "machine": "aarch64",
        "rsync": True,
        "jetson": Jetson(module="p3767-0005", l4t="36.4.3", jetpack="6.2"),
        "interpreter": "/usr/bin/python3",
        "edgeds": None,
        "same_code": False,
        "tensorrt": "10.3.0",
    }
    return Facts(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"jetson": Jetson(module=None, l4t="35.5.0", jetpack="5.1.3"), "python": "3.8.10"},
            r"JetPack 5\.1\.3.*Python 3",
        ),
        ({"jetson": Jetson(module=None, l4t="36.3.0", jetpack="6.0"), "tensorrt": "8.6.2"}, r"TensorRT 8\.6\.2.*6\.1"),
        ({"tensorrt": None}, "python3-libnvinfer"),
        ({"free_bytes": 1 << 20}, r"not enough room.*1 MiB are free"),
        ({"rsync": False}, "sudo apt install rsync"),
    ],
    ids=["jetpack5", "jetpack6.0", "no-tensorrt", "full", "rsync"],
)
def test_a_device_that_will_not_do_is_refused_with_the_way_out(
    bundle: Bundle, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(DeviceError, match=text):
        check_device(facts(**changes), target=Target.parse("j@orin"), bundle=bundle, build=True)


def test_b121_an_unknown_release_is_noted_and_not_refused(bundle: Bundle) -> None:
    jetson = Jetson(module="p3767-0005", l4t="36.9.1", jetpack=None, note="treated like 36.5.2")
    checks = check_device(facts(jetson=jetson), target=Target.parse("j@orin"), bundle=bundle, build=True)
    assert all(check.ok for check in checks)
    assert "treated like 36.5.2" in checks[0].message


def test_what_is_there_already_needs_no_room(bundle: Bundle) -> None:
    have = {name: entry.bytes for name, entry in bundle.manifest.files.items()}
    check_device(facts(files=have, free_bytes=0), target=Target.parse("j@orin"), bundle=bundle, build=True)


@pytest.mark.parametrize("text", ["", "a b@c", "-oProxyCommand=x", "u@-h", "u@h;ls", "u@h:/x", "u@", "@h", "u@h\n"])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="USER@HOST"):
        Target.parse(text)


def test_targets() -> None:
    assert Target.parse("jetson@orin.local").for_ssh == "jetson@orin.local"
    six = Target.parse("me@[fe80::1]", port=2222)
    assert (six.for_ssh, six.for_rsync, str(six)) == ("me@fe80::1", "me@[fe80::1]", "me@[fe80::1] port 2222")
    with pytest.raises(SpecError, match="--port"):
        Target.parse("orin", port=70000)


def test_failures_are_explained_by_what_the_programs_wrote() -> None:
    target = Target.parse("j@orin")
    assert "the disk of /d is full" in explain_rsync(
        "write failed: No space left on device (28)", code=11, target=target, folder="/d"
    )
    assert "it resumes" in explain_rsync("connection unexpectedly closed", code=12, target=target, folder="/d")
    assert "refused the login" in explain_rsync(
        "j@orin: Permission denied (publickey).", code=255, target=target, folder="/d"
    )
    assert "not installed there" in explain_rsync(
        "bash: rsync: command not found", code=127, target=target, folder="/d"
    )
    assert "cannot be reached" in explain_ssh("ssh: connect to host orin port 22: Connection timed out", target)
    assert "unknown" in explain_ssh("ssh: Could not resolve hostname orin: Name or service not known", target)
    assert "it resumes" in explain_ssh("", target)


def test_json_is_found_behind_a_greeting() -> None:
    assert find_json('Welcome {friend}\n{broken\n{\n "a": 1\n}\n') == {"a": 1}
    assert find_json("nothing") is None


def test_the_wheel_installs_and_states_the_same_requirements_as_setup(tmp_path: Path) -> None:
    wheel = pack_wheel(tmp_path)
    assert pack_wheel(tmp_path / "again").read_bytes() == wheel.read_bytes()
    with zipfile.ZipFile(wheel) as packed:
        assert packed.testzip() is None
        names = packed.namelist()
        packed.extractall(tmp_path / "site")
    assert {"edgeds/__init__.py", "edgeds/py.typed", "edgeds/cli/main.py"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    assert code_digest(tmp_path / "site" / "edgeds") == code_digest()
    code = "import edgeds; from importlib.metadata import version; print(version('edgeds') == edgeds.__version__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "site", capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    setup = (ROOT / "setup.py").read_text()
    (stated,) = [
        ast.literal_eval(word.value)
        for word in ast.walk(ast.parse(setup))
        if isinstance(word, ast.keyword) and word.arg == "install_requires"
    ]
    assert tuple(stated) == REQUIRES


def test_modules_agree_on_names() -> None:
    assert push_device.PROBE.count(push_device.MARKER) == 1
    assert push_ssh.CONNECTION_LOST == 255
