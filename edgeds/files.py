"""Files done safely: atomic writes, hashing, strict JSON, archive extraction, cache locations."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from edgeds.errors import BundleError, SpecError

MAX_JSON_BYTES = 64 << 20


def cache_dir() -> Path:
    """Where edgeds keeps fetched models: ``$EDGEDS_CACHE``, else ``$XDG_CACHE_HOME/edgeds``, else ``~/.cache/edgeds``."""
    if os.environ.get("EDGEDS_CACHE"):
        return Path(os.environ["EDGEDS_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edgeds"


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; rename it into place on success, remove it on any failure.

    The temporary name keeps the suffix of the target, since writers choose formats by it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes the file private; give it the mode a plain open() would have.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_dir(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary directory beside ``target``; rename it into place on success, remove it on any failure.

    An existing non-empty target is an error unless ``replace``; with ``replace`` the old one stays until the new
    one is complete.
    """
    if target.exists() and not replace and (not target.is_dir() or any(target.iterdir())):
        raise SpecError(f"{target} exists and is not an empty directory; choose another path or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            target.replace(old / "old") if not target.is_dir() else os.rename(target, old / "old")
            os.rename(temporary, target)
            shutil.rmtree(old)
        else:
            os.rename(temporary, target)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically, keys in the given order, a newline at the end; NaN and infinity are refused."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON of bounded size; a missing, oversized or malformed file is a SpecError that names it."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise SpecError(f"{path}: {size >> 20} MiB of JSON is more than the {MAX_JSON_BYTES >> 20} MiB allowed")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise SpecError(f"{path}: not valid JSON: {error}") from error


def is_safe_member(name: str) -> bool:
    """Whether an archive or manifest entry is a plain relative path that stays inside its folder."""
    path = PurePosixPath(name)
    return (
        bool(name)
        and "\\" not in name
        and "\0" not in name
        and ":" not in path.parts[0]
        and not path.is_absolute()
        and all(part not in ("..", ".", "") for part in name.rstrip("/").split("/"))
    )


def zip_dir(folder: Path, archive: Path) -> None:
    """Pack a folder into a zip, entries sorted and with a fixed time, so equal folders give equal archives."""
    with atomic_path(archive) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as zf:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                info = zipfile.ZipInfo(path.relative_to(folder).as_posix(), date_time=(1980, 1, 1, 0, 0, 0))
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = 0o644 << 16
                with path.open("rb") as source, zf.open(info, "w", force_zip64=True) as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)


def unzip_to(archive: Path, folder: Path, *, max_bytes: int, max_files: int = 10_000) -> None:
    """Unpack a zip into ``folder`` (which must exist).

    Raises BundleError for anything that is not a zip, for entries that leave the folder, for links and devices, for
    duplicate names, and when the entries are more than ``max_files`` or unpack to more than ``max_bytes`` (counted
    while reading, the sizes in the headers are not trusted).
    """
    try:
        with zipfile.ZipFile(archive) as zf:
            entries = zf.infolist()
            if len(entries) > max_files:
                raise BundleError(f"{archive}: {len(entries)} entries, more than the {max_files} allowed")
            seen: set[str] = set()
            left = max_bytes
            for entry in entries:
                kind = stat.S_IFMT(entry.external_attr >> 16)
                if not is_safe_member(entry.filename) or kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise BundleError(f"{archive}: entry {entry.filename!r} is not a plain file inside the archive")
                if entry.filename in seen:
                    raise BundleError(f"{archive}: entry {entry.filename!r} appears twice")
                seen.add(entry.filename)
                target = folder / entry.filename
                if entry.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with zf.open(entry) as source, target.open("xb") as sink:
                    while block := source.read(1 << 20):
                        left -= len(block)
                        if left < 0:
                            raise BundleError(f"{archive}: unpacks to more than the {max_bytes >> 20} MiB allowed")
                        sink.write(block)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise BundleError(f"{archive}: cannot be unpacked: {error}") from error
