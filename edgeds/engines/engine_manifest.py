"""What stands beside an installed plan: ``engine.json`` says what it is, where it runs and what was measured.

Nothing is handed to TensorRT before this file and the plan agree: size, SHA-256, first bytes, TensorRT version, GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeds.engines.fingerprint import DeviceIdentity, EngineKey
from edgeds.engines.golden_check import GoldenResult
from edgeds.engines.plan_file import PLAN_MAGICS, split_engine
from edgeds.errors import EngineMismatch, ModelError, SpecError
from edgeds.files import is_safe_member, read_json, sha256_file, write_json
from edgeds.specs import ShapeRange, from_json, to_json

SCHEMA = 1
ENGINE_MANIFEST_NAME = "engine.json"
PLAN_NAME = "model.plan"
RTX_MAGIC = b"vtrt"
RTX_VERSION_OFFSET = 24
"""Bytes 24 to 27 of a TensorRT-RTX plan are its version; seen on plans of 1.7.1.116 (``01 07 01 74``)."""

MAX_ENGINE_JSON_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class EngineManifest:
    """One installed engine. ``latency_ms``: shapes without the batch (as the batcher names them) -> batch -> ms.

    ``device`` is what it was built for, ``built_on`` the machine in words. ``golden`` is None when no check was
    possible, and ``notes`` then says why. ``options`` are the builder options that differ from their defaults.
    """

    schema: int = SCHEMA
    fingerprint: str
    plan: str = PLAN_NAME
    plan_sha256: str
    plan_bytes: int
    product: str
    tensorrt: str
    edgeds: str
    device: DeviceIdentity
    built_on: str
    model_variant: str
    model_sha256: str
    precision: str
    profiles: tuple[dict[str, ShapeRange], ...]
    options: dict[str, Any]
    build_s: float
    built_utc: str
    golden: GoldenResult | None = None
    latency_ms: dict[str, dict[int, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    build: dict[str, Any] = field(default_factory=dict)

    def key(self) -> EngineKey:
        """The key this engine was built for; its digest must be the fingerprint."""
        profiles: tuple[Mapping[str, ShapeRange], ...] = self.profiles
        return EngineKey(
            model_sha256=self.model_sha256,
            options=self.options,
            profiles=profiles,
            tensorrt=f"{self.product} {self.tensorrt}",
            device=self.device,
        )

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether one profile allows these input shapes (an engine without profiles has fixed shapes: always)."""
        return not self.profiles or any(shapes_inside(profile, shapes) for profile in self.profiles)


