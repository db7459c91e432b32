"""The folder a job writes to: refused before the long work when it cannot be used, and one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from edgeds.errors import BundleError, SpecError
from edgeds.files import real_path, remove_partial


@contextlib.contextmanager
def claim_folder(out: Path, *, replace: bool, ours: Collection[str], what: str) -> Iterator[None]:
    """Hold ``out`` for one writer while the block runs.

    ``ours`` are the names that a folder written earlier may hold: with ``replace`` only such a folder is given up, so
    that a slip of the hand does not cost a folder of photographs. ``what`` names it for the message. Raises SpecError
    when ``out`` is taken or no place for a folder, BundleError when it cannot be written or another process is writing
    it. Parent folders that this made are removed again when the block fails.
    """
    check_folder(out, replace=replace, ours=ours, what=what)
    missing = [path for path in out.absolute().parents if not path.exists()]
    try:
        with writing_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            with writing_errors(out):
                remove_partial(out)
            check_folder(out, replace=replace, ours=ours, what=what)  # another writer may just have finished
            yield
    except BaseException:
        for path in missing:  # innermost first
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def check_folder(out: Path, *, replace: bool, ours: Collection[str], what: str) -> None:
    """Raise SpecError or BundleError when ``out`` cannot become a new folder. Touches nothing."""
    if out.suffix.lower() == ".zip":
        raise SpecError(f"{out}: names a zip; a folder is written, pack it afterwards with: edgeds bundle zip")
    with writing_errors(out):
        if real_path(out) in (Path.cwd(), *Path.cwd().parents):
            raise SpecError(f"{out}: is the current folder or one above it; name a folder below it")
        if out.exists() and not out.is_dir():
            raise SpecError(f"{out} exists and is not an empty directory; choose another path or remove it first")
        held = sorted(item.name for item in out.iterdir()) if out.is_dir() else []
        if held and not replace:
            raise SpecError(f"{out} exists and is not an empty directory; choose another path, or pass --replace")
        foreign = [name for name in held if name not in ours]
        if foreign:
            raise SpecError(f"{out}: holds {foreign[0]!r}, which is not of {what}; it is not replaced, remove it first")
        place = next(path for path in out.absolute().parents if path.exists())
    with writing_errors(place, named=False), tempfile.TemporaryDirectory(prefix=".edgeds-", dir=place):
        pass  # whether this place takes new folders shows only by making one


@contextlib.contextmanager
def writing_errors(place: Path, *, named: bool = True) -> Iterator[None]:
    """Turn the file system's refusals (full, read-only, no permission) into one BundleError that names the place.

    ``named`` prefers the name in the error, where that is one the user knows.
    """
    try:
        yield
    except OSError as error:
        hint = "free some space there, or" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check it, or"
        shown = error.filename if named and isinstance(error.filename, str) else place
        raise BundleError(
            f"{shown}: cannot be read or written: {error.strerror or error}; {hint} choose another place"
        ) from error


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold an advisory lock on a hidden file beside ``out``; the system frees it when the process dies."""
    lock = out.with_name(f".{out.name}.lock")
    with writing_errors(lock):
        handle = _take(lock, out)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _take(lock: Path, out: Path) -> int:
    while True:
        handle = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(handle)
                raise BundleError(f"{out}: another edgeds is writing it; wait for it or choose another path") from error
            return handle  # a file system without locks: the final rename is still atomic
        # The holder removes the file when it is done: a lock on a removed file guards nothing.
        if lock.exists() and os.fstat(handle).st_ino == lock.stat().st_ino:
            return handle
        os.close(handle)
