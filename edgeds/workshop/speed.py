"""Whether a quantized model is faster than its float original on this machine's processor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgeds.engines import Engine, open_engine
from edgeds.errors import SpecError

MIN_ROUNDS = 3
MAX_ROUNDS = 50


def compare_cpu_speed(
    float_model: str | Path,
    cpu_model: str | Path,
    *,
    feeds: Mapping[str, np.ndarray],
    seconds: float = 1.0,
    threads: int | None = None,
) -> float:
    """Median processor time of one float run over that of one quantized run: above 1 the quantized model is faster.

    Both run on the CPU backend with ``feeds``, in turns, so that other load on the machine slows both alike, and by
    processor time, which does not count the time they wait for it. ``seconds`` is about how long the measurement
    takes (never fewer than three rounds). Raises SpecError for seconds that are not above 0, and what ``open_engine``
    and ``infer`` raise.
    """
    if not 0 < seconds < float("inf"):
        raise SpecError(f"seconds: expected a finite number above 0, got {seconds!r}")
    with (
        open_engine(Path(float_model), backend="onnxruntime", threads=threads) as plain,
        open_engine(Path(cpu_model), backend="onnxruntime", threads=threads) as quantized,
    ):
        for engine in (plain, quantized):
            engine.infer(feeds)  # the first run allocates
        end = time.perf_counter() + seconds
        taken: tuple[list[float], list[float]] = ([], [])
        while len(taken[0]) < MIN_ROUNDS or (time.perf_counter() < end and len(taken[0]) < MAX_ROUNDS):
            taken[0].append(_cpu_seconds(plain, feeds))
            taken[1].append(_cpu_seconds(quantized, feeds))
    # A clock that is too coarse for a tiny model shows no difference.
    return max(statistics.median(taken[0]), 1e-9) / max(statistics.median(taken[1]), 1e-9)


def _cpu_seconds(engine: Engine, feeds: Mapping[str, np.ndarray]) -> float:
    start = time.process_time()
    engine.infer(feeds)
    return time.process_time() - start
