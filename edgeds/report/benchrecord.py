"""A benchmark as a run record: its figures, its single latencies and power readings, and the machine it ran on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgeds.boards.probe import MachineProbe
from edgeds.report.record import Device, LatencyFigures, PowerFigures, RunRecord, keep_spread
from edgeds.report.sources import events_of, power_of
from edgeds.specs import Budget

if TYPE_CHECKING:
    from edgeds.report.bench import BenchReport, BenchTrace


def record_from_bench(
    report: BenchReport,
    *,
    trace: BenchTrace,
    title: str,
    machine: MachineProbe | None = None,
    model: str | None = None,
    batch: int | None = None,
    sizes: tuple[str, ...] = (),
    budget: Budget | None = None,
) -> RunRecord:
    """The record of a bench, also of one that was interrupted. ``machine`` None leaves board and mode unknown."""
    latency = None
    if report.latency_p50_ms is not None:
        latency = LatencyFigures(
            mean_ms=report.latency_mean_ms,
            p50_ms=report.latency_p50_ms,
            p95_ms=report.latency_p95_ms,
            p99_ms=report.latency_p99_ms,
            max_ms=report.latency_max_ms,
            samples=keep_spread(trace.latencies_ms),
        )
    return RunRecord(
        status="measured",
        title=title,
        date=report.date,
        device=_device(report, machine),
        model=model,
        precision=report.precision,
        batch=batch,
        sizes=sizes,
        fps=None if latency is None else report.fps,
        frames=report.frames,
        seconds=report.wall_s,
        latency_ms=latency,
        power=_power(report, trace),
        energy_mj=report.energy_mj,
        throttle_events=None if trace.power is None else events_of(trace.power),
        budget=budget or Budget(),
        interrupted=report.interrupted,
        notes=_notes(report, machine),
    )


def _device(report: BenchReport, machine: MachineProbe | None) -> Device:
    board = machine.board if machine is not None else None
    mode = machine.current_mode if machine is not None else None
    versions = dict(report.versions)
    if machine is not None and machine.l4t is not None and machine.l4t.l4t:
        versions["L4T"] = machine.l4t.l4t
    return Device(
        name=report.device,
        board=board.title if board is not None else None,
        mode=mode.label if mode is not None else None,
        mode_watts=mode.watts if mode is not None else None,
        gpu=board.arch.name if board is not None else None,
        backend=report.backend,
        threads=report.threads,
        versions=versions,
    )


def _power(report: BenchReport, trace: BenchTrace) -> PowerFigures:
    """The readings, held to the bench's own verdict on whether they say enough about the window."""
    reason = report.power_source.removeprefix("unavailable").lstrip(": ") or "no sensor was given"
    if trace.power is None:
        return PowerFigures(unavailable=reason)
    found = power_of(trace.samples, trace.power, unknown=reason)
    if report.power_w is None:
        return replace(found, mean_w=None, energy_j=None, unavailable=reason)
    return replace(found, mean_w=report.power_w)


def _notes(report: BenchReport, machine: MachineProbe | None) -> tuple[str, ...]:
    callers = f"{report.concurrency} caller{'s' if report.concurrency > 1 else ''} at once; latency includes waiting"
    reasons = (report.fallback_reason,) if report.fallback_reason else ()
    return (callers, *reasons, *(machine.notes if machine is not None else ()))
