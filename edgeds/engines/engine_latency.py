"""First measured figures of a new engine: milliseconds per profile and batch, for the batcher and the planner."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edgeds.engines.base import Array, Engine
from edgeds.progress import track
from edgeds.specs import ShapeRange, TensorSpec

MAX_RUNS = 30
WARMUP_RUNS = 2


def measure_latencies(
    engine: Engine,
    profiles: Sequence[Mapping[str, ShapeRange]],
    *,
    seconds: float = 5.0,
    quiet: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[int, float]]:
    """Median milliseconds of ``infer`` by shape (without the batch, as the batcher names it) and batch.

    Each profile is run at its ``opt`` shape with batches of 1, 2, 4, ... and its largest. ``seconds`` is for all cells
    together; each gets at least one run beyond the warm-up. Inputs are noise (floats) or zeros (integers).
    """
    cells = [cell for profile in profiles or ({},) for cell in _cells(engine.inputs, profile)]
    budget_s = seconds / max(1, len(cells))
    table: dict[str, dict[int, float]] = {}
    for shapes, batch in track(cells, what="measuring", unit="shape", quiet=quiet):
        feeds = {spec.name: _fill(spec, shapes[spec.name]) for spec in engine.inputs}
        latency_ms = _median_ms(engine, feeds, budget_s=budget_s, clock=clock)
        row = table.setdefault(shape_key(shapes, engine.inputs), {})
        row[batch] = min(latency_ms, row.get(batch, latency_ms))
    return table


def shape_key(shapes: Mapping[str, tuple[int, ...]], inputs: Sequence[TensorSpec]) -> str:
    """The batcher's name of a shape: dims without the batch, with input names where there are several inputs."""
    texts = {spec.name: "x".join(map(str, shapes[spec.name][1:])) or "scalar" for spec in inputs}
    if len(inputs) == 1:
        return texts[inputs[0].name]
    return " ".join(f"{spec.name}:{texts[spec.name]}" for spec in inputs)


def _cells(
    inputs: Sequence[TensorSpec], profile: Mapping[str, ShapeRange]
) -> list[tuple[dict[str, tuple[int, ...]], int]]:
    """(shapes by input, batch) to run for one profile."""
    batched = {name for name, allowed in profile.items() if allowed.max and allowed.max[0] > allowed.min[0]}
    low = max((profile[name].min[0] for name in batched), default=1)
    high = min((profile[name].max[0] for name in batched), default=low)
    batches = [low]
    while batches[-1] * 2 < high:
        batches.append(batches[-1] * 2)
    batches = list(dict.fromkeys([*batches, high])) if batched else [0]
    cells = []
    for batch in batches:
        shapes = {spec.name: _shape(spec, profile.get(spec.name)) for spec in inputs}
        shapes |= {name: (batch, *shapes[name][1:]) for name in batched if name in shapes}
        rows = batch or next((shape[0] for shape in shapes.values() if shape), 1)
        cells.append((shapes, rows))
    return cells


def _shape(spec: TensorSpec, allowed: ShapeRange | None) -> tuple[int, ...]:
    if allowed is not None:
        return allowed.opt
    return tuple(dim if isinstance(dim, int) else 1 for dim in spec.shape)


def _fill(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    if spec.np_dtype.kind == "f":
        return np.random.default_rng(0).random(shape).astype(spec.np_dtype)
    return np.zeros(shape, dtype=spec.np_dtype)  # zero lies in every vocabulary and index range


def _median_ms(engine: Engine, feeds: Mapping[str, Array], *, budget_s: float, clock: Callable[[], float]) -> float:
    for _ in range(WARMUP_RUNS):
        engine.infer(feeds)
    times: list[float] = []
    end = clock() + budget_s
    while not times or (clock() < end and len(times) < MAX_RUNS):
        begin = clock()
        engine.infer(feeds)
        times.append((clock() - begin) * 1000)
    return round(statistics.median(times), 4)
