"""What the KV pool holds and did, as values and under names for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """One moment of a pool. ``used + cached + free == pages``; the figures from ``hit_tokens`` on only grow.

    ``used``: pages that sequences hold, ``shared``: those held by several, ``cached``: pages kept for later prompts.
    ``hit_tokens``, ``miss_tokens``: prompt tokens found and not found in the prefix cache. ``evictions``: cached pages
    given up, ``evicted_tokens``: tokens that sequences forgot by ``compact``, ``copies``: pages copied before a write.
    """

    pages: int
    used: int
    shared: int
    cached: int
    free: int
    sequences: int
    tokens: int
    page_bytes: int
    peak_used: int
    hit_tokens: int
    miss_tokens: int
    evictions: int
    evicted_tokens: int
    copies: int
    preemptions: int
    forced_releases: int
    exhausted: int

    @property
    def occupancy(self) -> float:
        """Share of the pages that sequences hold, from 0 to 1."""
        return self.used / self.pages

    def metrics(self) -> dict[str, float]:
        """Figures by Prometheus name: gauges as they are, counters end in ``_total``."""
        counters = {
            *("hit_tokens", "miss_tokens", "evictions", "evicted_tokens"),
            *("copies", "preemptions", "forced_releases", "exhausted"),
        }
        values: dict[str, float] = {"edgeds_kv_occupancy_ratio": self.occupancy}
        for field in fields(self):
            values[f"edgeds_kv_{field.name}" + ("_total" if field.name in counters else "")] = getattr(self, field.name)
        return values