def shapes_inside(profile: Mapping[str, ShapeRange], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether every input that the profile names has a shape within its range."""
    for name, allowed in profile.items():
        shape = shapes.get(name)
        if shape is None:
            continue
        if len(shape) != len(allowed.min):
            return False
        if not all(low <= dim <= high for low, dim, high in zip(allowed.min, shape, allowed.max, strict=True)):
            return False
    return True


def write_engine_manifest(folder: Path, manifest: EngineManifest) -> Path:
    """Write ``engine.json`` atomically; returns its path."""
    path = folder / ENGINE_MANIFEST_NAME
    write_json(path, to_json(manifest))
    return path


def read_engine_manifest(folder: Path) -> EngineManifest:
    """Read and check ``engine.json`` of one engine folder; does not look at the plan.

    Raises EngineMismatch for a file that is missing, damaged, of a newer schema, or that does not describe the engine
    its fingerprint names.
    """
    path = folder / ENGINE_MANIFEST_NAME
    if not path.is_file():
        raise EngineMismatch(f"{folder}: not an installed engine, it has no {ENGINE_MANIFEST_NAME}; build it again")
    try:
        data = read_json(path, max_bytes=MAX_ENGINE_JSON_BYTES)
        schema = data.get("schema") if isinstance(data, Mapping) else None
        if isinstance(schema, int) and schema > SCHEMA:
            raise EngineMismatch(f"{path}: written with engine schema {schema}, this edgeds reads up to {SCHEMA}")
        manifest = from_json(EngineManifest, data, where=str(path))
    except SpecError as error:
        raise EngineMismatch(f"{error}; build the engine again") from error
    if not is_safe_member(manifest.plan) or "/" in manifest.plan:
        raise EngineMismatch(f"{path}: plan {manifest.plan!r} is not a plain file name; build the engine again")
    found = manifest.key().digest()
    if found != manifest.fingerprint:
        raise EngineMismatch(
            f"{path}: its fields give the fingerprint {found}, it states {manifest.fingerprint}; the file was edited "
            "or belongs to another engine; build the engine again"
        )
    return manifest


def check_plan(folder: Path, manifest: EngineManifest) -> Path:
    """The plan's path when the file is the one that was installed.

    Raises EngineMismatch for a missing, truncated or changed file, and for one that is not a plan of the product the
    manifest names. Plans behind an Ultralytics header are accepted.
    """
    path = folder / manifest.plan
    try:
        size = path.stat().st_size
    except OSError as error:
        raise EngineMismatch(f"{path}: the plan cannot be read ({error.strerror}); build the engine again") from error
    if size != manifest.plan_bytes:
        raise EngineMismatch(
            f"{path}: the plan has {size:,} bytes, expected {manifest.plan_bytes:,}; it was cut short or changed; "
            "build the engine again"
        )
    check_magic(path, product=manifest.product, version=manifest.tensorrt)
    found = sha256_file(path)
    if found != manifest.plan_sha256:
        raise EngineMismatch(
            f"{path}: the plan's sha256 is {found[:12]}..., expected {manifest.plan_sha256[:12]}...; it was changed "
            "after it was built; build the engine again"
        )
    return path


def check_magic(path: Path, *, product: str, version: str) -> None:
    """Raise EngineMismatch unless the file is a plan of ``product`` ("tensorrt" or "rtx") and, for RTX, ``version``."""
    try:
        _, offset, _ = split_engine(path)
    except ModelError as error:
        raise EngineMismatch(str(error)) from error
    with path.open("rb") as stream:
        stream.seek(offset)
        head = stream.read(RTX_VERSION_OFFSET + 4)
    if head[:4] not in PLAN_MAGICS:
        raise EngineMismatch(
            f"{path}: starts with {head[:4]!r}, expected one of {', '.join(repr(magic) for magic in PLAN_MAGICS)}; "
            "not a TensorRT plan; build the engine again"
        )
    is_rtx = head[:4] == RTX_MAGIC
    if is_rtx != (product == "rtx"):
        names = {True: "TensorRT-RTX", False: "TensorRT"}
        raise EngineMismatch(
            f"{path}: is a plan of {names[is_rtx]}, expected one of {names[not is_rtx]}; build the engine again"
        )
    numbers = head[RTX_VERSION_OFFSET : RTX_VERSION_OFFSET + 3]
    expected = version.split(".")[:3]
    if is_rtx and len(numbers) == 3 and [str(number) for number in numbers] != expected:
        raise EngineMismatch(
            f"{path}: built by TensorRT-RTX {'.'.join(map(str, numbers))}, expected {version}; build the engine again"
        )


def check_host(
    manifest: EngineManifest, *, product: str, tensorrt: str, device: DeviceIdentity, where: str = "engine"
) -> None:
    """Raise EngineMismatch when the engine was not built for this machine; the message says expected and found.

    ``product`` and ``tensorrt`` are this machine's ("tensorrt" or "rtx", and the version), ``device`` its GPU.
    """
    again = "run 'edgeds build BUNDLE' on this machine"
    if manifest.product != product:
        raise EngineMismatch(f"{where}: built for {manifest.product}, this machine runs {product}; {again}")
    if manifest.tensorrt != tensorrt:
        raise EngineMismatch(f"{where}: built with {manifest.tensorrt}, this machine has {tensorrt}; {again}")
    built = manifest.device
    if built.compute_capability != device.compute_capability:
        raise EngineMismatch(
            f"{where}: built for compute capability {built.compute_capability}, this GPU has "
            f"{device.compute_capability}; {again}"
        )
    if built.gpu is not None and (built.gpu, built.board) != (device.gpu, device.board):
        raise EngineMismatch(f"{where}: built for {built}, this machine has {device}; {again}")
