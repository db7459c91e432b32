"""What a series of samples says: time-weighted mean, energy, gaps, throttling."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgeds.power.sample import PowerSample

GAP_FACTOR = 3.0
"""Two samples further apart than this many intervals have a gap between them, over which nothing is assumed."""


@dataclass(frozen=True, kw_only=True)
class PowerSummary:
    """Figures of one measurement. Power is None when no two neighbouring samples had a total.

    ``mean_w`` is the mean over ``covered_s``, the time between neighbouring known samples; ``energy_j`` the energy in
    that time alone, not stretched over gaps. ``unknown`` counts samples without a total, ``failures`` readings that
    raised, ``gaps`` the holes. ``oc_events`` are counts during the measurement; ``throttle``
    all that held the machine back in it, None when nobody tells.
    """

    source: str
    mean_w: float | None
    peak_w: float | None
    energy_j: float | None
    covered_s: float
    duration_s: float
    samples: int
    unknown: int
    failures: int
    gaps: int
    rails_mean_mw: Mapping[str, float]
    temp_max_c: float | None
    throttle: tuple[str, ...] | None
    oc_events: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def coverage(self) -> float:
        """Share of the time for which power is known."""
        return self.covered_s / self.duration_s if self.duration_s > 0 else 0.0


def integrate(
    points: Sequence[tuple[float, float]], *, max_gap_s: float, is_interval_mean: bool = False
) -> tuple[float, float, int]:
    """Integral over (seconds, value) points, the seconds it covers, and the number of gaps left out.

    Trapezoids between neighbours; with ``is_interval_mean`` each value stands for the time since the point before.
    """
    area, covered, gaps = 0.0, 0.0, 0
    for (t0, v0), (t1, v1) in itertools.pairwise(points):
        step = t1 - t0
        if step <= 0:
            continue
        if step > max_gap_s:
            gaps += 1
            continue
        area += step * (v1 if is_interval_mean else (v0 + v1) / 2)
        covered += step
    return area, covered, gaps


def summarize(
    samples: Sequence[PowerSample],
    *,
    source: str,
    interval_s: float,
    failures: int = 0,
    is_interval_mean: bool = False,
    notes: tuple[str, ...] = (),
) -> PowerSummary:
    """The figures of a series in time order; ``interval_s`` is the intended distance between samples."""
    known = [(sample.t_s, sample.total_mw / 1000) for sample in samples if sample.total_mw is not None]
    max_gap = GAP_FACTOR * interval_s
    energy, covered, gaps = integrate(known, max_gap_s=max_gap, is_interval_mean=is_interval_mean)
    names = dict.fromkeys(name for sample in samples for name in sample.rails_mw)
    rails = {}
    for name in names:
        points = [(sample.t_s, sample.rails_mw[name]) for sample in samples if name in sample.rails_mw]
        area, seconds, _ = integrate(points, max_gap_s=max_gap, is_interval_mean=is_interval_mean)
        if seconds > 0:
            rails[name] = area / seconds
    hottest = [sample.temp_c for sample in samples if sample.temp_c is not None]
    return PowerSummary(
        source=source,
        mean_w=energy / covered if covered > 0 else None,
        peak_w=max((watts for _, watts in known), default=None),
        energy_j=energy if covered > 0 else None,
        covered_s=covered,
        duration_s=samples[-1].t_s - samples[0].t_s if samples else 0.0,
        samples=len(samples),
        unknown=len(samples) - len(known),
        failures=failures,
        gaps=gaps,
        rails_mean_mw=rails,
        temp_max_c=max(hottest, default=None),
        throttle=_throttle(samples),
        oc_events=_oc_deltas(samples),
        notes=notes,
    )


def _throttle(samples: Sequence[PowerSample]) -> tuple[str, ...] | None:
    seen = [sample.throttle for sample in samples if sample.throttle is not None]
    return tuple(dict.fromkeys(reason for reasons in seen for reason in reasons)) if seen else None


def _oc_deltas(samples: Sequence[PowerSample]) -> dict[str, int]:
    """Counters count since boot: what matters is how far they went during the series."""
    seen = [sample.oc_events for sample in samples if sample.oc_events is not None]
    if not seen:
        return {}
    return {name: count - seen[0][name] for name, count in seen[-1].items() if count > seen[0].get(name, count)}
