"""Where the time of a model goes: per layer and in total, against what the device can do (``metrics.json``).

Measured where the model runs, predicted where only a target is named; each layer says which. What is unknown is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from edgeds.boards.coefficients import load_table
from edgeds.boards.cost_file import LayerWork, ModelWork
from edgeds.boards.predictor import machine_of, predict
from edgeds.boards.roofline import WEIGHT_BYTES
from edgeds.boards.spec import Target
from edgeds.errors import SpecError
from edgeds.report.stats import device_name, software_versions, utc_now

KIND = "edgeds-profile"
SCHEMA = 1
LAUNCH_SHARE = 0.05
"""A measured layer that reaches less than this of both peaks is bound by launching and waiting, not by the hardware."""

_SUFFIXES = ("_nchwc", "_quant", "_fused", "_output_0")

Status = Literal["measured", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What the device can do: operations and bytes per second; None where nobody knows, ``source`` says whence."""

    flops_per_s: float | None
    bytes_per_s: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class ProfiledLayer:
    """One layer or fused kernel. ``verdict``: what bounds it, None when costs or peaks are unknown."""

    name: str
    op: str
    time_us: float
    share: float
    flops: float | None
    bytes: float | None
    flops_per_byte: float | None
    gflops_per_s: float | None
    gb_per_s: float | None
    verdict: Literal["compute", "memory", "launch"] | None
    status: Status


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All of ``metrics.json``. Utilizations are shares of the peaks; ``parallel_efficiency`` is the speed-up of the
    batch over single items, over the batch; ``parallel`` has the same for other batches, streams and devices."""

    kind: str = KIND
    schema: int = SCHEMA
    status: Status
    model: str
    target: str | None
    device: str | None
    backend: str
    precision: str
    batch: int
    date: str
    versions: Mapping[str, str]
    latency_ms: float
    fps: float
    flops: float | None
    bytes: float | None
    flops_per_byte: float | None
    compute_utilization: float | None
    bandwidth_utilization: float | None
    parallel_efficiency: float | None
    parallel: Mapping[str, Mapping[str, float]]
    verdict: str | None
    peak: Peak
    layers: tuple[ProfiledLayer, ...]
    notes: tuple[str, ...] = field(default_factory=tuple)


def predict_profile(
    work: ModelWork, *, model: str, target: Target, precision: str, batch: int, batches: Sequence[int] = (1, 2, 4, 8)
) -> Profile:
    """The profile of a board that need not be here: every figure predicted. Raises SpecError for unknown facts."""
    mode = target.mode_or_default
    if mode is None:
        raise SpecError(f"target {target}: name a power mode, as in {target}@{target.board.modes[0].label}")
    found = predict(work, board=target.board, mode=mode, precision=precision, batch=batch)
    machine = machine_of(target.board, mode)
    peak_name = "fp16" if precision == "int4" else precision
    peak = Peak(
        flops_per_s=machine.peak_flops[peak_name],
        bytes_per_s=machine.dram_gb_s * 1e9,
        source=f"{target.board.name}@{mode.label}: published clocks and units, {peak_name} dense",
    )
    total_us = found.latency_ms * 1e3
    layers = tuple(
        _layer(
            one.node, one.op, one.latency_us, total_us, flops=one.flops, moved=one.bytes, peak=peak,
            verdict=one.limited_by, status="predicted",
        )
        for one in found.layers
    )  # fmt: skip
    rates = {
        size: predict(work, board=target.board, mode=mode, precision=precision, batch=size).fps
        for size in dict.fromkeys((1, *batches, batch))
    }
    return _profile(
        layers,
        model=model,
        status="predicted",
        target=f"{target.board.name}@{mode.label}",
        device=None,
        backend="tensorrt",
        precision=precision,
        batch=batch,
        latency_ms=found.latency_ms,
        peak=peak,
        rates={"batches": rates},
        notes=(*found.notes, f"predicted by fit {load_table().version}, nothing was run"),
    )


def measured_profile(
    times: Sequence[tuple[str, str, float]],
    *,
    work: ModelWork | None,
    model: str,
    backend: str,
    precision: str,
    batch: int,
    latency_ms: float,
    peak: Peak,
    rates: Mapping[str, Mapping[int, float]],
    target: str | None = None,
    notes: Sequence[str] = (),
) -> Profile:
    """The profile of a model that ran here: ``times`` are (layer, operator, microseconds); ``work`` its costs.

    ``rates``: frames per second by batch (``batches``) and by concurrent callers (``streams``).
    """
    costs = match_costs([name for name, _, _ in times], work, batch=batch) if work is not None else {}
    total_us = sum(time for _, _, time in times)
    layers = []
    for name, op, time_us in times:
        flops, moved = costs.get(name, (None, None))
        layers.append(_layer(name, op, time_us, total_us, flops=flops, moved=moved, peak=peak, status="measured"))
    unmatched = sum(1 for name, _, _ in times if name not in costs)
    said = [f"{unmatched} of {len(times)} layers have no costs: the runtime made or fused them"] if unmatched else []
    return _profile(
        layers,
        model=model,
        status="measured",
        target=target,
        device=device_name(),
        backend=backend,
        precision=precision,
        batch=batch,
        latency_ms=latency_ms,
        peak=peak,
        rates=rates,
        totals=_totals(work, batch=batch) if work is not None else None,
        notes=(*said, *notes),
    )


def match_costs(names: Sequence[str], work: ModelWork, *, batch: int) -> dict[str, tuple[float, float]]:
    """(operations, bytes) of the runtime's layers, by node names: equal, with a suffix of the runtime's, or joined.

    TensorRT joins the names of fused nodes (``a + b``), ONNX Runtime keeps the first and may add a suffix.
    """
    by_name = {layer.node: layer for layer in work.layers}
    found = {}
    for name in names:
        parts = [part.strip() for part in name.split(" + ")]
        layers = [layer for part in parts if (layer := by_name.get(part) or _prefix(part, by_name)) is not None]
        if layers:
            costs = [_cost(layer, scale=batch / work.batch) for layer in layers]
            found[name] = (sum(flops for flops, _ in costs), sum(moved for _, moved in costs))
    return found


def parallel_efficiency(rates: Mapping[int, float]) -> dict[int, float]:
    """Speed-up over ideal: rate(n) / (n x rate(1)) for every n beside 1. Empty without the rate of 1."""
    single = rates.get(1)
    return {} if not single else {count: rate / (count * single) for count, rate in sorted(rates.items())}


def _prefix(name: str, by_name: Mapping[str, LayerWork]) -> LayerWork | None:
    """A node that the runtime renamed: its layouts and fusions add a suffix to the node's name or to its output's,
    which exporters make from the node's name."""
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            bare = name.removesuffix(suffix)
            return by_name.get(bare) or by_name.get(bare.removesuffix("_output_0"))
    return None


