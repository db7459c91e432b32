"""Where installed engines lie, and how several processes share the place.

An engine is a folder ``<fingerprint>/`` with a plan and ``engine.json``, in the bundle's ``engines/`` or, where that
cannot be written, in the user's cache. It appears by one rename, so a folder of that name is always complete. One
process builds an engine at a time; the lock is a kernel file lock, which a killed process loses by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeds.bundle import Bundle
from edgeds.bundle.manifest import ENGINES_FOLDER, MANIFEST_NAME
from edgeds.bundle.signature import find_trust
from edgeds.engines.engine_manifest import EngineManifest, check_plan, read_engine_manifest
from edgeds.engines.fingerprint import EngineKey
from edgeds.errors import BundleError, EngineMismatch
from edgeds.files import cache_dir, sha256_file

LOGGER = logging.getLogger("edgeds.engines")
POLL_S = 0.2
OVERDUE_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Store:
    """The folder to install into. ``note`` says why it is not the bundle, when it is not."""

    folder: Path
    note: str | None = None


def store_folders(bundle: Bundle, *, cache: Path | None = None) -> tuple[Path, Path]:
    """(in the bundle, in the user's cache). The cache has one folder for each manifest, whatever its path.

    ``cache`` defaults to ``$EDGEDS_CACHE`` or the user's cache. Neither folder is made here.
    """
    identity = sha256_file(bundle.root / MANIFEST_NAME)[:24]
    return bundle.root / ENGINES_FOLDER, (cache or cache_dir()) / ENGINES_FOLDER / identity


def choose_store(bundle: Bundle, *, cache: Path | None = None, need_bytes: int = 0) -> Store:
    """The bundle's own folder when it can be written and has room, else the user's cache with a note (B59).

    A bundle opened from a zip lives in a temporary folder, so its engines always go to the cache. Raises BundleError
    naming both folders and what is wrong with them when neither will do.
    """
    inside, outside = store_folders(bundle, cache=cache)
    unpacked = bundle.source.is_file()
    reason = "the bundle is a zip file" if unpacked else why_not_writable(inside, need_bytes=need_bytes)
    if reason is None:
        return Store(folder=inside)
    other = why_not_writable(outside, need_bytes=need_bytes)
    if other is not None:
        raise BundleError(
            f"the engine cannot be installed: {inside}: {reason}; {outside}: {other}; make one of them writable or "
            "set EDGEDS_CACHE to a folder with room"
        )
    return Store(folder=outside, note=f"the engine is kept in {outside}, since {reason}")


def why_not_writable(folder: Path, *, need_bytes: int = 0) -> str | None:
    """None when a file can be written in ``folder`` (made if missing) and ``need_bytes`` are free, else the reason."""
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"it cannot be written ({error.strerror or error})"
    if free < need_bytes:
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return f"{need_bytes >> 20} MiB are needed, {free >> 20} MiB are free"
    return None


def engine_folders(bundle: Bundle, *, cache: Path | None = None) -> Iterator[Path]:
    """Every folder that may hold an installed engine of this bundle, the bundle's own first."""
    for folder in store_folders(bundle, cache=cache):
        try:
            found = sorted(folder.iterdir())
        except OSError:
            continue
        yield from (path for path in found if path.is_dir() and not path.name.startswith("."))


def find_engine(
    bundle: Bundle, *, accepts: Callable[[EngineManifest], bool], cache: Path | None = None
) -> tuple[Path, EngineManifest] | None:
    """The best sound engine that ``accepts``: fewest profiles first. Damaged ones are skipped with a warning.

    Where a signature is required, only engines that this user built here count: a plan is code that runs on the GPU,
    and the signature of the bundle does not cover ``engines/``.
    """
    only_own = find_trust().required
    found: list[tuple[Path, EngineManifest]] = []
    for folder in engine_folders(bundle, cache=cache):
        try:
            manifest = read_engine_manifest(folder)
        except EngineMismatch as error:
            LOGGER.warning("skipping a damaged engine: %s", error)
            continue
        if accepts(manifest):
            found.append((folder, manifest))
    for folder, manifest in sorted(found, key=lambda item: (len(item[1].profiles), item[1].plan_bytes)):
        try:
            check_plan(folder, manifest)
        except EngineMismatch as error:
            LOGGER.warning("skipping a damaged engine: %s", error)
            continue
        if only_own and not was_built_here(manifest.plan_sha256, cache=cache):
            LOGGER.warning("skipping %s: a signature is required, and this user did not build it here", folder)
            continue
        return folder, manifest
    return None


def record_built(plan_sha256: str, *, cache: Path | None = None) -> None:
    """Remember in the user's cache that a plan was built here. Best effort: without it an engine is built again."""
    folder = _built_folder(cache)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / plan_sha256).touch()


