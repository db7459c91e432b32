"""The committed table of TensorRT names is what NVIDIA's bindings say today."""

import json
import shutil
import subprocess
from pathlib import Path

import make_names
import pytest


@pytest.mark.slow
@pytest.mark.tensorrt
def test_the_committed_names_are_those_of_the_bindings(tmp_path: Path) -> None:
    """Downloads about 40 MB of wheels and loads each on a stub library; nothing is built or run."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is needed to compile the stub library")
    try:
        found = make_names.collect(tmp_path)
    except subprocess.CalledProcessError as error:
        if "pip" in error.cmd:
            pytest.skip("the package index cannot be reached, or has no wheels for this Python")
        raise
    assert found == json.loads(make_names.OUT.read_text(encoding="utf-8"))
    assert make_names.OUT.read_text(encoding="utf-8") == make_names.to_text(found)


def test_versions_of_every_supported_line_are_in_the_table() -> None:
    table = json.loads(make_names.OUT.read_text(encoding="utf-8"))
    lines = {version.removeprefix("rtx-").split(".")[0] for version in table["versions"]}
    assert lines == {"10", "11", "1"}
    assert table["versions"] == list(make_names.WHEELS)
