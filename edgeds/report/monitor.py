"""Watch an engine that others use: latency, throughput, GPU load and power over an interval."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from edgeds.engines import Engine
from edgeds.errors import SpecError
from edgeds.power import PowerSample, PowerSampler, PowerSummary, Sensor, open_sensor
from edgeds.report.stats import device_name, summarize_latencies, utc_now

METRICS = ("latency", "throughput", "gpu_util", "power")
MAX_SECONDS = 86_400.0
KEPT = 100_000
_CALLS = ("infer", "infer_borrowed")


class EngineMonitor:
    """``EngineMonitor(engine, metrics=["latency", "power"]).collect(interval=5)``.

    While it collects, the engine's calls are timed from outside: results, errors and threads of the callers stay as
    they are. A context manager that collects from its beginning to its end is ``with monitor as m: work()``, then
    ``m.result()``. ``sensor`` is not closed here when it is given. Raises SpecError for an unknown metric.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        metrics: Sequence[str] = METRICS,
        sensor: Sensor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        unknown = [name for name in metrics if name not in METRICS]
        if unknown or not metrics:
            raise SpecError(f"metric {unknown[0] if unknown else ''!r}: choose from {', '.join(METRICS)}")
        self.engine = engine
        self.metrics = tuple(dict.fromkeys(metrics))
        self._given, self._clock = sensor, clock
        self._lock, self._inside = threading.Lock(), threading.local()
        self._times: list[float] = []
        self._calls = self._items = self._failed = 0
        self._wrapped: dict[str, Any] = {}
        self._sampler: PowerSampler | None = None
        self._sensor: Sensor | None = None
        self._begin = 0.0
        self._result: dict[str, Any] | None = None

    def collect(self, interval: float = 5.0) -> dict[str, Any]:
        """Watch for ``interval`` seconds and give the figures; see ``result``."""
        if not 0 < interval <= MAX_SECONDS:
            raise SpecError(f"interval {interval!r}: expected more than 0 and at most {MAX_SECONDS:g} seconds")
        with self:
            time.sleep(interval)
        return self.result()

    def result(self) -> dict[str, Any]:
        """Figures of the last watch, by metric; None with the reason under ``unavailable`` where nothing tells.

        ``latency``: mean, p50, p95, p99 and max in ms of single calls, None without a call. ``throughput``: calls and
        rows per second. ``gpu_util``: mean percent. ``power``: mean and peak watts, joules, and joules per row.
        """
        if self._result is None:
            raise SpecError("nothing was collected yet: call collect(), or use the monitor in a with statement")
        return self._result

    def __enter__(self) -> EngineMonitor:
        if self._wrapped:
            raise SpecError("this monitor collects already; make another one")
        with self._lock:
            self._times, self._calls, self._items, self._failed = [], 0, 0, 0
        if {"gpu_util", "power"} & set(self.metrics):
            self._sensor = self._given or open_sensor()
            self._sampler = PowerSampler(self._sensor).start()
        self._begin = self._clock()
        for name in _CALLS:
            inner = getattr(self.engine, name, None)
            if inner is not None:
                self._wrapped[name] = vars(self.engine).get(name)  # an instance attribute of someone else's is kept
                setattr(self.engine, name, self._timed(inner))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, before in self._wrapped.items():
            if before is None:
                delattr(self.engine, name)
            else:
                setattr(self.engine, name, before)
        self._wrapped = {}
        seconds = self._clock() - self._begin
        summary: PowerSummary | None = None
        samples: tuple[PowerSample, ...] = ()
        sensor, sampler = self._sensor, self._sampler
        self._sensor = self._sampler = None
        if sampler is not None:
            summary, samples = sampler.stop(), sampler.samples
        if sensor is not None and sensor is not self._given:
            sensor.close()
        self._result = self._figures(seconds, summary=summary, samples=samples, sensor=sensor)

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(feeds: Mapping[str, Any], *rest: Any, **named: Any) -> Any:
            if getattr(self._inside, "on", False):  # infer that calls infer_borrowed is one call
                return inner(feeds, *rest, **named)
            self._inside.on = True
            begin = self._clock()
            done = False
            try:
                answer = inner(feeds, *rest, **named)
                done = True
                return answer
            finally:
                self._inside.on = False
                self._note((self._clock() - begin) * 1e3, rows=_rows(feeds), done=done)

        return call

    def _note(self, latency_ms: float, *, rows: int, done: bool) -> None:
        with self._lock:
            if not done:
                self._failed += 1
                return
            self._calls += 1
            self._items += rows
            if len(self._times) < KEPT:
                self._times.append(latency_ms)

    def _figures(
        self,
        seconds: float,
        *,
        summary: PowerSummary | None,
        samples: Sequence[PowerSample],
        sensor: Sensor | None,
    ) -> dict[str, Any]:
        with self._lock:
            times, calls, items, failed = list(self._times), self._calls, self._items, self._failed
        unavailable: dict[str, str] = {}
        found: dict[str, Any] = {}
        if "latency" in self.metrics:
            found["latency"] = _latency(times)
            if not times:
                unavailable["latency"] = "no call ended in this time"
        if "throughput" in self.metrics:
            found["throughput"] = {"calls_per_s": calls / seconds, "items_per_s": items / seconds}
        if "gpu_util" in self.metrics:
            loads = [one.gpu_load_pct for one in samples if one.gpu_load_pct is not None]
            found["gpu_util"] = sum(loads) / len(loads) if loads else None
            if not loads:
                unavailable["gpu_util"] = "no sensor of this machine tells the load of a GPU"
        if "power" in self.metrics:
            found["power"] = _power(summary, items=items)
            if found["power"] is None:
                reason = sensor.unavailable if sensor is not None else None
                unavailable["power"] = reason or "too few readings"
        return {
            **found,
            "unavailable": unavailable,
            "interval_s": seconds,
            "calls": calls,
            "items": items,
            "failed": failed,
            "backend": self.engine.backend,
            "device": device_name(),
            "sensor": sensor.source if sensor is not None else None,
            "date": utc_now(),
        }


def _latency(times: list[float]) -> dict[str, float] | None:
    if not times:
        return None
    found = summarize_latencies(times)
    return {
        "mean_ms": found.mean_ms,
        "p50_ms": found.p50_ms,
        "p95_ms": found.p95_ms,
        "p99_ms": found.p99_ms,
        "max_ms": found.max_ms,
    }


def _power(summary: PowerSummary | None, *, items: int) -> dict[str, float | None] | None:
    if summary is None or summary.mean_w is None or summary.energy_j is None:
        return None
    return {
        "mean_w": summary.mean_w,
        "peak_w": summary.peak_w,
        "energy_j": summary.energy_j,
        "energy_per_item_j": summary.energy_j / items if items else None,
    }


def _rows(feeds: Mapping[str, Any]) -> int:
    for value in feeds.values():
        shape = getattr(value, "shape", ())
        return int(shape[0]) if shape else 1
    return 1
