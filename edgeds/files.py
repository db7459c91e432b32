"""Files done safely: atomic writes, hashing, strict JSON, archive extraction, cache locations."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import lzma
import os
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from edgeds.errors import BundleError, SpecError

MAX_JSON_BYTES = 64 << 20
_PARTIAL = ".edgeds-"
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def cache_dir() -> Path:
    """Where fetched models are kept: ``$EDGEDS_CACHE``, else ``$XDG_CACHE_HOME/edgeds``, else ``~/.cache/edgeds``."""
    if os.environ.get("EDGEDS_CACHE"):
        return Path(os.environ["EDGEDS_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "edgeds"
    except RuntimeError as error:  # a user without an entry in the password file and without $HOME, as in containers
        raise SpecError("no home directory for the cache of edgeds; set EDGEDS_CACHE to a folder") from error


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, as ``path.open("rb")``, but only a regular one.

    A named pipe would make the caller wait for ever for a writer, and a device may have no end; both are an OSError
    that says so, at once.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, handle)
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file, but a pipe or device; copy the data to a file", str(path))
        on_failure.pop_all()
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file; see ``open_regular``."""
    with open_regular(path) as stream:
        return stream.read()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a regular file, read in blocks."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def real_path(path: Path) -> Path:
    """The absolute path with links followed, as ``Path.resolve``, which some Pythons let fail on a loop of links."""
    return Path(os.path.realpath(path))


def refuse_special(target: Path) -> None:
    """Raise SpecError when a pipe, device or socket stands where a file is to be written.

    A rename into place would replace it, and with enough rights that takes ``/dev/null`` away from the whole machine.
    """
    try:
        mode = target.lstat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
        raise SpecError(f"{target}: is a pipe or device, which is not replaced; name a regular file")


@contextlib.contextmanager
def _naming(target: Path, temporary: Path | None) -> Iterator[None]:
    """Let errors of the file system name what was to be written, not ``temporary`` (None: no file outlives the error).

    A full disk comes without any name from write().
    """
    try:
        yield
    except OSError as error:
        unnamed = error.filename is None and error.errno in _DISK_ERRORS
        if not unnamed and temporary is not None and str(error.filename) != str(temporary):
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; rename it into place on success, remove it on any failure.

    The temporary name keeps the suffix of the target, since writers choose formats by it. Raises SpecError when
    ``target`` is a pipe or device.
    """
    refuse_special(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _naming(target, None):
        handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with _naming(target, temporary):
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

    An existing non-empty folder is a SpecError unless ``replace``, also when it appears meanwhile; with ``replace``
    the old one stays until the new one is complete. What is no folder is never replaced. A link to a folder is
    followed.
    """
    target = real_path(target) if target.is_symlink() else target
    if os.path.lexists(target) and (not target.is_dir() or (not replace and any(target.iterdir()))):
        raise SpecError(_taken_text(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    with _naming(target, None):
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}{_PARTIAL}", dir=target.parent))
    try:
        with _naming(target, temporary):
            yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        _place_dir(temporary, target, replace=replace)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _place_dir(temporary: Path, target: Path, *, replace: bool) -> None:
    try:
        temporary.rename(target)  # onto nothing or an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not replace:
            raise SpecError(_taken_text(target)) from error
    else:
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}{_PARTIAL}old-", dir=target.parent))
    try:
        target.rename(old / "old")
        temporary.rename(target)
    finally:
        if not target.exists() and (old / "old").exists():  # failed or interrupted between the two
            (old / "old").rename(target)
        shutil.rmtree(old, ignore_errors=True)


def remove_partial(target: Path) -> None:
    """Remove what killed writers of the folder ``target`` left beside it; only for who holds a lock on writing it.

    An old folder that was set aside by one killed before its new folder was in place comes back.
    """
    for left in target.parent.glob(glob.escape(f".{target.name}{_PARTIAL}") + "*"):
        if not os.path.lexists(target) and left.name.startswith(f".{target.name}{_PARTIAL}old-"):
            with contextlib.suppress(FileNotFoundError):
                (left / "old").rename(target)
        shutil.rmtree(left, ignore_errors=True)


