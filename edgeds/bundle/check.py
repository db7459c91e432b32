"""Compare a bundle folder with its manifest: names, sizes, checksums, nothing extra, nothing outside."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeds.bundle.golden import read_golden
from edgeds.bundle.manifest import (
    ENGINES_FOLDER,
    GOLDEN_NAME,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    FileEntry,
    Manifest,
    read_manifest,
)
from edgeds.bundle.signature import Trust, check_signature, find_trust, refuse_signature
from edgeds.errors import BundleError, EngineMismatch, SpecError
from edgeds.files import sha256_file
from edgeds.progress import track


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a bundle: the file (relative to the bundle) and what is wrong with it."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def verify_bundle(path: str | Path, *, quiet: bool = True, trust: Trust | None = None) -> list[Problem]:
    """Check a bundle folder or zip completely and return every problem found; an empty list means it is sound.

    Checks the manifest, the checksums and sizes, unlisted files, links, the golden samples, the preprocessing digest
    and the signature (``trust`` None: ``find_trust()``). What lies under ``engines/`` is not checked: engines belong to
    one device and are rebuilt where they do not fit. Raises BundleError only when ``path`` does not exist.
    """
    from edgeds.bundle.reader import open_bundle

    path = Path(path)
    trust = trust or find_trust()
    if not path.exists():
        raise BundleError(f"{path}: no such file or folder")
    if path.is_dir():
        try:
            manifest = read_manifest(path)
        except BundleError as error:
            return [_problem(path, MANIFEST_NAME, error)]
        problems = [*_signature_problem(path.resolve(), trust), *compare_files(path.resolve(), manifest, quiet=quiet)]
        return problems or list(_check_contents(path.resolve(), manifest))
    try:
        with open_bundle(path, quiet=quiet, trust=trust) as bundle:
            return list(_check_contents(bundle.root, bundle.manifest))
    except BundleError as error:
        return [_problem(path, path.name, error)]


def _signature_problem(root: Path, trust: Trust) -> Iterator[Problem]:
    try:
        refuse_signature(check_signature(root, trust=trust), trust=trust, where=root)
    except BundleError as error:
        yield _problem(root, SIGNATURE_NAME, error)


def compare_files(root: Path, manifest: Manifest, *, quiet: bool) -> Iterator[Problem]:
    """Yield the differences between the files under ``root`` (a resolved path) and the manifest's list."""
    present = set(_walk(root))
    for name in sorted(present - set(manifest.files)):
        yield Problem(file=name, what="is not listed in the manifest; remove it or write the bundle again")
    # Cheap checks first: hashing a file that has the wrong size would waste the time.
    sound: list[tuple[str, FileEntry]] = []
    for name, entry in sorted(manifest.files.items()):
        problem = _check_file(root, name, entry)
        if problem is None:
            sound.append((name, entry))
        else:
            yield Problem(file=name, what=problem)
    for name, entry in track(sound, what="checking the bundle", unit="file", quiet=quiet):
        try:
            found = sha256_file(root / name)
        except OSError as error:
            yield Problem(file=name, what=f"cannot be read: {error.strerror or error}")
            continue
        if found != entry.sha256:
            yield Problem(file=name, what=f"is damaged: sha256 is {found[:12]}..., listed {entry.sha256[:12]}...")


def _check_file(root: Path, name: str, entry: FileEntry) -> str | None:
    path = root / name
    try:
        resolved = path.resolve(strict=True)
        info = resolved.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        return "is missing" if missing else f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if not resolved.is_relative_to(root):
        return f"is a link that leaves the bundle (to {resolved}); copy the file into the bundle"
    if not stat.S_ISREG(info.st_mode):
        return "is not a regular file"
    if info.st_size != entry.bytes:
        return f"has {info.st_size:,} bytes, listed {entry.bytes:,}"
    return None


def _walk(root: Path) -> Iterator[str]:
    """Files (and links, not followed) under ``root``, by name: all but the manifest, its signature and ``engines/``."""
    for folder, folders, files in os.walk(root, followlinks=False):
        here = Path(folder)
        if here == root and ENGINES_FOLDER in folders:
            folders.remove(ENGINES_FOLDER)
        links = [name for name in folders if (here / name).is_symlink()]
        for name in (*files, *links):
            relative = (here / name).relative_to(root).as_posix()
            if relative not in (MANIFEST_NAME, SIGNATURE_NAME):
                yield relative


def _check_contents(root: Path, manifest: Manifest) -> Iterator[Problem]:
    if GOLDEN_NAME in manifest.files:
        try:
            read_golden(root / GOLDEN_NAME)
        except BundleError as error:
            yield _problem(root, GOLDEN_NAME, error)
    try:
        check_preprocess(manifest)
    except (EngineMismatch, SpecError) as error:
        yield Problem(file=MANIFEST_NAME, what=str(error))


def check_preprocess(manifest: Manifest) -> None:
    """Raise EngineMismatch when the stored preprocessing does not give the digest it was calibrated with."""
    if manifest.preprocess is None:
        return
    from edgeds.preproc import ImagePreprocess
    from edgeds.specs import from_json

    preprocess = from_json(ImagePreprocess, manifest.preprocess, where=f"{MANIFEST_NAME}.preprocess")
    if preprocess.digest() != manifest.preprocess_digest:
        raise EngineMismatch(
            f"the preprocessing in the manifest has digest {preprocess.digest()[:12]}, the bundle was calibrated with "
            f"{str(manifest.preprocess_digest)[:12]}; create the bundle again instead of editing its preprocessing"
        )


def _problem(root: Path, name: str, error: BundleError) -> Problem:
    # The message already names the full path; the problem's own field names the file.
    text = str(error)
    for prefix in (f"{root / name}: ", f"{root}: "):
        text = text.removeprefix(prefix)
    return Problem(file=name, what=text)
