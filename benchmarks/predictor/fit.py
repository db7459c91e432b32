"""Fit the predictor's coefficients on published measurements, whole sources held out, and print how wrong they are.

    python -m benchmarks.predictor.fit MEASUREMENTS.csv [--write]

``--write`` stores the table that ships with edgeds. Rules for rows: ``benchmarks/predictor/rows.py``.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predictor.rows import COSTS, NAMES, PRECISIONS, RULES, Row, _place, read_rows
from edgeds.boards.coefficients import DATA
from edgeds.boards.cost_file import read_cost
from edgeds.boards.fusion import fuse_layers
from edgeds.boards.predictor import machine_of, power_terms
from edgeds.boards.roofline import WEIGHT_BYTES, Coefficients, choose_precision, time_kernel
from edgeds.files import write_json

START = Coefficients(
    launch_us=3.0, cycles=4000.0, efficiency_fp32=0.6, efficiency_fp16=0.6, efficiency_int8=0.5,
    bandwidth_efficiency=0.75, fill=2000.0, shallow=50.0, smooth=0.1, cache_mib=1.0,
)  # fmt: skip
KEYS = [field.name for field in fields(Coefficients)]
PRIOR = 0.15
"""Weight of staying near START, against one source of weight 1: keeps coefficients that the rows cannot tell apart."""

Vectors = tuple[Any, ...]


def vectors(row: Row) -> Vectors:
    """Arrays over the kernels of one row, so that the fit is quick. Must agree with ``time_kernel``; checked in main."""
    machine = machine_of(row.board, row.mode)
    kernels = fuse_layers(row.work, batch=row.batch)
    precisions = [choose_precision(k, precision=row.precision, is_quantized=False) for k in kernels]
    times = [time_kernel(k, machine, precision=p, coefficients=START) for k, p in zip(kernels, precisions, strict=True)]
    engines = ["fp16" if p == "int4" else p for p in precisions]
    matrix = np.array([k.is_matrix and k.written > 0 for k in kernels])
    ideal = np.array([k.flops / machine.peak_flops[e] * 1e6 for k, e in zip(kernels, engines, strict=True)]) * matrix
    index = np.array([("fp32", "fp16", "int8").index(e) for e in engines])
    per_sm = machine.sm / np.array([max(k.written, 1) for k in kernels])
    depth = np.array([max(k.depth, 1) for k in kernels])
    smooth = np.array([k.written * k.is_smooth for k in kernels]) / (machine.sm * machine.gpu_mhz)
    weights = np.array([k.params * WEIGHT_BYTES[p] for k, p in zip(kernels, precisions, strict=True)])
    kept = np.array([t.bytes for t in times]) - weights
    memory = np.stack([weights, kept]) / machine.dram_gb_s / 1e3
    return ideal, index, per_sm, depth, memory, machine.gpu_mhz, len(kernels), smooth, kept


def predicted(v: Vectors, logs: np.ndarray) -> float:
    """Milliseconds of one row for logarithms of the coefficients in the order of KEYS."""
    c = np.exp(logs)
    ideal, index, per_sm, depth, memory, mhz, count, smooth, kept = v
    compute = ideal / c[2:5][index] * (1 + c[6] * per_sm) * (1 + c[7] / depth) + c[8] * smooth
    return float(np.hypot(compute, (memory[0] + memory[1] * kept / (kept + c[9] * (1 << 20))) / c[5]).sum() + count * (c[0] + c[1] / mhz)) / 1e3


def fit(rows: Sequence[Row], cache: dict[int, Vectors]) -> np.ndarray:
    """Gauss-Newton on log errors, robust (Huber at 0.3), every source with the root of its number of rows."""
    start = np.log([getattr(START, key) for key in KEYS])
    counts = {source: sum(row.source == source for row in rows) for source in {row.source for row in rows}}
    weights = np.array([counts[row.source] ** -0.25 for row in rows])
    values = np.log([row.value for row in rows])

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.log([predicted(cache[id(row)], logs) for row in rows]) - values

    logs, damping = start.copy(), 0.1
    for _ in range(25):
        now = errors(logs)
        jacobian = np.stack([(errors(logs + 0.01 * unit) - now) / 0.01 for unit in np.eye(len(KEYS))], axis=1)
        w = weights**2 * np.minimum(1, 0.3 / np.maximum(np.abs(now), 1e-9))
        normal = jacobian.T @ (jacobian * w[:, None]) + (PRIOR + damping) * np.eye(len(KEYS))
        step = np.linalg.solve(normal, -(jacobian.T @ (w * now)) - PRIOR * (logs - start))
        logs = logs + np.clip(step, -0.5, 0.5)
        logs[2:6] = np.minimum(logs[2:6], np.log(0.95))  # no efficiency above what any kernel reaches
        damping *= 0.7
    return logs


def held_out(rows: Sequence[Row], train: Callable[[Sequence[Row]], Callable[[Row], float]]) -> list[tuple[Row, float]]:
    """Rows with predictions of a fit that saw no row of their lab (the MLPerf rounds of one implementation are one)."""
    result = []
    for lab in sorted({lab_of(row) for row in rows}):
        guess = train([row for row in rows if lab_of(row) != lab])
        result += [(row, guess(row)) for row in rows if lab_of(row) == lab]
    return result


def lab_of(row: Row) -> str:
    return "mlperf" if row.source.startswith("mlperf") else row.source


def report(pairs: Sequence[tuple[Row, float]], *, title: str) -> dict[str, float]:
    """Median errors and coverage; the interval of a source comes from the residuals of the other labs."""
    errors = [abs(guess / row.value - 1) for row, guess in pairs]
    by_source = {s: [e for (row, _), e in zip(pairs, errors, strict=True) if row.source == s] for s in sorted({r.source for r, _ in pairs})}
    inside = []
    for row, guess in pairs:
        others = [np.log(r.value / g) for r, g in pairs if lab_of(r) != lab_of(row)] or [0.0]
        low, high = np.quantile(others, (0.1, 0.9))
        inside.append(low <= np.log(row.value / guess) <= high)
    medians = {source: statistics.median(values) for source, values in by_source.items()}
    print(f"{title}: {len(pairs)} rows, median {statistics.median(errors):.1%}, "
          f"median of source medians {statistics.median(medians.values()):.1%}, coverage {np.mean(inside):.0%}")
    for source, value in medians.items():
        print(f"    {source:28} {len(by_source[source]):4} rows  {value:.1%}")
    return {"rows": len(pairs), "median": statistics.median(errors),
            "median_of_sources": statistics.median(medians.values()), "coverage": float(np.mean(inside))}


def fit_kind(rows: Sequence[Row], *, title: str) -> tuple[Coefficients, tuple[float, float], dict[str, float]]:
    cache = {id(row): vectors(row) for row in rows}

    def train(chosen: Sequence[Row]) -> Callable[[Row], float]:
        logs = fit(chosen, cache)
        return lambda row: predicted(cache[id(row)], logs)

    pairs = held_out(rows, train)
    figures = report(pairs, title=title)
    logs = fit(rows, cache)
    inside = [abs(predicted(cache[id(row)], logs) / row.value - 1) for row in rows]
    print(f"    on the rows it was fitted to: {statistics.median(inside):.1%}")
    low, high = np.exp(np.quantile([np.log(row.value / guess) for row, guess in pairs], (0.1, 0.9)))
    return Coefficients(**dict(zip(KEYS, np.exp(logs).tolist(), strict=True))), (float(low), float(high)), figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    args = parser.parse_args()
    rows = read_rows(args.measurements)
    print(RULES)
    for kind in ("cnn", "llm"):
        c, band, figures = fit_kind([r for r in rows if r.kind == kind], title=kind)
        print(c, band)


if __name__ == "__main__":
    main()
