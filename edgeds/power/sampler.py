"""A thread that reads a sensor at a steady pace and survives what the sensor does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from edgeds.errors import EdgedsError, SpecError
from edgeds.power.sample import PowerSample, Sensor
from edgeds.power.trace import PowerSummary, summarize

MIN_INTERVAL_S = 0.005
MAX_SAMPLES = 200_000
"""At 0.1 s more than five hours; beyond that every second sample is dropped and the pace is halved."""


class PowerSampler:
    """``with PowerSampler(sensor) as power: work()``, then ``power.summary()``.

    The sensor is read in one thread of its own, begun by ``start`` and ended by ``stop`` (which the ``with`` calls);
    it is not closed. A reading that fails is counted and sampling goes on. ``clock`` gives seconds, ``wait`` sleeps
    until its event or a time-out: both are injected by tests.
    """

    def __init__(
        self,
        sensor: Sensor,
        *,
        interval_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] | None = None,
    ) -> None:
        if not MIN_INTERVAL_S <= interval_s <= 3600:
            raise SpecError(f"interval_s: expected {MIN_INTERVAL_S} to 3600 seconds, got {interval_s!r}")
        self.sensor = sensor
        self.interval_s = interval_s
        self._clock = clock
        self._wait = wait or (lambda event, seconds: event.wait(seconds))
        self._lock = threading.Lock()
        self._samples: list[PowerSample] = []
        self._failures = 0
        self._failure_note: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_s = 0.0

    def start(self) -> PowerSampler:
        """Begin; the first sample is taken at once. Raises SpecError when it runs already."""
        if self._thread is not None:
            raise SpecError("this sampler runs already; stop it first or make another")
        with self._lock:
            self._samples, self._failures, self._failure_note = [], 0, None
        self._stop.clear()
        self._start_s = self._clock()
        self._thread = threading.Thread(target=self._run, name="edgeds-power", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> PowerSummary:
        """Take a last sample, end the thread and give the summary. May be called again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.summary()

    def summary(self) -> PowerSummary:
        """The figures so far; may be called while it runs."""
        with self._lock:
            samples, failures, note = list(self._samples), self._failures, self._failure_note
        notes = (*self.sensor.notes, *((note,) if note else ()))
        return summarize(
            samples,
            source=self.sensor.source,
            interval_s=self.interval_s,
            failures=failures,
            is_interval_mean=self.sensor.is_interval_mean,
            notes=notes,
        )

    @property
    def samples(self) -> tuple[PowerSample, ...]:
        """All samples so far; ``t_s`` counts from the start."""
        with self._lock:
            return tuple(self._samples)

    def __enter__(self) -> PowerSampler:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        turn = 0
        while True:
            self._take()
            if self._stop.is_set():
                return
            turn += 1
            # Aim at the grid, so that slow readings do not add up; a missed turn is skipped, not made up for.
            late = self._clock() - self._start_s - turn * self.interval_s
            if late > self.interval_s:
                turn += int(late // self.interval_s)
            self._wait(self._stop, max(0.0, self._start_s + turn * self.interval_s - self._clock()))

    def _take(self) -> None:
        t_s = self._clock() - self._start_s
        try:
            sample = self.sensor.read(t_s)
        except (OSError, ValueError, EdgedsError) as error:
            with self._lock:
                self._failures += 1
                self._failure_note = self._failure_note or f"a reading failed: {error}"
            return
        with self._lock:
            self._samples.append(sample)
            if len(self._samples) > MAX_SAMPLES:
                self._samples = self._samples[::2]
                self.interval_s *= 2
