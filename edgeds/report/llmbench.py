"""Load on a language-model pipeline, measured: first token, time between tokens, tokens per second, KV cache."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from edgeds.errors import SpecError
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.pipelines.llm.stream import Completion, Stream
from edgeds.power import Sensor
from edgeds.progress import track
from edgeds.report.benchpower import power_figures, start_sampler
from edgeds.report.stats import device_name, software_versions, utc_now
from edgeds.runtime.jobs import attempt

TICK_S = 0.05
MAX_SECONDS = 86_400.0
MAX_CONCURRENCY = 1024


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Milliseconds; percentiles by linear interpolation over all values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class LlmLoad:
    """What is sent: prompts of random tokens, none equal to another but for ``shared_prefix`` tokens at their start."""

    prompt_tokens: int = 128
    output_tokens: int = 64
    concurrency: int = 1
    shared_prefix: int = 0
    seconds: float = 10.0
    warmup_s: float = 2.0

    def __post_init__(self) -> None:
        for name, low in (("prompt_tokens", 1), ("output_tokens", 1), ("concurrency", 1), ("shared_prefix", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise SpecError(f"{name}: expected a whole number from {low}, got {value!r}")
        if self.concurrency > MAX_CONCURRENCY:
            raise SpecError(f"concurrency: expected 1 to {MAX_CONCURRENCY}, got {self.concurrency}")
        if self.shared_prefix > self.prompt_tokens:
            raise SpecError(f"shared_prefix: {self.shared_prefix} of {self.prompt_tokens} prompt tokens")
        if not 0 < self.seconds <= MAX_SECONDS or not 0 <= self.warmup_s <= MAX_SECONDS:
            raise SpecError(f"seconds: expected up to {MAX_SECONDS:.0f}, got {self.seconds!r} and {self.warmup_s!r}")


@dataclass(frozen=True, kw_only=True)
class LlmBenchReport:
    """Requests that began within the window; rates are their tokens over the time until the last of them ended.

    ``itl_ms`` is the time between two tokens of one request. ``decode_tokens_per_s`` is the rate of one request after
    its first token (mean over requests). KV shares are of all pages. None where nothing finished.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    ttft_ms: Spread | None
    itl_ms: Spread | None
    total_ms: Spread | None
    tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    decode_tokens_per_s: float | None
    kv_mean_share: float | None
    kv_peak_share: float | None
    kv_tokens: int
    kv_dtype: str
    kv_mib: float
    preemptions: int
    cached_tokens: int
    drafted: int
    accepted: int
    finish_reasons: Mapping[str, int]
    load: LlmLoad
    interrupted: bool
    backend: str
    fallback_reason: str | None
    precision: str | None
    threads: int | None
    device: str
    date: str
    versions: Mapping[str, str]
    power_w: float | None = None
    energy_mj_per_token: float | None = None
    power_source: str = "unavailable"


@dataclass(kw_only=True)
class _Run:
    window_s: float = math.inf
    numbers: Iterator[int] = field(default_factory=itertools.count)
    stop: threading.Event = field(default_factory=threading.Event)
    abort: threading.Event = field(default_factory=threading.Event)
    records: list[tuple[float, float, Completion]] = field(default_factory=list)
    occupancy: list[float] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    live: set[Stream] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run_llm_bench(
    pipeline: LlmPipeline,
    load: LlmLoad,
    *,
    speculate: bool | None = None,
    quiet: bool = False,
    sensor: Sensor | None = None,
) -> LlmBenchReport:
    """Measure ``pipeline`` under ``load``. Output goes on past end tokens, so that every request is of one size.

    Ctrl-C ends the window early and gives a report with ``interrupted=True``. The first error of a request ends the run
    and is raised; so does InputError for a load that the cache or the context cannot hold.
    """
    run, interrupted = _Run(), False
    callers = [
        threading.Thread(target=_send, args=(run, pipeline, load, speculate), daemon=True)
        for _ in range(load.concurrency)
    ]
    sampler, power = None, None
    try:
        for caller in callers:
            caller.start()
        _watch(run, pipeline, load.warmup_s, what="warming up", quiet=quiet)
        run.occupancy.clear()
        sampler = start_sampler(sensor)
        run.window_s = time.monotonic()
        _watch(run, pipeline, load.seconds, what="measuring", quiet=quiet)
        run.stop.set()
        for caller in callers:
            caller.join()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        run.abort.set()
        run.stop.set()
        with run.lock:
            for stream in run.live:
                stream.cancel()
        for caller in callers:
            if caller.ident is not None:
                caller.join()
        power = sampler.stop() if sampler is not None else None
    if run.errors:
        raise run.errors[0]
    report = _report(run, pipeline, load, interrupted=interrupted)
    figures = power_figures(sensor, power, fps=report["tokens_per_s"])
    return LlmBenchReport(
        **report, power_w=figures.power_w, energy_mj_per_token=figures.energy_mj, power_source=figures.source
    )