def _cost(layer: LayerWork, *, scale: float) -> tuple[float, float]:
    weights = min(layer.params * WEIGHT_BYTES.get(layer.precision, 4.0), layer.bytes_read)
    moved = weights + (layer.bytes_read - weights + layer.bytes_written) * scale
    return layer.flops * scale, moved


def _totals(work: ModelWork, *, batch: int) -> tuple[float, float]:
    costs = [_cost(layer, scale=batch / work.batch) for layer in work.layers]
    return sum(flops for flops, _ in costs), sum(moved for _, moved in costs)


def _layer(
    name: str,
    op: str,
    time_us: float,
    total_us: float,
    *,
    flops: float | None,
    moved: float | None,
    peak: Peak,
    status: Status,
    verdict: str | None = None,
) -> ProfiledLayer:
    rate = flops / time_us * 1e6 if flops is not None and time_us > 0 else None
    flow = moved / time_us * 1e6 if moved is not None and time_us > 0 else None
    chosen = verdict if verdict is not None else _verdict(rate, flow, peak)
    return ProfiledLayer(
        name=name,
        op=op,
        time_us=time_us,
        share=time_us / total_us if total_us > 0 else 0.0,
        flops=flops,
        bytes=moved,
        flops_per_byte=flops / moved if flops is not None and moved else None,
        gflops_per_s=rate / 1e9 if rate is not None else None,
        gb_per_s=flow / 1e9 if flow is not None else None,
        verdict=chosen,  # type: ignore[arg-type]
        status=status,
    )


