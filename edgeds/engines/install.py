"""From a bundle to a verified engine on this machine: found or built, checked against golden samples, installed.

An engine is installed by one rename after its outputs were compared with the references in the bundle, on the device
that will run it. Whatever goes wrong before leaves the engines that were there as they were.
"""

from __future__ import annotations

import dataclasses
import datetime
import errno
import logging
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds._version import __version__
from edgeds.boards.stored_plan import read_stored_plan
from edgeds.bundle import Bundle, Manifest
from edgeds.engines.build_host import BuildHost, find_host
from edgeds.engines.engine_latency import measure_latencies
from edgeds.engines.engine_manifest import (
    PLAN_NAME,
    EngineManifest,
    check_magic,
    write_engine_manifest,
)
from edgeds.engines.engine_store import (
    Store,
    choose_store,
    engine_lock,
    find_serving,
    record_built,
    remove_abandoned,
    staging_folder,
)
from edgeds.engines.fingerprint import EngineKey, engine_key, fingerprint, model_digest
from edgeds.engines.golden_check import GoldenResult, check_golden
from edgeds.engines.installed import InstalledEngine, explain_missing, find_installed
from edgeds.engines.variant import BUILD_PRECISIONS, choose_variant
from edgeds.errors import BuildError, EngineMismatch
from edgeds.files import cache_dir, read_json, sha256_file
from edgeds.specs import Resolution, ShapeRange, to_json

__all__ = [
    "BuildHost",
    "EngineManifest",
    "InstalledEngine",
    "explain_missing",
    "find_host",
    "find_installed",
    "fingerprint",
    "install_engine",
]

