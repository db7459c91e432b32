"""Write a bundle: all files and the manifest appear together or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeds.bundle.manifest import MANIFEST_NAME, SIGNATURE_NAME, FileEntry, Manifest, check_names
from edgeds.bundle.reader import Bundle
from edgeds.errors import BundleError, SpecError
from edgeds.files import atomic_dir, write_json
from edgeds.specs import to_json


def write_bundle(
    out: str | Path, *, files: Mapping[str, str | Path | bytes], manifest: Manifest, replace: bool = False
) -> Path:
    """Write a bundle folder and return its path.

    ``files`` maps names inside the bundle to a file to copy or to its content. ``manifest.files`` is computed here.
    The folder appears only when it is complete. An existing non-empty ``out`` is an error unless ``replace``.
    Raises SpecError for unsafe or missing names, unreadable sources, and models that are not among the files.
    """
    out = Path(out)
    try:
        check_names(files, where="bundle")
    except BundleError as error:
        raise SpecError(str(error)) from error
    for variant, name in manifest.models.items():
        if name not in files:
            raise SpecError(f"bundle: model {variant!r} names {name!r}, which is not among the files to write")
    with atomic_dir(out, replace=replace) as temporary:
        entries = {name: _put(temporary / name, files[name]) for name in sorted(files)}
        write_json(temporary / MANIFEST_NAME, to_json(dataclasses.replace(manifest, files=entries)))
    return out


def change_manifest(bundle: Bundle, **changes: Any) -> Manifest:
    """Replace fields of an opened bundle folder's manifest, atomically. Its files stay as they are.

    Raises BundleError for a zip, for a signed bundle (its signature would fit no more), and when it cannot be written.
    """
    if bundle.source.is_file():
        raise BundleError(f"{bundle.source}: is a zip; unzip it, change the folder and zip that")
    if bundle.signature.status != "unsigned":
        raise BundleError(
            f"{bundle.source}: is signed, and a change would end that; remove {SIGNATURE_NAME}, change it, sign again"
        )
    manifest = dataclasses.replace(bundle.manifest, **changes)
    try:
        write_json(bundle.root / MANIFEST_NAME, to_json(manifest))
    except OSError as error:
        raise BundleError(f"{bundle.source}: the manifest cannot be written: {error.strerror or error}") from error
    return manifest


def _put(target: Path, content: str | Path | bytes) -> FileEntry:
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        target.write_bytes(content)
        return FileEntry(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    source_path = Path(content)
    if not source_path.is_file():
        raise SpecError(f"bundle: {content} is not a file that can be read; it was meant to become {target.name}")
    digest = hashlib.sha256()
    size = 0
    with source_path.open("rb") as source, target.open("xb") as sink:
        # Hash what is written, not what a second read of the source might give.
        while block := source.read(1 << 20):
            digest.update(block)
            size += len(block)
            sink.write(block)
    return FileEntry(sha256=digest.hexdigest(), bytes=size)
