"""Share one device: dynamic batching by shape, priorities, deadlines, back-pressure."""

from __future__ import annotations

from edgeds.runtime.batcher import Batcher, BatchPolicy, Entry
from edgeds.runtime.jobs import Answer, SessionStats
from edgeds.runtime.latency import LatencyTable
from edgeds.runtime.session import Session

__all__ = ["Answer", "BatchPolicy", "Batcher", "Entry", "LatencyTable", "Session", "SessionStats"]
