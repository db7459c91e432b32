"""What somebody meets who follows the documents word by word: commands that parse, Python that compiles, and a sentence
instead of a traceback where a package is not installed."""

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeds.cli.main import VERBS, build_parser

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("[cr]*/README.md")])
COMMAND = re.compile(r"(?:^|\(|&& )\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?edgeds ([a-z]\w*\b.*)$")


def commands_in(text: str) -> Iterator[list[str]]:
    """The arguments of every ``edgeds VERB ...``; remarks after three spaces or ``#`` and redirections are left out."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if found := COMMAND.search(line):
            yield shlex.split(re.split(r"\s{3,}| #| [>&|]", found[1])[0].removesuffix(")"))


def code_blocks(path: Path, *languages: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for language, block in blocks if language in languages]


def refused(arguments: list[str]) -> str | None:
    """Why the command line does not take these arguments."""
    try:
        build_parser(arguments[0]).parse_args(arguments[1:])
    except SystemExit as error:
        return None if error.code == 0 else f"edgeds {shlex.join(arguments)}"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_in_documents_are_taken(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [found for block in code_blocks(document, "", "bash", "sh") for found in commands_in(block)]
    wrong = list(filter(None, map(refused, commands)))
    assert wrong == [], capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_examples_of_help_are_taken(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = list(commands_in(str(build_parser(verb).epilog)))
    assert commands
    wrong = list(filter(None, map(refused, commands)))
    assert wrong == [], capsys.readouterr().err


def test_commands_are_found_in_every_way_of_writing_them() -> None:
    text = (
        '$ edgeds run a.bundle x.jpg   # look\nmodel=$(edgeds models fetch m)\nEDGEDS_CACHE=/x edgeds inspect "$(m)"\n'
        ".venv/bin/edgeds doctor\nx && .venv/bin/edgeds demo\nedgeds bench b      a remark\nedgeds run b i > f.jsonl\n"
        "edgeds quantize m \\\n    --out x\nthe edgeds package\nabout edgeds run\n"
    )
    expected = "run a.bundle x.jpg|models fetch m|inspect $(m)|doctor|demo|bench b|run b i|quantize m --out x"
    assert [" ".join(command) for command in commands_in(text)] == expected.split("|")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_in_documents_compiles_and_imports_names_that_exist(document: Path) -> None:
    for block in code_blocks(document, "python"):
        compile(block, str(document), "exec")
        for statement in re.findall(r"^from edgeds.* import .*$", block, re.MULTILINE):
            exec(statement, {})


def run_without(packages: tuple[str, ...], *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line where these packages cannot be imported."""
    code = f"""
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {packages!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Missing())
        from edgeds.cli.main import main
        sys.exit(main({list(arguments)!r}))
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "EDGEDS_CACHE": str(cwd / "cache"), "PIP_NO_INDEX": "1"},
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo"],
        ["inspect", "m.onnx"],
        ["quantize", "m.onnx", "--calib", "images", "--out", "q.onnx"],
        ["bundle", "create", "m.onnx", "--task", "detect", "--calib", "images", "--out", "b"],
        ["bundle", "create", "m.onnx", "--task", "detect", "--float-only", "--out", "b"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_workstation_verbs_without_any_extra_name_the_extra(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "m.onnx").write_bytes(b"")
    done = run_without(("onnx", "onnxruntime", "cv2", "pycocotools"), *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'edgeds[workshop]'" in done.stderr
    assert "bug" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "m.onnx"], "something was written first"


@pytest.mark.parametrize("arguments", [["models", "list"], ["doctor"]], ids=" ".join)
def test_verbs_that_need_no_extra_work_without_one(arguments: list[str], tmp_path: Path) -> None:
    done = run_without(("onnx", "onnxruntime", "cv2", "pycocotools"), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
