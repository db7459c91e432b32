"""A clock that never goes back, over any clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def steady(clock: Callable[[], float]) -> Callable[[], float]:
    """The clock itself when it is ``time.monotonic``, else a clock in seconds that stands still where it goes back.

    A wall clock that is set back by an hour would otherwise hold every waiting request for that hour.
    """
    return clock if clock in (time.monotonic, time.perf_counter) else SteadyClock(clock)


class SteadyClock:
    """Seconds of ``clock``, from its first reading on, with every step back taken out. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s = clock()
        self._lost_s = 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            if now < self._last_s:
                self._lost_s += self._last_s - now
            self._last_s = now
            return now + self._lost_s