def _taken_text(target: Path) -> str:
    return f"{target} exists and is not an empty directory; choose another path or remove it first"


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically, keys in the given order, a newline at the end; NaN and infinity are refused."""
    try:
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (ValueError, TypeError, RecursionError) as error:
        raise SpecError(f"{path}: the data cannot be written as JSON: {error}") from error
    write_text(path, text + "\n")


def parse_json(text: bytes, *, where: str) -> Any:
    """Parse strict JSON: UTF-8, no NaN or infinity, no key twice in one object. ``where`` names it in the SpecError."""
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: not valid JSON: {error}") from error


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read JSON of bounded size; a missing, oversized or malformed file is a SpecError that names it."""
    try:
        with open_regular(path) as stream:
            text = stream.read(max_bytes + 1)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(text) > max_bytes:
        raise SpecError(f"{path}: more than the {max_bytes / (1 << 20):.3g} MiB of JSON allowed")
    return parse_json(text, where=str(path))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} appears twice in one object")
    return values


def is_safe_member(name: str) -> bool:
    """Whether an archive or manifest entry is a plain relative path that stays inside its folder.

    One trailing slash (a folder entry) is allowed. Control characters, backslashes, drive letters, empty, ``.`` and
    ``..`` parts, parts above 255 bytes and text that is not valid Unicode are not.
    """
    try:
        parts = name.removesuffix("/").encode("utf-8").split(b"/")
    except UnicodeEncodeError:
        return False
    return (
        all(0 < len(part) <= 255 and part not in (b".", b"..") for part in parts)
        and len(name) <= 4096
        and b":" not in parts[0]
        and not any(char == "\\" or ord(char) < 32 or ord(char) == 127 for char in name)
    )


def zip_dir(folder: Path, archive: Path, *, names: Iterable[str] | None = None) -> None:
    """Pack a folder into a zip, entries with a fixed time and mode, so equal folders give equal archives.

    ``names`` picks the files and their order; without it all regular files go in, sorted, links left out.
    """
    if names is None:
        found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        names = sorted(path.relative_to(folder).as_posix() for path in found)
    with atomic_path(archive) as temporary, zipfile.ZipFile(temporary, "w") as packed:
        for name in names:
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            with (folder / name).open("rb") as source, packed.open(info, "w", force_zip64=True) as sink:
                shutil.copyfileobj(source, sink, 1 << 20)


def unzip_to(
    archive: Path,
    folder: Path,
    *,
    max_bytes: int,
    max_files: int = 10_000,
    skip: Callable[[str], bool] | None = None,
) -> None:
    """Unpack a zip into ``folder`` (which must exist); entries for which ``skip(name)`` is true are left out.

    Raises BundleError for anything that is not a zip, for entries that leave the folder, for links and devices, for
    encrypted entries, for duplicate names, and when the entries are more than ``max_files`` or unpack to more than
    ``max_bytes`` (counted while reading, the sizes in the headers are not trusted).
    """
    try:
        with open_regular(archive) as stream, zipfile.ZipFile(stream) as zf:
            entries = zf.infolist()
            if len(entries) > max_files:
                raise BundleError(f"{archive}: {len(entries)} entries, more than the {max_files} allowed")
            seen: set[str] = set()
            left = max_bytes
            for entry in entries:
                _check_entry(archive, entry, seen)
                if skip is not None and skip(entry.filename):
                    continue
                target = folder / entry.filename
                if entry.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with zf.open(entry) as source, target.open("xb") as sink:
                    while block := source.read(1 << 20):
                        left -= len(block)
                        if left < 0:
                            raise BundleError(f"{archive}: unpacks to more than the {max_bytes:,} bytes allowed")
                        sink.write(block)
    except ZIP_ERRORS as error:
        raise BundleError(f"{archive}: cannot be unpacked: {error}") from error


ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, NotImplementedError, RuntimeError, OSError, ValueError, OverflowError),
)
"""What the zipfile module raises on damaged, encrypted or unsupported archives and on a full disk."""


def _check_entry(archive: Path, entry: zipfile.ZipInfo, seen: set[str]) -> None:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if not is_safe_member(entry.filename) or kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise BundleError(f"{archive}: entry {entry.filename!r} is not a plain file inside the archive")
    if entry.filename in seen:
        raise BundleError(f"{archive}: entry {entry.filename!r} appears twice")
    if entry.flag_bits & 0x1:
        raise BundleError(f"{archive}: entry {entry.filename!r} is encrypted; pack it without a password")
    seen.add(entry.filename)