def _verdict(rate: float | None, flow: float | None, peak: Peak) -> str | None:
    """Which peak a layer comes closer to; neither within ``LAUNCH_SHARE``: launch."""
    if rate is None or flow is None or peak.flops_per_s is None or peak.bytes_per_s is None:
        return None
    compute, memory = rate / peak.flops_per_s, flow / peak.bytes_per_s
    if max(compute, memory) < LAUNCH_SHARE:
        return "launch"
    return "compute" if compute >= memory else "memory"


def _profile(
    layers: Sequence[ProfiledLayer],
    *,
    model: str,
    status: Status,
    target: str | None,
    device: str | None,
    backend: str,
    precision: str,
    batch: int,
    latency_ms: float,
    peak: Peak,
    rates: Mapping[str, Mapping[int, float]],
    notes: Sequence[str],
    totals: tuple[float, float] | None = None,
) -> Profile:
    known = [layer for layer in layers if layer.flops is not None and layer.bytes is not None]
    if totals is None and known:
        totals = sum(layer.flops or 0 for layer in known), sum(layer.bytes or 0 for layer in known)
    flops, moved = totals if totals is not None else (None, None)
    seconds = latency_ms / 1e3
    by_verdict: dict[str, float] = {}
    for layer in layers:
        if layer.verdict is not None:
            by_verdict[layer.verdict] = by_verdict.get(layer.verdict, 0.0) + layer.time_us
    efficiency = {name: parallel_efficiency(values) for name, values in rates.items()}
    parallel = {name: {str(count): value for count, value in values.items()} for name, values in efficiency.items()}
    return Profile(
        status=status,
        model=model,
        target=target,
        device=device,
        backend=backend,
        precision=precision,
        batch=batch,
        date=utc_now(),
        versions=software_versions(),
        latency_ms=latency_ms,
        fps=batch / seconds,
        flops=flops,
        bytes=moved,
        flops_per_byte=flops / moved if flops is not None and moved else None,
        compute_utilization=_share(flops, seconds, peak.flops_per_s),
        bandwidth_utilization=_share(moved, seconds, peak.bytes_per_s),
        parallel_efficiency=efficiency.get("batches", {}).get(batch),
        parallel={**parallel, "devices": {"1": 1.0}},
        verdict=max(by_verdict, key=lambda name: by_verdict[name], default=None),
        peak=peak,
        layers=tuple(layers),
        notes=tuple(notes),
    )


def _share(amount: float | None, seconds: float, peak: float | None) -> float | None:
    return amount / seconds / peak if amount is not None and peak else None


def describe(profile: Profile) -> list[str]:
    """The page for people: label, totals, then the slowest layers."""

    def share(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.1%}"

    where = profile.target or profile.device or "this machine"
    lines = [
        f"{profile.status}: {profile.model} on {where}, {profile.backend}, {profile.precision}, batch {profile.batch}",
        f"  latency              {profile.latency_ms:.3g} ms, {profile.fps:.4g} per second",
        f"  FLOPs per byte       {'unknown' if profile.flops_per_byte is None else f'{profile.flops_per_byte:.3g}'}",
        f"  of peak FLOP/s       {share(profile.compute_utilization)}",
        f"  of peak bandwidth    {share(profile.bandwidth_utilization)}",
        f"  parallel efficiency  {share(profile.parallel_efficiency)} of {profile.batch} times one item",
        f"  bound by             {profile.verdict or 'unknown'}   (peaks: {profile.peak.source})",
        "slowest layers",
    ]
    slowest = sorted(profile.layers, key=lambda layer: layer.time_us, reverse=True)[:10]
    lines += [f"  {one.time_us:9.1f} us {one.share:6.1%} {one.verdict or '?':8} {one.op} {one.name}" for one in slowest]
    return [*lines, *(f"note: {note}" for note in profile.notes)]


def to_document(profile: Profile) -> dict[str, Any]:
    """What ``metrics.json`` holds."""
    from edgeds.specs import to_json

    document: dict[str, Any] = to_json(profile)
    document["batch_size"] = profile.batch
    return document
