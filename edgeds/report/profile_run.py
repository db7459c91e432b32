"""Run a model to profile it: layer times, rates by batch and by concurrent callers, and what this CPU can do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.boards.cost_file import ModelWork
from edgeds.bundle import Bundle
from edgeds.engines import Engine, open_engine
from edgeds.engines.ort_profile import profile_onnx
from edgeds.errors import SpecError
from edgeds.progress import stage
from edgeds.report.profile import Peak, Profile, measured_profile
from edgeds.report.tune_device import make_feeds, open_precision

STREAMS = (1, 2)


def profile_here(
    source: Path | Bundle,
    *,
    model: str,
    work: ModelWork | None,
    precision: str,
    batch: int,
    size: str | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    seconds: float = 2.0,
    backend: str = "auto",
    threads: int | None = None,
    quiet: bool = False,
) -> Profile:
    """Profile a model file or a bundle on this machine. ``seconds`` is the time of each rate that is measured.

    Raises SpecError when the input shapes cannot be told, and what opening and running the model raise.
    """
    is_bundle = isinstance(source, Bundle)
    golden = source.golden() if isinstance(source, Bundle) and source.has_golden() else {}
    notes = []
    opened = (
        open_precision(source, precision=precision, backend=backend, threads=threads)
        if isinstance(source, Bundle)
        else open_engine(source, backend=backend, threads=threads)
    )
    with opened as engine:
        if not is_bundle and precision != "fp32":
            notes.append(f"a model file runs in its own precision, whatever --precision {precision} says")
        if engine.fallback_reason:
            notes.append(engine.fallback_reason)

        def feeds_of(rows: int) -> dict[str, np.ndarray]:
            given = {name: (rows, *shape[1:]) for name, shape in (shapes or {}).items()}
            return shaped_feeds(engine, given, size=size, batch=rows, golden=golden)

        feeds = feeds_of(batch)
        with stage("measuring rates", quiet=quiet):
            rates = {batch: rate(lambda: engine.infer(feeds), seconds=seconds) * batch}
            if batch != 1 and _takes(engine, 1):
                single = feeds_of(1)
                rates[1] = rate(lambda: engine.infer(single), seconds=seconds)
            streams = {count: concurrent_rate(engine, feeds, count, seconds=seconds) for count in STREAMS}
        with stage("timing layers", quiet=quiet):
            times = layer_times(engine, feeds=feeds, threads=threads)
        with stage("measuring this CPU", quiet=quiet):
            peak = machine_peak(engine, quantized=work is not None and work.is_quantized)
        return measured_profile(
            times,
            work=work,
            model=model,
            backend=engine.backend,
            precision=engine.precision or (precision if is_bundle else "as the model file"),
            batch=batch,
            latency_ms=batch / rates[batch] * 1e3,
            peak=peak,
            rates={"batches": {1: rates[batch]} if batch == 1 else rates, "streams": streams},
            notes=notes,
        )


def shaped_feeds(
    engine: Engine, given: dict[str, tuple[int, ...]], *, size: str | None, batch: int, golden: Any
) -> dict[str, np.ndarray]:
    """Feeds of the engine's inputs; ``given`` shapes win. Raises SpecError for unknown names."""
    dtypes = {spec.name: spec.dtype for spec in engine.inputs}
    for name in given:
        if name not in dtypes:
            raise SpecError(f"--input {name}: the model has the inputs {', '.join(sorted(dtypes))}")
    stored = {**golden, **{name: np.zeros(shape, dtypes[name]) for name, shape in given.items()}}
    return make_feeds(engine.inputs, size=size, batch=batch, golden=stored)


def rate(call: Callable[[], Any], *, seconds: float) -> float:
    """Calls per second, one after the other, after one to settle."""
    call()
    count, begin = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - begin < seconds:
        call()
        count += 1
    return count / (time.perf_counter() - begin)


def concurrent_rate(engine: Engine, feeds: dict[str, np.ndarray], callers: int, *, seconds: float) -> float:
    """Calls per second of ``callers`` threads together."""
    rates = [0.0] * callers

    def work(index: int) -> None:
        rates[index] = rate(lambda: engine.infer(feeds), seconds=seconds)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def layer_times(engine: Engine, *, feeds: dict[str, np.ndarray], threads: int | None) -> list[tuple[str, str, float]]:
    """(layer, operator, microseconds) by the backend's own profiler; empty where it has none."""
    profile = getattr(engine, "profile_layers", None)
    if profile is not None:
        return [(layer.name, "", layer.mean_ms * 1e3) for layer in profile(feeds)]
    path = getattr(engine, "path", None)
    if engine.backend != "onnxruntime" or path is None:
        return []
    return [(one.name, one.op, one.time_us) for one in profile_onnx(Path(path), feeds, threads=threads)]


def machine_peak(engine: Engine, *, quantized: bool) -> Peak:
    """What this machine can do: of a GPU board from its catalogue, of a CPU by a short measurement."""
    if engine.backend == "onnxruntime":
        flops, moved = cpu_peaks()
        source = "measured here: numpy's float32 matrix product and copy"
        if quantized:
            return Peak(flops_per_s=None, bytes_per_s=moved, source=f"{source}; INT8 operations of this CPU unknown")
        return Peak(flops_per_s=flops, bytes_per_s=moved, source=source)
    from edgeds.boards.predictor import machine_of
    from edgeds.boards.probe import probe_machine

    probe = probe_machine()
    if probe.board is None or probe.current_mode is None:
        return Peak(flops_per_s=None, bytes_per_s=None, source="unknown: this board or its power mode is not known")
    try:
        machine = machine_of(probe.board, probe.current_mode)
    except SpecError as error:
        return Peak(flops_per_s=None, bytes_per_s=None, source=f"unknown: {error}")
    name = {"int8": "int8", "float16": "fp16"}.get(engine.precision or "", "fp32")
    source = f"{probe.board.name}@{probe.current_mode.label}, {name}"
    return Peak(flops_per_s=machine.peak_flops[name], bytes_per_s=machine.dram_gb_s * 1e9, source=source)


def cpu_peaks(*, seconds: float = 0.3, side: int = 768) -> tuple[float, float]:
    """(float32 operations per second, bytes per second): the best of repeated matrix products and array copies."""
    a = np.ones((side, side), np.float32)
    product = np.empty_like(a)
    data = np.ones(16 << 20, np.uint8)
    copy = np.empty_like(data)
    best_product = _fastest(lambda: np.matmul(a, a, out=product), seconds=seconds)
    best_copy = _fastest(lambda: np.copyto(copy, data), seconds=seconds)
    return 2.0 * side**3 / best_product, 2.0 * data.nbytes / best_copy


def _fastest(call: Callable[[], Any], *, seconds: float) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def _takes(engine: Engine, batch: int) -> bool:
    dims: Sequence[Any] = [spec.shape[0] if spec.shape else None for spec in engine.inputs]
    return all(not isinstance(dim, int) or dim == batch for dim in dims)