LOGGER = logging.getLogger("edgeds.engines")
COST_NAME = "cost.json"
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One engine to make: what is built from what, for which key."""

    bundle: Bundle
    host: BuildHost
    variant: str
    precision: str
    options: Any
    profiles: tuple[Mapping[str, ShapeRange], ...]
    key: EngineKey
    notes: tuple[str, ...]


def install_engine(
    bundle: Bundle,
    *,
    host: BuildHost | None = None,
    precision: str = "auto",
    max_batch: int | None = None,
    buckets: Sequence[Resolution] | None = None,
    profiles: Sequence[Mapping[str, ShapeRange]] | None = None,
    options: Mapping[str, Any] | None = None,
    force: bool = False,
    measure_seconds: float = 5.0,
    keep_in: Path | None = None,
    cache: Path | None = None,
    quiet: bool = False,
) -> InstalledEngine:
    """Return an engine of ``bundle`` for ``host``: the installed one that serves, else a new one, checked.

    ``precision`` ``auto`` and ``max_batch`` default to the bundle's plan where it has one, else to what it is made for;
    ``buckets`` to the bundle's. ``profiles`` replace both. ``options`` are fields of
    ``BuildOptions``. ``force`` builds although an engine is there. ``measure_seconds`` of 0 skips the latency table.
    ``keep_in`` is a folder to install into instead of the bundle or the cache.
    Two processes that ask for the same engine build it once: the second waits and takes it.

    Raises SpecError for bad arguments, BuildError when the build fails, the disk is full or the engine is wrong,
    BundleError when there is no place to install to, DeviceError without TensorRT or GPU.
    """
    job = _plan_job(
        bundle,
        host or find_host(quiet=quiet),
        precision=precision,
        max_batch=max_batch,
        buckets=buckets,
        profiles=profiles,
        options=dict(options or {}),
        cache=cache,
    )
    if not force and (found := find_serving(bundle, job.key, cache=cache)):
        return InstalledEngine(folder=found[0], manifest=found[1], cached=True, notes=(*job.notes, *found[1].notes))
    model_bytes = sum(bundle.manifest.files[name].bytes for name in _model_files(bundle.manifest, job.variant))
    need_bytes = model_bytes * (1 + len(job.profiles)) + (16 << 20)
    if keep_in is not None:
        keep_in.mkdir(parents=True, exist_ok=True)
        store = Store(folder=keep_in)
    else:
        store = choose_store(bundle, cache=cache, need_bytes=need_bytes)
    job = dataclasses.replace(job, notes=(*job.notes, *([store.note] if store.note else [])))
    name = fingerprint(job.key)
    remove_abandoned(store.folder)
    with engine_lock(store.folder, name, waiting=_say_waiting) as waited:
        if (waited or not force) and (found := find_serving(bundle, job.key, cache=cache)):
            return InstalledEngine(folder=found[0], manifest=found[1], cached=True, notes=(*job.notes, *found[1].notes))
        try:
            with staging_folder(store.folder, name) as folder:
                manifest = _build(job, folder, measure_seconds=measure_seconds, quiet=quiet)
        except OSError as error:
            if error.errno not in FULL:
                raise
            free = shutil.disk_usage(store.folder).free >> 20
            raise BuildError(
                f"{store.folder}: the disk is full ({free} MiB free, about {need_bytes >> 20} MiB needed); free some "
                "and build again; nothing was installed"
            ) from error
    record_built(manifest.plan_sha256, cache=cache)
    return InstalledEngine(folder=store.folder / name, manifest=manifest, cached=False, notes=manifest.notes)


def _plan_job(
    bundle: Bundle,
    host: BuildHost,
    *,
    precision: str,
    max_batch: int | None,
    buckets: Sequence[Resolution] | None,
    profiles: Sequence[Mapping[str, ShapeRange]] | None,
    options: dict[str, Any],
    cache: Path | None,
) -> _Job:
    manifest = bundle.manifest
    plan = read_stored_plan(manifest.plan, where=f"{bundle.source}: plan")
    if plan is not None and precision == "auto" and plan.build_precision in manifest.models:
        precision = plan.build_precision
    if plan is not None and plan.device == "dla":
        options.setdefault("dla_core", 0)
    variant, label, note = choose_variant(manifest, precision=precision, typing=host.typing)
    if profiles is None:
        from edgeds.engines.bundle_dims import bundle_dims
        from edgeds.engines.profiles import plan_profiles

        sizes = manifest.buckets if buckets is None else tuple(buckets)
        planned = manifest.max_batch if plan is None else min(plan.batch, manifest.max_batch)
        batch = planned if max_batch is None else max_batch
        profiles = plan_profiles(manifest.inputs, sizes, max_batch=batch, dims=bundle_dims(manifest, max_batch=batch))
    values = {"precision": BUILD_PRECISIONS[label], **host.fixed, **options}
    if label == "int4" and host.product == "tensorrt":
        values.setdefault("typing", "strong")
    if "timing_cache" not in values and host.product == "tensorrt":
        values["timing_cache"] = timing_cache_path(host, cache=cache)
    chosen = host.options_type(profiles=tuple(dict(profile) for profile in profiles), **values)
    key = engine_key(
        model_sha256=model_digest(bundle, variant),
        options=chosen,
        profiles=profiles,
        tensorrt=f"{host.product} {host.tensorrt}",
        device=host.device,
    )
    return _Job(
        bundle=bundle,
        host=host,
        variant=variant,
        precision=label,
        options=chosen,
        profiles=tuple(profiles),
        key=key,
        notes=(note,) if note else (),
    )


def timing_cache_path(host: BuildHost, *, cache: Path | None = None) -> Path:
    """Where kernel timings are kept: one file for each TensorRT version and GPU, since they hold for nothing else."""
    words = f"{host.product} {host.tensorrt} {host.device.gpu} {host.device.board} {host.device.compute_capability}"
    return (cache or cache_dir()) / "timing" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', words)}.cache"


def _build(job: _Job, folder: Path, *, measure_seconds: float, quiet: bool) -> EngineManifest:
    """Build into ``folder``, check, measure, describe."""
    plan = folder / PLAN_NAME
    begin = time.monotonic()
    report = job.host.build(job.bundle.model_path(job.variant), plan, job.options, _cost_layers(job))
    build_s = time.monotonic() - begin
    try:
        check_magic(plan, product=job.host.product, version=job.host.tensorrt)
    except EngineMismatch as error:
        raise BuildError(f"the builder wrote no usable plan: {error}") from error
    golden: GoldenResult | None = None
    latency_ms: dict[str, dict[int, float]] = {}
    note = job.host.cannot_run
    if job.host.open_plan is not None:
        golden, latency_ms, note = _verify(job, plan, measure_seconds=measure_seconds, quiet=quiet)
    elif note is not None:
        note = f"the golden check was not possible: {note}; run it on the target with 'edgeds build'"
    manifest = EngineManifest(
        fingerprint=fingerprint(job.key),
        plan_sha256=sha256_file(plan),
        plan_bytes=plan.stat().st_size,
        product=job.host.product,
        tensorrt=job.host.tensorrt,
        edgeds=__version__,
        device=job.host.device,
        built_on=job.host.description,
        model_variant=job.variant,
        model_sha256=job.key.model_sha256,
        precision=job.precision,
        profiles=tuple(dict(profile) for profile in job.key.profiles),
        options=dict(job.key.options),
        build_s=round(build_s, 3),
        built_utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        golden=golden,
        latency_ms=latency_ms,
        notes=(*job.notes, *([note] if note else [])),
        build=_plain(report),
    )
    write_engine_manifest(folder, manifest)
    _sync(plan)  # a board may lose power at any time; the rename must not arrive before the data
    return manifest


def _verify(
    job: _Job, plan: Path, *, measure_seconds: float, quiet: bool
) -> tuple[GoldenResult | None, dict[str, dict[int, float]], str | None]:
    """Golden check, then latencies, in one opened engine. Raises BuildError for an engine that is wrong."""
    assert job.host.open_plan is not None
    with job.host.open_plan(plan) as engine:
        golden, note = None, "the bundle has no golden samples, so the engine's results were not checked"
        if job.bundle.has_golden():
            golden = check_golden(
                engine, job.bundle.golden(), precision=job.precision, fits=lambda feeds: _fits(job.profiles, feeds)
            )
            note = ""
            if golden.samples == 0:
                golden, note = None, "no golden sample fits the engine's profiles, so its results were not checked"
            elif not golden.ok:
                raise BuildError(
                    f"the new engine gives wrong results on the golden samples: {golden.failures()}; it was not "
                    "installed and engines that were there are kept; try --precision float16 or float, or a lower "
                    "optimization level"
                )
        latency_ms = {}
        if measure_seconds > 0:
            latency_ms = measure_latencies(engine, job.profiles, seconds=measure_seconds, quiet=quiet)
    return golden, latency_ms, note or None


def _cost_layers(job: _Job) -> Any:
    """The layers of cost.json for a DLA build, which tells the expected split from them; None otherwise."""
    if getattr(job.options, "dla_core", None) is None or COST_NAME not in job.bundle.manifest.files:
        return None
    data = read_json(job.bundle.path(COST_NAME))
    return data.get("layers") if isinstance(data, dict) else None


def _fits(profiles: Sequence[Mapping[str, ShapeRange]], feeds: Mapping[str, Any]) -> bool:
    from edgeds.engines.engine_manifest import shapes_inside

    shapes = {name: tuple(array.shape) for name, array in feeds.items()}
    return not profiles or any(shapes_inside(profile, shapes) for profile in profiles)


def _model_files(manifest: Manifest, variant: str) -> list[str]:
    name = manifest.models[variant]
    return [part for part in (name, f"{name}.data") if part in manifest.files]


def _plain(report: Any) -> dict[str, Any]:
    """The build report without what the manifest has elsewhere; of the layers only how many have each precision."""
    data = to_json(report)
    if not isinstance(data, dict):
        return {}
    for name in ("plan", "plan_bytes", "profiles", "inputs", "outputs", "layers"):
        data.pop(name, None)
    if hasattr(report, "precision_of_nodes"):
        data["node_precisions"] = dict(Counter(report.precision_of_nodes().values()))
    return data


def _say_waiting(pid: int | None) -> None:
    who = f"process {pid}" if pid is not None else "another process"
    LOGGER.warning("%s is building this engine; waiting for it", who)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
