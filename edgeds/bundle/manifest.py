"""What ``bundle.json`` says: the manifest, its limits, and how it is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeds.errors import BundleError, SpecError
from edgeds.files import is_safe_member, read_json
from edgeds.specs import Resolution, TensorSpec, from_json

SCHEMA = 1
MANIFEST_NAME = "bundle.json"
SIGNATURE_NAME = "bundle.json.sig"
MAX_SIGNATURE_BYTES = 4 << 10
ENGINES_FOLDER = "engines"
GOLDEN_NAME = "golden.npz"
MAX_MANIFEST_BYTES = 16 << 20
MAX_FILES = 10_000


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Identity of one file: hex SHA-256 and size in bytes."""

    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise SpecError(f"sha256 {self.sha256!r}: expected 64 lower-case hex digits")
        if self.bytes < 0:
            raise SpecError(f"bytes {self.bytes}: a file size cannot be negative")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a device must know before it runs the bundle.

    ``models`` maps a variant (``int8``, ``cpu_int8``, ``float``) to a file of the bundle. ``preprocess`` holds the
    fields of ``preproc.ImagePreprocess`` and ``preprocess_digest`` its digest, so that calibration and serving can be
    compared. ``files`` lists every file except ``bundle.json`` itself and whatever lies under ``engines/``;
    ``write_bundle`` fills it in.
    """

    schema: int = SCHEMA
    task: str
    models: dict[str, str]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    preprocess: dict[str, Any] | None = None
    preprocess_digest: str | None = None
    head: dict[str, Any] | None = None
    names: dict[int, str] = field(default_factory=dict)
    buckets: tuple[Resolution, ...] = ()
    max_batch: int = 1
    precision: str
    calibration: dict[str, Any] | None = None
    accuracy: dict[str, Any] | None = None
    target: dict[str, Any] | None = None
    budget: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    predicted: dict[str, Any] | None = None
    license: str
    provenance: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("task", "precision", "license"):
            if not getattr(self, key).strip():
                raise SpecError(f"{key} is empty")
        if not self.models:
            raise SpecError("models is empty; a bundle holds at least one model")
        if self.max_batch < 1:
            raise SpecError(f"max_batch is {self.max_batch}; need at least 1")
        if (self.preprocess is None) != (self.preprocess_digest is None):
            raise SpecError("preprocess and preprocess_digest belong together; give both or neither")


def parse_manifest(data: Any, *, where: str) -> Manifest:
    """Build a Manifest from JSON. ``where`` names the file. Raises BundleError for every kind of mismatch."""
    if not isinstance(data, Mapping):
        raise BundleError(f"{where}: expected a JSON object, got {type(data).__name__}")
    schema = data.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise BundleError(f"{where}: 'schema' must be a whole number from 1 up, got {schema!r}")
    if schema > SCHEMA:
        raise BundleError(
            f"{where}: written with bundle schema {schema}, this edgeds reads up to {SCHEMA}; upgrade edgeds to open it"
        )
    try:
        manifest = from_json(Manifest, data, where=where)
    except SpecError as error:
        text = str(error)
        raise BundleError(text if text.startswith(where) else f"{where}: {text}") from error
    check_names(manifest.files, where=where)
    for variant, name in manifest.models.items():
        if name not in manifest.files:
            raise BundleError(f"{where}: model {variant!r} names {name!r}, which is not among the listed files")
    return manifest


def check_names(names: Mapping[str, Any], *, where: str) -> None:
    """Raise BundleError when a file name is unsafe, reserved, or a folder of another one."""
    if len(names) > MAX_FILES:
        raise BundleError(f"{where}: {len(names)} files, more than the {MAX_FILES} allowed")
    for name in names:
        if not is_safe_member(name) or name.endswith("/"):
            raise BundleError(f"{where}: file name {name!r} is not a plain path inside the bundle")
        if name == MANIFEST_NAME or name.split("/")[0] == ENGINES_FOLDER:
            raise BundleError(f"{where}: file name {name!r} is reserved; choose another")
        parts = name.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in names:
                raise BundleError(f"{where}: {'/'.join(parts[:depth])!r} is both a file and the folder of {name!r}")


def read_manifest(root: Path) -> Manifest:
    """Read and check ``bundle.json`` of a bundle folder; does not look at the other files."""
    path = root / MANIFEST_NAME
    if path.is_symlink():
        raise BundleError(f"{path}: is a symbolic link; a manifest must be a plain file of the bundle")
    if not path.exists():
        raise BundleError(f"{root}: not a bundle, it has no {MANIFEST_NAME}")
    try:
        data = read_json(path, max_bytes=MAX_MANIFEST_BYTES)
    except SpecError as error:
        raise BundleError(str(error)) from error
    return parse_manifest(data, where=str(path))
