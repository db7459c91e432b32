"""A wheel of the edgeds that is running, from its own files: what a device gets when it has no edgeds or another one.

edgeds is pure Python, so its wheel is a zip of its files and four text files (format: PEP 427, PEP 376). Neither pip
nor a source tree nor a network is needed, and equal code gives an equal wheel.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import edgeds
from edgeds._version import __version__
from edgeds.files import atomic_path

REQUIRES = ("numpy>=1.24", "tqdm>=4.60")
"""The base requirements, as setup.py states them (a test compares)."""

SUFFIXES = (".py", ".typed", ".json")
STAMP = (1980, 1, 1, 0, 0, 0)


def package_files(package: Path | None = None) -> Iterator[tuple[str, Path]]:
    """(name inside the wheel, file) of the package's own files, sorted."""
    root = package or Path(edgeds.__file__).parent
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
            yield f"edgeds/{path.relative_to(root).as_posix()}", path


def code_digest(package: Path | None = None) -> str:
    """SHA-256 over names and content of the package's files: equal for equal code, wherever it is installed."""
    digest = hashlib.sha256()
    for name, path in package_files(package):
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def pack_wheel(folder: Path) -> Path:
    """Write ``edgeds-VERSION-py3-none-any.whl`` into ``folder`` and return its path."""
    info = f"edgeds-{__version__}.dist-info"
    texts = {
        f"{info}/METADATA": "\n".join(
            [
                "Metadata-Version: 2.1",
                "Name: edgeds",
                f"Version: {__version__}",
                "License: Apache-2.0",
                "Requires-Python: >=3.10",
                *(f"Requires-Dist: {requirement}" for requirement in REQUIRES),
                "",
            ]
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: edgeds\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nedgeds = edgeds.cli.main:main\n",
        f"{info}/top_level.txt": "edgeds\n",
    }
    target = folder / f"edgeds-{__version__}-py3-none-any.whl"
    with atomic_path(target) as temporary, zipfile.ZipFile(temporary, "w") as wheel:
        record = []
        contents = [*((name, path.read_bytes()) for name, path in package_files())]
        for name, data in [*contents, *((name, text.encode()) for name, text in texts.items())]:
            _add(wheel, name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}")
        record.append(f"{info}/RECORD,,")
        _add(wheel, f"{info}/RECORD", ("\n".join(record) + "\n").encode())
    return target


def _add(wheel: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, date_time=STAMP)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    wheel.writestr(entry, data)
