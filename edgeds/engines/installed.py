"""Engines that were installed before: which one of a bundle runs on this machine, and why none does."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from edgeds.bundle import Bundle
from edgeds.engines.build_host import BuildHost, find_host
from edgeds.engines.engine_manifest import EngineManifest, check_host, check_plan, read_engine_manifest
from edgeds.engines.engine_store import engine_folders, engine_lock, find_engine
from edgeds.engines.fingerprint import model_digest
from edgeds.errors import EngineMismatch


@dataclass(frozen=True, kw_only=True)
class InstalledEngine:
    """A verified engine on disk. ``cached`` tells that it was there before; ``notes`` are for the user to see."""

    folder: Path
    manifest: EngineManifest
    cached: bool
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> Path:
        return self.folder / self.manifest.plan

    @property
    def golden_max_error(self) -> float | None:
        return self.manifest.golden.max_error if self.manifest.golden is not None else None


def find_installed(
    bundle: Bundle, *, host: BuildHost | None = None, precision: str = "auto", cache: Path | None = None
) -> InstalledEngine | None:
    """The installed engine of this bundle that runs here, or None; never builds.

    ``precision`` ``auto`` takes what the bundle is meant to run as first. Raises DeviceError without TensorRT or GPU.
    """
    host = host or find_host(quiet=True)
    choices = [precision] if precision != "auto" else [bundle.manifest.precision, "int8", "int4", "float16", "float"]
    for wanted in dict.fromkeys(choices):
        found = find_engine(
            bundle,
            accepts=lambda manifest, wanted=wanted: (  # type: ignore[misc]
                manifest.precision == wanted and _mismatch(bundle, manifest, host) is None
            ),
            cache=cache,
        )
        if found is not None:
            return InstalledEngine(folder=found[0], manifest=found[1], cached=True, notes=found[1].notes)
    return None


def explain_missing(bundle: Bundle, *, host: BuildHost, cache: Path | None = None) -> str:
    """Why ``find_installed`` gives None, for a message: what is there and why it does not fit."""
    reasons = []
    for folder in engine_folders(bundle, cache=cache):
        try:
            manifest = read_engine_manifest(folder)
            check_plan(folder, manifest)
            reasons.append(_mismatch(bundle, manifest, host) or f"{folder}: another precision")
        except EngineMismatch as error:
            reasons.append(str(error))
    return reasons[0] if reasons else "no engine was built from this bundle on this machine; run 'edgeds build BUNDLE'"


@dataclass(frozen=True, kw_only=True)
class RemovedEngine:
    """An engine folder that was removed, its size and why it could not be used."""

    folder: Path
    size_bytes: int
    reason: str


def remove_unfit(bundle: Bundle, *, host: BuildHost, keep: str, cache: Path | None = None) -> tuple[RemovedEngine, ...]:
    """Remove this bundle's engines that ``host`` cannot run: of another GPU, TensorRT or model, or damaged.

    Engines that fit stay, whatever their precision and profiles, and so does the one with fingerprint ``keep``. A
    process that runs a removed engine keeps it: the files are gone from the folder only.
    """
    removed = []
    for folder in list(engine_folders(bundle, cache=cache)):
        if folder.name == keep:
            continue
        try:
            manifest = read_engine_manifest(folder)
            check_plan(folder, manifest)
            reason = _mismatch(bundle, manifest, host)
        except EngineMismatch as error:
            reason = str(error)
        if reason is None:
            continue
        with engine_lock(folder.parent, folder.name):
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            aside = folder.with_name(f".{folder.name}-removed-{os.getpid()}")  # never seen half removed
            with contextlib.suppress(OSError):
                folder.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
                removed.append(RemovedEngine(folder=folder, size_bytes=size, reason=reason))
    return tuple(removed)


def _mismatch(bundle: Bundle, manifest: EngineManifest, host: BuildHost) -> str | None:
    """Why an engine is not of this bundle or not for this host; None when it is."""
    variant = manifest.model_variant
    if variant not in bundle.manifest.models or model_digest(bundle, variant) != manifest.model_sha256:
        return f"engine {manifest.fingerprint} was built from another model; run 'edgeds build BUNDLE' again"
    try:
        check_host(
            manifest,
            product=host.product,
            tensorrt=host.tensorrt,
            device=host.device,
            where=f"engine {manifest.fingerprint}",
        )
    except EngineMismatch as error:
        return str(error)
    return None