def _send(run: _Run, pipeline: LlmPipeline, load: LlmLoad, speculate: bool | None) -> None:
    """One caller: request after request until told to stop, and at least one within the window."""
    counted = False
    while not run.abort.is_set() and not (run.stop.is_set() and counted):
        begin = time.monotonic()
        counted = counted or begin >= run.window_s
        result = attempt(lambda: _ask(run, pipeline, load, speculate))
        if isinstance(result, Exception):
            run.errors.append(result)
            run.abort.set()
            run.stop.set()
            return
        if result.finish_reason != "cancelled":
            run.records.append((begin, time.monotonic(), result))


def _ask(run: _Run, pipeline: LlmPipeline, load: LlmLoad, speculate: bool | None) -> Completion:
    rng = np.random.default_rng(next(run.numbers) + 1)
    ordinary = pipeline.text.ordinary_tokens
    shared = np.random.default_rng(0).choice(ordinary, load.shared_prefix)
    own = rng.choice(ordinary, load.prompt_tokens - load.shared_prefix)
    prompt = [int(token) for token in (*shared, *own)]
    stream = pipeline.stream(prompt, max_tokens=load.output_tokens, ignore_eos=True, speculate=speculate)
    with run.lock:
        run.live.add(stream)
    try:
        if run.abort.is_set():
            stream.cancel()
        return stream.result()
    finally:
        with run.lock:
            run.live.discard(stream)


def _watch(run: _Run, pipeline: LlmPipeline, seconds: float, *, what: str, quiet: bool) -> None:
    end = time.monotonic() + seconds
    for _ in track(range(math.ceil(seconds / TICK_S)), what=what, unit="tick", quiet=quiet):
        left_s = min(TICK_S, end - time.monotonic())
        if left_s > 0 and run.stop.wait(left_s):
            return
        run.occupancy.append(pipeline.stats()["kv"].occupancy)


def _report(run: _Run, pipeline: LlmPipeline, load: LlmLoad, *, interrupted: bool) -> dict:
    counted = [record for record in run.records if record[0] >= run.window_s]
    done = [completion for *_, completion in counted]
    wall_s = max((end for _, end, _ in counted), default=run.window_s) - run.window_s if counted else 0.0
    prompt, output = (sum(getattr(one, name) for one in done) for name in ("prompt_tokens", "completion_tokens"))
    reasons: dict[str, int] = {}
    for one in done:
        reasons[one.finish_reason] = reasons.get(one.finish_reason, 0) + 1
    rates = [one.tokens_per_s for one in done if one.tokens_per_s is not None]
    stats, layout, engine = pipeline.stats()["kv"], pipeline.layout, pipeline.engine
    per_s = 1 / wall_s if wall_s > 0 else 0.0
    return {
        "requests": len(done),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "wall_s": wall_s,
        "ttft_ms": _spread([one.ttft_ms for one in done if one.ttft_ms is not None]),
        "itl_ms": _spread([gap for one in done for gap in np.diff(one.token_times_s) * 1e3]),
        "total_ms": _spread([one.total_ms for one in done]),
        "tokens_per_s": output * per_s,
        "prompt_tokens_per_s": prompt * per_s,
        "requests_per_s": len(done) * per_s,
        "decode_tokens_per_s": sum(rates) / len(rates) if rates else None,
        "kv_mean_share": float(np.mean(run.occupancy)) if run.occupancy else None,
        "kv_peak_share": max(run.occupancy, default=None),
        "kv_tokens": stats.pages * layout.page,
        "kv_dtype": layout.dtype,
        "kv_mib": stats.pages * layout.page_bytes / 2**20,
        "preemptions": sum(one.preemptions for one in done),
        "cached_tokens": sum(one.cached_tokens for one in done),
        "drafted": sum(one.drafted for one in done),
        "accepted": sum(one.accepted for one in done),
        "finish_reasons": reasons,
        "load": load,
        "interrupted": interrupted,
        "backend": engine.backend,
        "fallback_reason": engine.fallback_reason,
        "precision": engine.precision,
        "threads": engine.threads,
        "device": device_name(),
        "date": utc_now(),
        "versions": software_versions(),
    }


def _spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, (50, 90, 95, 99)))
    return Spread(mean=float(np.mean(values)), p50=p50, p90=p90, p95=p95, p99=p99)
