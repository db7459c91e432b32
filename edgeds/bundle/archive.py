"""Bundles as zip files: deterministic packing, bounded and checked unpacking."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from edgeds.bundle.manifest import (
    ENGINES_FOLDER,
    MANIFEST_NAME,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    MAX_SIGNATURE_BYTES,
    SIGNATURE_NAME,
    Manifest,
    parse_manifest,
    read_manifest,
)
from edgeds.errors import BundleError, SpecError
from edgeds.files import ZIP_ERRORS, atomic_dir, open_regular, parse_json, real_path, unzip_to, zip_dir
from edgeds.progress import track

MAX_BUNDLE_BYTES = 16 << 30


def zip_bundle(folder: str | Path, archive: str | Path, *, quiet: bool = True) -> Path:
    """Check a bundle folder and pack it; equal bundles give equal archives. Returns ``archive``.

    ``engines/`` is left out: a plan belongs to one device and is rebuilt from the ONNX elsewhere.
    """
    from edgeds.bundle.reader import open_bundle

    folder, archive = Path(folder), Path(archive)
    if not folder.is_dir():
        raise BundleError(f"{folder}: not a bundle folder")
    if archive.is_dir():
        raise SpecError(f"{archive}: is a folder; give the path of the zip file to write")
    with open_bundle(folder, quiet=quiet) as bundle:
        if real_path(archive).is_relative_to(bundle.root):
            raise SpecError(f"{archive}: lies inside the bundle; write the zip somewhere else")
        signed = [SIGNATURE_NAME] if (bundle.root / SIGNATURE_NAME).is_file() else []
        names = [MANIFEST_NAME, *signed, *sorted(bundle.manifest.files)]
        zip_dir(bundle.root, archive, names=track(names, what="packing", unit="file", quiet=quiet))
    return archive


def unzip_bundle(
    archive: str | Path, folder: str | Path, *, quiet: bool = True, max_bytes: int = MAX_BUNDLE_BYTES
) -> Path:
    """Unpack a zipped bundle into a new folder and check it; a bad archive leaves nothing behind."""
    from edgeds.bundle.check import compare_files
    from edgeds.bundle.signature import check_signature, find_trust, refuse_signature

    archive, folder = Path(archive), Path(folder)
    if not archive.is_file():
        what = "not a zip file; name the .zip itself" if archive.exists() else "no such file"
        raise BundleError(f"{archive}: {what}")
    with atomic_dir(folder) as temporary:
        unpack_checked(archive, temporary, max_bytes=max_bytes)
        root = temporary.resolve()
        trust = find_trust()
        refuse_signature(check_signature(root, trust=trust), trust=trust, where=archive)
        for problem in compare_files(root, read_manifest(root), quiet=quiet):
            raise BundleError(f"{archive}: {problem}")
    return folder


def unpack_checked(archive: Path, folder: Path, *, max_bytes: int) -> None:
    """Unpack into an existing folder, never more than the manifest lists, the limit allows or the disk holds.

    The manifest is read first, so that an archive that lies about itself is refused before it fills the disk.
    Entries under ``engines/`` are left out. Checksums are compared by the caller.
    """
    manifest, manifest_bytes = peek_manifest(archive)
    listed = sum(entry.bytes for entry in manifest.files.values()) + manifest_bytes
    free = shutil.disk_usage(folder).free
    if listed > max_bytes:
        raise BundleError(f"{archive}: unpacks to {listed:,} bytes, more than the {max_bytes:,} allowed")
    if listed > free:
        raise BundleError(f"{archive}: unpacks to {listed:,} bytes, only {free:,} are free at {folder.parent}")
    # The manifest lists neither itself nor its signature.
    unzip_to(archive, folder, max_bytes=listed + MAX_SIGNATURE_BYTES, max_files=MAX_FILES + 2, skip=_is_engine)


def _is_engine(name: str) -> bool:
    return name.split("/")[0] == ENGINES_FOLDER


def peek_manifest(archive: Path) -> tuple[Manifest, int]:
    """Read and check the manifest of a zip without unpacking it; also gives its size in bytes."""
    try:
        with open_regular(archive) as raw, zipfile.ZipFile(raw) as packed:
            names = packed.namelist()
            if MANIFEST_NAME not in names:
                inner = next((name for name in names if name.endswith(f"/{MANIFEST_NAME}")), None)
                hint = f"; found {inner!r}: zip the contents of the folder, or use 'edgeds bundle zip'" if inner else ""
                raise BundleError(f"{archive}: not a bundle, it has no {MANIFEST_NAME} at its top{hint}")
            with packed.open(MANIFEST_NAME) as stream:
                text = stream.read(MAX_MANIFEST_BYTES + 1)
    except ZIP_ERRORS as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BundleError(f"{archive}: not a readable zip: {reason}") from error
    where = f"{archive}/{MANIFEST_NAME}"
    if len(text) > MAX_MANIFEST_BYTES:
        raise BundleError(f"{where}: larger than the {MAX_MANIFEST_BYTES:,} bytes allowed")
    try:
        return parse_manifest(parse_json(text, where=where), where=where), len(text)
    except SpecError as error:
        raise BundleError(str(error)) from error
