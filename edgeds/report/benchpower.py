"""The power figures of a benchmark: measured in its window, or unknown with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from edgeds.power import PowerSampler, PowerSummary, Sensor

MIN_COVERAGE = 0.5
"""Below this share of the window with readings a mean says too little about it."""


@dataclass(frozen=True, kw_only=True)
class PowerFigures:
    """Mean power, energy per frame and where they come from; None with the reason in ``source``."""

    power_w: float | None
    energy_mj: float | None
    source: str


def start_sampler(sensor: Sensor | None) -> PowerSampler | None:
    """Begin to sample, where there is a sensor that can tell the power."""
    if sensor is None or sensor.unavailable is not None:
        return None
    return PowerSampler(sensor).start()


def power_figures(sensor: Sensor | None, summary: PowerSummary | None, *, fps: float) -> PowerFigures:
    """What a window gave. Energy per frame is power over frames per second, in mJ."""
    if sensor is None:
        return PowerFigures(power_w=None, energy_mj=None, source="unavailable")
    if summary is None:
        reason = sensor.unavailable or "nothing was measured"
        return PowerFigures(power_w=None, energy_mj=None, source=f"unavailable: {reason}")
    if summary.mean_w is None or summary.coverage < MIN_COVERAGE:
        share = f"power is known for {summary.coverage:.0%} of the window"
        note = f"; {summary.notes[0]}" if summary.notes else ""
        return PowerFigures(power_w=None, energy_mj=None, source=f"unavailable: {summary.source}: {share}{note}")
    energy = summary.mean_w / fps * 1000 if fps > 0 else None
    return PowerFigures(power_w=summary.mean_w, energy_mj=energy, source=summary.source)
