"""Frames per second and latency in a steady window, under a fixed number of concurrent callers.

Closed loop: each caller sends its next request when its last one is answered, so latency includes queueing. Requests
that began before the window (warm-up) do not count; the window ends with the last request that began in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeds.engines import Engine
from edgeds.errors import SpecError
from edgeds.power import PowerSample, PowerSampler, PowerSummary, Sensor
from edgeds.progress import track
from edgeds.report.benchpower import power_figures, start_sampler
from edgeds.report.stats import device_name, software_versions, summarize_latencies, utc_now
from edgeds.runtime import Answer, Session
from edgeds.runtime.jobs import attempt

MAX_CONCURRENCY = 1024
MAX_SECONDS = 86_400.0
TICK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One request that is sent over and over: what the target takes, its frames, and its share of padding pixels."""

    payload: Any
    frames: int = 1
    padding_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What was measured, where and with what. Latencies are None when nothing finished (interrupted early).

    ``stages_ms`` are means per request. ``batch_size_histogram`` counts runs by rows within the window (about: runs
    under way at its edges are counted where they end). ``power_w`` is the mean over the window and
    ``energy_mj`` the energy per frame by it; both are None, with the reason in ``power_source``, when no sensor told.
    """

    frames: int
    requests: int
    wall_s: float
    fps: float
    latency_mean_ms: float | None
    latency_p50_ms: float | None
    latency_p95_ms: float | None
    latency_p99_ms: float | None
    latency_max_ms: float | None
    stages_ms: Mapping[str, float]
    padding_share: float
    batch_size_histogram: Mapping[int, int]
    mean_batch_rows: float | None
    concurrency: int
    warmup_s: float
    interrupted: bool
    backend: str
    fallback_reason: str | None
    precision: str | None
    threads: int | None
    device: str
    date: str
    versions: Mapping[str, str]
    power_w: float | None = None
    energy_mj: float | None = None
    power_source: str = "unavailable"


@dataclass(kw_only=True)
class BenchTrace:
    """Filled by ``run_bench``: the single latencies and power readings behind its figures."""

    latencies_ms: list[float] = field(default_factory=list)
    samples: tuple[PowerSample, ...] = ()
    power: PowerSummary | None = None


@dataclass(kw_only=True)
class _Load:
    """State shared by the callers. ``records``: (begin, end, request index, stages) of finished requests."""

    call: Callable[[Any], Any]
    requests: Sequence[BenchRequest]
    concurrency: int
    turns: Iterator[int] = field(default_factory=itertools.count)
    records: list[tuple[float, float, int, Mapping[str, float]]] = field(default_factory=list)
    window_s: float = math.inf
    stop: threading.Event = field(default_factory=threading.Event)
    abort: threading.Event = field(default_factory=threading.Event)
    errors: list[Exception] = field(default_factory=list)


def run_bench(
    target: Session | Callable[[Any], Any] | Any,
    requests: Sequence[BenchRequest],
    *,
    seconds: float = 10.0,
    warmup_seconds: float = 2.0,
    concurrency: int = 1,
    quiet: bool = False,
    engine: Engine | None = None,
    sensor: Sensor | None = None,
    trace: BenchTrace | None = None,
) -> BenchReport:
    """Measure a Session (payloads are feeds), a pipeline with ``predict`` and ``session``, or any callable.

    The requests are sent in turn by ``concurrency`` callers: each once to settle shapes, then ``warmup_seconds``,
    then ``seconds`` that count; every caller finishes at least one request. Ctrl-C ends the window early and gives a
    report with ``interrupted=True``. ``engine`` says what to report for a plain callable; ``sensor`` (``edgeds.power.
    open_sensor``, not closed here) is sampled in the window; ``trace`` is filled with what was seen in it. The first
    error of a request ends the run and is raised. Raises SpecError for arguments out of range.
    """
    _check(requests, seconds=seconds, warmup_seconds=warmup_seconds, concurrency=concurrency)
    session = target if isinstance(target, Session) else getattr(target, "session", None)
    call = target.infer if isinstance(target, Session) else getattr(target, "predict", target)
    load = _Load(call=call, requests=requests, concurrency=concurrency)
    before: Mapping[int, int] = {}
    interrupted = False
    sampler: PowerSampler | None = None
    power: PowerSummary | None = None
    callers = [threading.Thread(target=_send, args=(load,), daemon=True) for _ in range(concurrency)]
    try:
        for request in track(requests, what="settling shapes", unit="shape", quiet=quiet):
            call(request.payload)
        for caller in callers:
            caller.start()
        _wait(load, warmup_seconds, what="warming up", quiet=quiet)
        before = _histogram(session)
        sampler = start_sampler(sensor)
        load.window_s = time.perf_counter()
        _wait(load, seconds, what="measuring", quiet=quiet)
        load.stop.set()
        for caller in callers:
            caller.join()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        load.abort.set()
        load.stop.set()
        for caller in callers:
            if caller.ident is not None:
                caller.join()
        power = sampler.stop() if sampler is not None else None
    if load.errors:
        raise load.errors[0]
    if trace is not None:
        _fill(trace, load=load, sampler=sampler, power=power)
    engine = engine or getattr(session, "engine", None)
    after = _histogram(session)
    histogram = {rows: count - before.get(rows, 0) for rows, count in after.items() if count > before.get(rows, 0)}
    counted = histogram if load.window_s < math.inf else {}
    report = _report(load, engine=engine, histogram=counted, warmup_s=warmup_seconds, interrupted=interrupted)
    figures = power_figures(sensor, power, fps=report.fps)
    return dataclasses.replace(
        report, power_w=figures.power_w, energy_mj=figures.energy_mj, power_source=figures.source
    )


def _fill(trace: BenchTrace, *, load: _Load, sampler: PowerSampler | None, power: PowerSummary | None) -> None:
    trace.latencies_ms += [(end - begin) * 1000 for begin, end, *_ in load.records if begin >= load.window_s]
    trace.samples, trace.power = (sampler.samples if sampler is not None else ()), power


def _send(load: _Load) -> None:
    """One caller: requests in turn until told to stop, and at least one within the window."""
    counted = False
    while not load.abort.is_set() and not (load.stop.is_set() and counted):
        index = next(load.turns) % len(load.requests)
        payload = load.requests[index].payload
        begin = time.perf_counter()
        counted = counted or begin >= load.window_s
        result = attempt(lambda payload=payload: load.call(payload))  # type: ignore[misc]
        end = time.perf_counter()
        if isinstance(result, Exception):
            load.errors.append(result)
            load.abort.set()
            load.stop.set()
            return
        load.records.append((begin, end, index, _stages(result)))


def _wait(load: _Load, seconds: float, *, what: str, quiet: bool) -> None:
    end = time.perf_counter() + seconds
    for _ in track(range(math.ceil(seconds / TICK_S)), what=what, unit="tick", quiet=quiet):
        left_s = min(TICK_S, end - time.perf_counter())
        if left_s > 0 and load.stop.wait(left_s):
            return


def _stages(result: Any) -> Mapping[str, float]:
    if isinstance(result, Answer):
        return {"queue": result.queue_ms, "batch_form": result.batch_form_ms, "compute": result.compute_ms}
    if isinstance(result, list) and len(result) == 1:  # a pipeline answers one image with a list of one
        result = result[0]
    timings = getattr(result, "timings_ms", None)
    return timings if isinstance(timings, Mapping) else {}


def _histogram(session: Any) -> Mapping[int, int]:
    return session.stats().batch_size_histogram if isinstance(session, Session) else {}


def _report(
    load: _Load,
    *,
    engine: Engine | None,
    histogram: Mapping[int, int],
    warmup_s: float,
    interrupted: bool,
) -> BenchReport:
    counted = [record for record in load.records if record[0] >= load.window_s]
    frames = [load.requests[index].frames for _, _, index, _ in counted]
    wall_s = max((end for _, end, _, _ in counted), default=load.window_s) - load.window_s if counted else 0.0
    latency = summarize_latencies([(end - begin) * 1000 for begin, end, _, _ in counted]) if counted else None
    padding = sum(load.requests[index].padding_share * load.requests[index].frames for _, _, index, _ in counted)
    stages: dict[str, list[float]] = {}
    for *_, timings in counted:
        for name, value in timings.items():
            stages.setdefault(name, []).append(value)
    runs = sum(histogram.values())
    return BenchReport(
        frames=sum(frames),
        requests=len(counted),
        wall_s=wall_s,
        fps=sum(frames) / wall_s if wall_s > 0 else 0.0,
        latency_mean_ms=latency.mean_ms if latency else None,
        latency_p50_ms=latency.p50_ms if latency else None,
        latency_p95_ms=latency.p95_ms if latency else None,
        latency_p99_ms=latency.p99_ms if latency else None,
        latency_max_ms=latency.max_ms if latency else None,
        stages_ms={name: sum(values) / len(values) for name, values in stages.items()},
        padding_share=padding / sum(frames) if frames else 0.0,
        batch_size_histogram=histogram,
        mean_batch_rows=sum(rows * count for rows, count in histogram.items()) / runs if runs else None,
        concurrency=load.concurrency,
        warmup_s=warmup_s,
        interrupted=interrupted,
        backend=engine.backend if engine else "unknown",
        fallback_reason=engine.fallback_reason if engine else None,
        precision=engine.precision if engine else None,
        threads=engine.threads if engine else None,
        device=device_name(),
        date=utc_now(),
        versions=software_versions(),
    )


def _check(requests: Sequence[BenchRequest], *, seconds: float, warmup_seconds: float, concurrency: int) -> None:
    if not requests:
        raise SpecError("requests: none given; pass at least one")
    for request in requests:
        if request.frames < 1 or not 0 <= request.padding_share < 1:
            raise SpecError(f"request: frames must be >= 1 and padding_share in [0, 1), got {request.frames} frames")
    if not 0 < seconds <= MAX_SECONDS:
        raise SpecError(f"seconds: expected a number above 0 and up to {MAX_SECONDS:.0f}, got {seconds!r}")
    if not 0 <= warmup_seconds <= MAX_SECONDS:
        raise SpecError(f"warmup_seconds: expected 0 to {MAX_SECONDS:.0f}, got {warmup_seconds!r}")
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= MAX_CONCURRENCY:
        raise SpecError(f"concurrency: expected a whole number from 1 to {MAX_CONCURRENCY}, got {concurrency!r}")
