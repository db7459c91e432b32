"""What is on the device at the other end, and whether a bundle can be pushed there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.bundle import Bundle
from edgeds.engines.jetson import Jetson, parse_jetson
from edgeds.engines.push_scripts import MARKER, PROBE
from edgeds.engines.push_ssh import Remote, Target
from edgeds.engines.push_wheel import code_digest
from edgeds.engines.trt_module import parse_version
from edgeds.errors import DeviceError, SpecError

OLDEST_PYTHON = (3, 10)
OLDEST_TENSORRT = (10, 3)
SPARE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class PushCheck:
    """One thing that was looked at on the way, in the form of ``edgeds doctor``."""

    name: str
    ok: bool
    required: bool
    message: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the probe found on the device. ``files``: name to bytes of what lies in ``folder`` already."""

    home: str
    folder: str
    problem: str | None
    files: Mapping[str, int]
    free_bytes: int
    python: str
    machine: str
    rsync: bool
    jetson: Jetson | None
    interpreter: str
    edgeds: str | None
    same_code: bool
    tensorrt: str | None


def check_remote_dir(remote_dir: str | None) -> None:
    """Raise SpecError for a remote folder that cannot be meant."""
    if remote_dir is None:
        return
    if not remote_dir.strip() or any(ord(char) < 32 or ord(char) == 127 for char in remote_dir):
        raise SpecError(f"--remote-dir {remote_dir!r}: expected the path of a folder")
    if Path(remote_dir).name in ("", "~", ".", ".."):
        raise SpecError(
            f"--remote-dir {remote_dir!r}: name the bundle's own folder, since others' files there are removed"
        )


def probe(remote: Remote, *, remote_dir: str | None, name: str, make: bool) -> Facts:
    """Ask the device what it is and what lies in the folder; ``make`` creates the folder."""
    arguments = ["python3", "-", remote_dir or "", name, "make" if make else "look"]
    data = run_script(remote, arguments, script=PROBE, what="looking at the device")
    digest = code_digest()
    found = data["found"]
    chosen = next((item for item in found if item["digest"] == digest), found[0])
    return Facts(
        home=data["home"],
        folder=data["folder"],
        problem=data["problem"],
        files=data["files"],
        free_bytes=data["free_bytes"],
        python=data["python"],
        machine=data["machine"],
        rsync=data["rsync"],
        jetson=parse_jetson(data["compatible"], data["release"]),
        interpreter=chosen["python"],
        edgeds=chosen["version"],
        same_code=chosen["digest"] == digest,
        tensorrt=chosen["tensorrt"] or found[-1]["tensorrt"],
    )


def check_device(facts: Facts, *, target: Target, bundle: Bundle, build: bool) -> list[PushCheck]:
    """Refuse what cannot work, with the way out; note what is there. Nothing has been changed on the device yet."""
    jetson = facts.jetson
    board = jetson.describe() if jetson is not None else f"{facts.machine}, not a Jetson"
    if _numbers(facts.python)[:2] < OLDEST_PYTHON:
        raise DeviceError(
            f"{target}: {board} has Python {facts.python}; edgeds needs 3.10 or newer, which JetPack 6 and later bring"
        )
    if not facts.rsync:
        raise DeviceError(f"{target}: rsync is not installed there; sudo apt install rsync")
    if jetson is not None and build:
        if facts.tensorrt is None:
            raise DeviceError(
                f"{target}: TensorRT's Python package is not there ({board}); sudo apt install python3-libnvinfer, or "
                "push with --no-build"
            )
        if parse_version(facts.tensorrt) < OLDEST_TENSORRT:
            raise DeviceError(
                f"{target}: {board} has TensorRT {facts.tensorrt}; engines need 10.3 or newer, which JetPack 6.1 and "
                "later bring; upgrade the board, or push with --no-build"
            )
    check_folder(facts, target)
    _check_space(bundle, facts, target)
    have = facts.tensorrt is not None
    tensorrt = facts.tensorrt or "not there, so the bundle runs on the CPU"
    return [
        PushCheck(name="device", ok=True, required=True, message=board),
        PushCheck(name="python", ok=True, required=True, message=facts.python),
        PushCheck(name="tensorrt", ok=have, required=False, message=tensorrt),
    ]


def check_folder(facts: Facts, target: Target) -> None:
    """Raise DeviceError for a folder on the device that must not or cannot be written."""
    if facts.problem == "foreign":
        raise DeviceError(
            f"{target}: {facts.folder} holds files but is not a bundle; files that are not in the bundle would be "
            "removed there, so choose another --remote-dir"
        )
    if facts.problem is not None:
        raise DeviceError(f"{target}: {facts.folder}: {facts.problem}; choose another --remote-dir")


def _check_space(bundle: Bundle, facts: Facts, target: Target) -> None:
    files = bundle.manifest.files
    changed = sum(entry.bytes for name, entry in files.items() if facts.files.get(name) != entry.bytes)
    largest = max(files[name].bytes for name in bundle.manifest.models.values())
    need = changed + largest + SPARE_BYTES if changed else 0
    if need > facts.free_bytes:
        raise DeviceError(
            f"{target}: not enough room for {facts.folder}: {need >> 20} MiB are needed for the bundle and its engine, "
            f"{facts.free_bytes >> 20} MiB are free; free some, or choose a --remote-dir on another disk"
        )


def run_script(remote: Remote, arguments: Sequence[str], *, script: str, what: str) -> dict[str, Any]:
    """Run a script through the device's python3 and read the line behind the marker."""
    done = remote.run(arguments, text_in=script)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARKER)]
    if not lines:
        reason = last_line(done.stderr) or f"exit code {done.returncode}"
        hint = "; sudo apt install python3" if done.returncode == 127 else ""
        raise DeviceError(f"{remote.target}: {what} failed: {reason}{hint}")
    data: dict[str, Any] = json.loads(lines[-1].removeprefix(MARKER))
    return data


def last_line(text: str) -> str:
    """The last line that is not empty, or nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
