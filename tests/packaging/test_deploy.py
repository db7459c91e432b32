"""What lies in deploy/: the script runs, the unit and the Dockerfile hold what they promise."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgeds.cli.main import build_parser
from edgeds.engines.push_wheel import pack_wheel

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCRIPT = DEPLOY / "install_jetson.sh"
RELEASE = "# R{} (release), REVISION: {}, GCID: 1, BOARD: generic, EABI: aarch64, DATE: today\n"


def install(root: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "EDGEDS_INSTALL_ROOT": str(root), "PIP_NO_INDEX": "1", **environment},
    )


def jetson(root: Path, major: int = 36, rest: str = "4.3") -> Path:
    (root / "etc").mkdir(parents=True, exist_ok=True)
    (root / "etc" / "nv_tegra_release").write_text(RELEASE.format(major, rest))
    return root


def test_the_script_is_sound_shell_and_executable() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", str(SCRIPT)]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, ""),
        (["--nonsense"], 2, "unknown option --nonsense"),
        (["--prefix"], 2, "--prefix needs a value"),
        (["--python", "/nowhere/python3"], 1, "is not there"),
        (["--python", sys.executable, "--wheel", "/nowhere.whl"], 2, "does not exist"),
    ],
    ids=["help", "unknown", "no-value", "python", "wheel"],
)
def test_wrong_use_is_told_before_anything_is_made(tmp_path: Path, arguments: list[str], code: int, text: str) -> None:
    prefix = tmp_path / "env"
    done = install(jetson(tmp_path / "root"), *(["--prefix", prefix] if arguments != ["--prefix"] else []), *arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert not prefix.exists()


def test_no_jetson_and_an_old_jetpack_are_refused(tmp_path: Path) -> None:
    done = install(tmp_path, "--prefix", tmp_path / "env")
    assert (done.returncode, "no Jetson" in done.stderr) == (1, True)
    done = install(jetson(tmp_path, 35, "5.0"), "--prefix", tmp_path / "env")
    assert done.returncode == 1
    assert "L4T 35.5.0 is JetPack 5 or older" in done.stderr
    assert not (tmp_path / "env").exists()


@pytest.mark.slow
def test_b125_the_script_installs_and_ends_as_the_check_ends(tmp_path: Path) -> None:
    """B125: "done" only when doctor passes. numpy and tqdm come from this environment, as on a board."""
    wheel = pack_wheel(tmp_path)
    site = os.pathsep.join(entry for entry in sys.path if entry.endswith("site-packages"))
    options = ["--prefix", tmp_path / "env", "--wheel", wheel, "--python", sys.executable]
    done = install(jetson(tmp_path / "root"), *options, PYTHONPATH=site, EDGEDS_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Jetson Linux 36.4.3" in done.stdout
    assert "required: all fine" in done.stdout
    assert "done; the program is" in done.stdout
    (tmp_path / "file").touch()
    again = install(tmp_path / "root", *options, PYTHONPATH=site, EDGEDS_CACHE=str(tmp_path / "file" / "cache"))
    assert again.returncode == 1
    assert "required: FAILED: cache" in again.stdout
    assert "==> done" not in again.stdout
    if os.getuid() == 0:
        done = install(tmp_path / "root", *options, "--service", PYTHONPATH=site)
        unit = (tmp_path / "root" / "etc/systemd/system/edgeds.service").read_text()
        assert f"ExecStart={tmp_path / 'env'}/bin/edgeds run" in unit
        assert (tmp_path / "root" / "etc/edgeds/edgeds.env").exists()


def unit_commands() -> list[list[str]]:
    lines = (DEPLOY / "edgeds.service").read_text().splitlines()
    return [line.partition("=")[2].split() for line in lines if line.startswith(("ExecStart", "ExecStartPre"))]


def test_the_unit_calls_commands_that_exist_with_its_own_settings() -> None:
    settings = dict(
        line.split("=", 1) for line in (DEPLOY / "edgeds.env").read_text().splitlines() if line[:1] not in ("#", "")
    )
    commands = unit_commands()
    assert [command[1] for command in commands] == ["build", "run"]
    for command in commands:
        words = [re.sub(r"\$\{?(\w+)\}?", lambda match: settings[match.group(1)], word) for word in command[2:]]
        build_parser(command[1]).parse_args([word for word in words if word])


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "edgeds.service").read_text().replace("/opt/edgeds/bin/edgeds", "/bin/true")
    (tmp_path / "edgeds.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "edgeds.service")], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in done.stderr.splitlines() if "edgeds.service" in line]
    assert complaints == []


def test_the_dockerfile_names_stages_and_sources_that_exist() -> None:
    text = (DEPLOY / "Dockerfile.jetson").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert {"base-jp6", "base-jp7", "wheel"} == set(stages)
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    for version in ("6", "7"):
        used = re.findall(r"^FROM (base-jp\$\{JETPACK\})", text, re.MULTILINE)
        assert len(used) == 2
        assert f"base-jp{version}" in stages
    for name in re.findall(r"\$\{(\w+)\}", text):
        assert re.search(rf"^ARG {name}\b", text, re.MULTILINE), name
    assert "ENTRYPOINT" in text
    assert "USER edgeds" in text
