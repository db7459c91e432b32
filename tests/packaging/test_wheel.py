"""The wheel holds the package and nothing else, and its metadata forces nothing onto a device."""

import configparser
import email.message
import email.parser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the sources, next to folders that must stay out, without network."""
    work = tmp_path_factory.mktemp("wheel")
    tree = work / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "edgeds", tree / "edgeds", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("tests", "recipes", "calibration", "benchmarks", "deploy"):
        (tree / folder).mkdir()
        (tree / folder / "__init__.py").touch()
        (tree / folder / "weights.onnx").touch()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(work / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = (work / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (member,) = [entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}")]
    return wheel.read(member).decode("utf-8")


def core(wheel: zipfile.ZipFile) -> email.message.Message:
    return email.parser.Parser().parsestr(metadata(wheel, "METADATA"))


def test_wheel_holds_exactly_the_package(wheel: zipfile.ZipFile) -> None:
    """Both ways: a module that is forgotten (a folder without __init__.py) and a file that has no business there."""
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    source = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "edgeds").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed - source == set(), "in the wheel, not in the source"
    assert source - packed == set(), "in the source, not in the wheel"


def test_top_level_is_one_name(wheel: zipfile.ZipFile) -> None:
    assert metadata(wheel, "top_level.txt") == "edgeds\n"


def test_console_script_points_at_a_function(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(metadata(wheel, "entry_points.txt"))
    assert dict(parser["console_scripts"]) == {"edgeds": "edgeds.cli.main:main"}
    from edgeds.cli.main import main

    assert callable(main)


def test_wheel_is_for_any_platform_and_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    assert wheel.filename is not None
    assert wheel.filename.endswith("-py3-none-any.whl")
    assert any("LICENSE" in name for name in wheel.namelist())
    data = core(wheel)
    assert data["Requires-Python"] == ">=3.10"
    assert data["Description-Content-Type"] == "text/markdown"


def test_no_extra_brings_torch_or_tensorrt_to_a_jetson_and_the_base_is_light(wheel: zipfile.ZipFile) -> None:
    """A Jetson has both from JetPack. The rtx extra alone brings TensorRT-RTX, which exists for x86-64 PCs only, and
    training brings torch to everything but a Jetson."""
    everything = core(wheel).get_all("Requires-Dist") or []
    rtx = [requirement for requirement in everything if requirement.startswith(("tensorrt-rtx", "tensorrt_rtx"))]
    assert len(rtx) == 2
    for requirement in rtx:
        assert re.search(r"""platform_machine == ["']x86_64["']""", requirement)
        assert re.search(r"""extra == ["']rtx["']""", requirement)
    torch = [requirement for requirement in everything if requirement.startswith("torch")]
    assert len(torch) == 2
    for requirement in torch:
        assert re.search(r"""platform_machine != ["']aarch64["']""", requirement)
        assert re.search(r"""extra == ["'](train|dev)["']""", requirement)
    requirements = [requirement for requirement in everything if requirement not in (*rtx, *torch)]
    names = {requirement.replace("(", " ").split(">")[0].split(";")[0].strip().lower() for requirement in requirements}
    assert not {name for name in names if name.startswith(("torch", "tensorrt", "ultralytics"))}
    base = [requirement for requirement in requirements if "extra ==" not in requirement]
    assert {requirement.split(">")[0].strip() for requirement in base} == {"numpy", "tqdm"}


def test_extras_keep_their_names(wheel: zipfile.ZipFile) -> None:
    extras = set(core(wheel).get_all("Provides-Extra") or [])
    assert {"cpu", "vision", "jetson", "workshop", "rtx", "serve", "fleet", "demo", "dev"} <= extras
