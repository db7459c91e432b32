"""The repository keeps its promises: the CI command, pinned constraints, working links, no weights."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from edgeds.cli.main import VERBS
from edgeds.zoo import list_models

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def ci_command(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(folder / ".ci" / "run"), "--print-command"], capture_output=True, text=True, timeout=30)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    done = ci_command(ROOT)
    assert done.returncode == 0, done.stderr
    command = done.stdout.strip()
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    for part in ("venv", "-c constraints.txt", "[dev]", "pytest"):
        assert part in command


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# x\n```\nnot this\n```\n<!-- ci: test -->\n```bash\none\ntwo\n```\n```\nnor this\n```\n", "one\ntwo\n"),
        ("<!-- ci: test -->\n\nsome text\n```\nx && y\n```", "x && y\n"),
        ("```\nno marker\n```\n", None),
        ("<!-- ci: test -->\n```\n```\n", None),
        ("<!-- ci: test -->\n```\nnever closed\n", None),
    ],
)
def test_ci_finds_the_command_by_its_marker(tmp_path: Path, text: str, expected: str | None) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    (tmp_path / ".ci" / "run").chmod(0o755)
    (tmp_path / "README.md").write_text(text)
    done = ci_command(tmp_path)
    if expected is None:
        assert done.returncode != 0
        assert "ci: test" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, expected)


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def pins_for(python: str) -> dict[str, Requirement]:
    """Pins that hold for one Python version; a name pinned twice for it fails."""
    found: dict[str, Requirement] = {}
    for pin in constraints():
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            name = pin.name.lower().replace("_", "-")
            assert name not in found, f"{name} is pinned twice for Python {python}"
            found[name] = pin
    return found


def declared() -> list[Requirement]:
    """What setup.py asks for in its base and its dev extra, read without running setup()."""
    script = (
        "import setuptools, runpy, json\n"
        "found = {}\n"
        "setuptools.setup = lambda **options: found.update(options)\n"
        "runpy.run_path('setup.py')\n"
        "print(json.dumps(found['install_requires'] + found['extras_require']['dev']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return [Requirement(text) for text in json.loads(done.stdout)]


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_pin_what_the_test_command_installs(python: str) -> None:
    pins = pins_for(python)
    for requirement in declared():
        pin = pins[requirement.name.lower().replace("_", "-")]
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert requirement.specifier.contains(specifier.version), f"{pin} is outside {requirement}"


def test_extras_that_later_parts_fill_exist() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    for extra in ("cpu", "vision", "jetson", "workshop", "rtx", "serve", "fleet", "demo", "dev"):
        assert f'"{extra}":' in text


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_pictures_resolve(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)", prose) + re.findall(r'<img[^>]+src="([^"]+)"', prose)
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{document.name}: {link} does not exist"
        assert target.is_relative_to(ROOT), f"{document.name}: {link} leaves the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{document.name}: {link} has no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_in_code_blocks_exist(document: Path) -> None:
    for block in re.findall(r"```(?:bash|sh|console|)\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        for verb in re.findall(r"^\s*(?:\$ )?(?:\S*/)?edgeds ([a-z][\w-]*)", block, re.MULTILINE):
            assert verb in VERBS, f"{document.name}: there is no 'edgeds {verb}'"


def test_the_page_of_models_agrees_with_the_zoo() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for entry in list_models():
        assert f"| `{entry.name}` |" in text
        assert f"{entry.bytes / 1e6:.1f} MB" in text
        for file in entry.files:
            assert f"`{file.wheel.requirement}`" in text
            assert file.license is None or f"| `{file.name}` |" in text


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], capture_output=True, cwd=ROOT, timeout=60, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.decode("utf-8").split("\0") if name]


def test_no_weights_engines_or_datasets_are_tracked() -> None:
    forbidden = {".onnx", ".engine", ".plan", ".gguf", ".safetensors", ".pt", ".pth", ".bin", ".whl", ".npz", ".npy"}
    wrong = [path for path in tracked_files() if path.suffix.lower() in forbidden or path.name.endswith(".onnx.data")]
    assert wrong == []


def test_tracked_files_are_small() -> None:
    large = {path.name: path.stat().st_size for path in tracked_files() if path.is_file() and path.stat().st_size > 2e6}
    assert large == {}


def test_modules_and_functions_stay_small() -> None:
    """House style: one job each. Longer than this, it has two."""
    long = []
    for path in sorted((ROOT / "edgeds").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT).as_posix()
        if len(text.splitlines()) > 350:
            long.append(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                long += [f"{name}:{node.lineno} {node.name}"] if lines > 70 else []
    assert long == []