def was_built_here(plan_sha256: str, *, cache: Path | None = None) -> bool:
    """Whether this user built the plan on this machine."""
    return (_built_folder(cache) / plan_sha256).is_file()


def _built_folder(cache: Path | None) -> Path:
    return (cache or cache_dir()) / ENGINES_FOLDER / "built"


def find_serving(bundle: Bundle, key: EngineKey, *, cache: Path | None = None) -> tuple[Path, EngineManifest] | None:
    """The installed engine that serves ``key``: the same one, else one with wider profiles (B63)."""
    digest = key.digest()
    exact = find_engine(bundle, accepts=lambda manifest: manifest.fingerprint == digest, cache=cache)
    return exact or find_engine(bundle, accepts=lambda manifest: manifest.key().serves(key), cache=cache)


@contextlib.contextmanager
def engine_lock(
    folder: Path, fingerprint: str, *, waiting: Callable[[int | None], None] | None = None
) -> Iterator[bool]:
    """Hold the right to build one engine. Yields whether another process held it first (look again for its engine).

    ``waiting(pid)`` is called once when another process has the lock. A process that died, even by SIGKILL, holds
    nothing: the kernel releases its lock.
    """
    path = folder / f".{fingerprint}.lock"
    had_to_wait = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            had_to_wait = _acquire(descriptor, waiting if not had_to_wait else None) or had_to_wait
            if _is_current(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                try:
                    yield had_to_wait
                finally:
                    with contextlib.suppress(OSError):
                        path.unlink()
                return
        finally:
            os.close(descriptor)


def _acquire(descriptor: int, waiting: Callable[[int | None], None] | None) -> bool:
    """Take the lock; whether somebody else had it before."""
    tries = 0
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return tries > 0
        except BlockingIOError:
            text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            # Its holder writes its number a moment after it has the lock; told once, when it is there or overdue.
            if waiting is not None and (text.isdigit() or tries >= OVERDUE_TRIES):
                waiting(int(text) if text.isdigit() else None)
                waiting = None
            tries += 1
            time.sleep(POLL_S)


def _is_current(path: Path, descriptor: int) -> bool:
    """Whether the locked file is still the one at ``path``: its last holder removes it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def remove_abandoned(store: Path) -> None:
    """Remove what killed builds of any engine left in ``store``; builds that are still under way are not touched."""
    for folder in store.glob(".*-*"):
        lock = store / f"{folder.name.split('-')[0]}.lock"
        if not folder.is_dir():
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its builder lives
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink()
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def staging_folder(store: Path, fingerprint: str) -> Iterator[Path]:
    """A temporary folder that becomes ``store/fingerprint`` when the block ends well, and vanishes otherwise.

    Hold ``engine_lock``: whatever an earlier process that was killed left behind for this engine is removed first. An
    engine of that name stays in place until the new one is complete.
    """
    for stale in store.glob(f".{fingerprint}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{fingerprint}-", dir=store))
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        target = store / fingerprint
        if target.exists():
            target.rename(temporary.with_name(f"{temporary.name}-old"))
        temporary.rename(target)
    finally:
        for rest in (temporary, temporary.with_name(f"{temporary.name}-old")):
            if rest.exists():
                shutil.rmtree(rest, ignore_errors=True)
