"""A real sshd on a loopback port with a scratch home directory: keys, configuration and log of its own."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Runs in every Python of the "device". The file `mode` in its home says what TensorRT is there and how builds end.
SITE = """
import os, sys
from pathlib import Path
mode = Path(os.environ["HOME"], "mode").read_text().split()
if "tensorrt" in mode:
    import types
    module = types.ModuleType("tensorrt")
    module.__version__, module.Builder = mode[mode.index("tensorrt") + 1], object
    sys.modules["tensorrt"] = module
if sys.argv[:1] == ["-m"] and "build" in sys.orig_argv:
    sys.path.append({fakes!r})
    import install_fakes as fakes
    import edgeds.engines.install as install
    from edgeds.errors import BuildError
    def fail(out):
        print("parsing the model", file=sys.stderr)
        if "fail" in mode:
            raise BuildError("node 'conv1': not supported")
    gain = 3.0 if "wrong" in mode else 1.0
    host = fakes.fake_host(fakes.FakeBuilder(before=fail), open_plan=lambda plan: fakes.FakeEngine(gain))
    install.find_host = lambda **options: host
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    user: str
    port: int
    home: Path
    key: Path
    folder: Path
    log: Path

    @property
    def host(self) -> str:
        return f"{self.user}@127.0.0.1"

    @property
    def options(self) -> list[str]:
        known = self.folder / "known_hosts"
        return [f"UserKnownHostsFile={known}", "StrictHostKeyChecking=accept-new", "IdentitiesOnly=yes"]

    def set_mode(self, text: str) -> None:
        (self.home / "mode").write_text(text)


@contextmanager
def serve_ssh(folder: Path, *, with_edgeds: bool = True) -> Iterator[Server]:
    """Start sshd as the current user; skips with the reason where it cannot run.

    The device's Python finds this tree, or, without edgeds, numpy and tqdm alone.
    """
    sshd = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
    missing = [name for name in ("ssh", "rsync", "ssh-keygen") if shutil.which(name) is None]
    if sshd is None or missing:
        pytest.skip(f"{', '.join(['sshd'] * (sshd is None) + missing)} not installed: apt install openssh-server rsync")
    if os.getuid() == 0:
        try:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd of root refuses to start without it
        except OSError as error:
            pytest.skip(f"/run/sshd cannot be made: {error}")
    home = folder / "home"
    (home / "site").mkdir(parents=True)
    (home / "mode").write_text("")
    (home / "site" / "sitecustomize.py").write_text(SITE.format(fakes=str(Path(__file__).parent)))
    for name in ("host_key", "user_key", "stranger_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if with_edgeds:
        python_path = os.pathsep.join([str(home / "site"), str(ROOT), *site_folders()])
    else:
        python_path = str(link_packages(home / "bare"))
        # Not the environment of the tests: an editable install of edgeds there would be found.
        (home / "bin").mkdir(exist_ok=True)
        (home / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    values = {
        "HOME": home,
        "PATH": f"{home / 'bin'}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": python_path,
        "EDGEDS_CACHE": home / "cache",
    }
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host_key'}\nPidFile none\nStrictModes no\n"
        f"AuthorizedKeysFile {folder / 'authorized_keys'}\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        f"PermitRootLogin prohibit-password\nUsePAM no\nMaxStartups 100\n"
        f"SetEnv {' '.join(f'{name}={value}' for name, value in values.items())}\n"
    )
    log = folder / "sshd.log"
    with log.open("wb") as sink:
        process = subprocess.Popen([sshd, "-D", "-e", "-f", str(config)], stdout=sink, stderr=sink)
    try:
        _wait_for(port, process, log)
        user = pwd.getpwuid(os.getuid()).pw_name
        yield Server(user=user, port=port, home=home, key=folder / "user_key", folder=folder, log=log)
    finally:
        process.terminate()
        process.wait(10)


def link_packages(folder: Path) -> Path:
    """A folder that makes numpy and tqdm importable and nothing else."""
    folder.mkdir()
    for name in ("numpy", "tqdm"):
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        package = Path(found.origin).parent
        for part in (package, package.with_name(f"{name}.libs")):
            if part.exists():
                (folder / part.name).symlink_to(part)
    return folder


def site_folders() -> list[str]:
    """Where this Python finds numpy and tqdm: the environment that the device makes must see them too."""
    return sorted({str(Path(entry)) for entry in sys.path if entry.endswith("site-packages")})


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(100):
        if process.poll() is not None:
            pytest.skip(f"sshd does not run here: {log.read_text(errors='replace').strip()[-300:]}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.skip("sshd did not open its port within five seconds")
