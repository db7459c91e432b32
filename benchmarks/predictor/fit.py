"""Fit the predictor's coefficients on published measurements, whole sources held out, and print how wrong they are.

    python -m benchmarks.predictor.fit MEASUREMENTS.csv [--write]

``--write`` stores the table that ships with edgeds. Rules for rows: ``benchmarks/predictor/rows.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predictor.crude import train_crude
from benchmarks.predictor.power import fit_power
from benchmarks.predictor.rows import RULES, Row, read_rows
from edgeds.boards.coefficients import DATA, Interval, Table
from edgeds.boards.fusion import fuse_layers
from edgeds.boards.predictor import machine_of
from edgeds.boards.roofline import Coefficients, choose_precision, time_kernel
from edgeds.files import write_json
from edgeds.specs import to_json

VERSION = "2026.12.2"
LAB_SPREAD = 0.10
START = Coefficients(
    launch_us=3.0, cycles=4000.0, efficiency_fp32=0.6, efficiency_fp16=0.6, efficiency_int8=0.6,
    bandwidth_efficiency=0.75, fill=2000.0, shallow=50.0, smooth=0.2,
)  # fmt: skip
KEYS = [field.name for field in fields(Coefficients)]
PRIOR = 0.15
"""Weight of staying near START, against one source of weight 1: keeps coefficients that the rows cannot tell apart."""

Vectors = tuple[Any, ...]


def vectors(row: Row) -> Vectors:
    """Arrays over the kernels of one row, so that the fit is quick. A test holds it to ``time_kernel``."""
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
    memory = np.array([t.bytes for t in times]) / machine.dram_gb_s / 1e3
    return ideal, index, per_sm, depth, memory, machine.gpu_mhz, len(kernels), smooth


def predicted(v: Vectors, logs: np.ndarray) -> float:
    """Milliseconds of one row for logarithms of the coefficients in the order of KEYS."""
    c = np.exp(logs)
    ideal, index, per_sm, depth, memory, mhz, count, smooth = v
    compute = ideal / c[2:5][index] * (1 + c[6] * per_sm) * (1 + c[7] / depth) + c[8] * smooth
    return float(np.hypot(compute, memory / c[5]).sum() + count * (c[0] + c[1] / mhz)) / 1e3


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


def lab_of(row: Row) -> str:
    """Who measured: the MLPerf rounds run one implementation, the Ultralytics pages one exporter."""
    return row.source.partition("_")[0]


def source_of(row: Row) -> str:
    return row.source


Group = Callable[[Row], str]
Guess = Callable[[Row], float]


def held_out(
    rows: Sequence[Row], train: Callable[[Sequence[Row]], Guess], *, group: Group = source_of
) -> list[tuple[Row, float]]:
    """Rows with predictions of a fit that saw no row of their group."""
    result = []
    for name in sorted({group(row) for row in rows}):
        guess = train([row for row in rows if group(row) != name])
        result += [(row, guess(row)) for row in rows if group(row) == name]
    return result


def band(residuals: Sequence[float], *, groups: int) -> tuple[float, float]:
    """80 % of log(measured / predicted), widened by what the next lab may differ.

    Two labs differ by LAB_SPREAD at least on the same work. With the residuals of ``groups`` labs or sources that shift
    is itself known from so many draws only, so its share grows by the factor sqrt(1 + 3 / groups): a mean of few draws
    and a normal spread estimated from them, roughly.
    """
    low, high = np.quantile(residuals, (0.1, 0.9)) if len(residuals) else (0.0, 0.0)
    spread = LAB_SPREAD * float(np.sqrt(1 + 3 / max(groups, 1)))
    return -float(np.hypot(min(low, 0), spread)), float(np.hypot(max(high, 0), spread))


def report(pairs: Sequence[tuple[Row, float]], *, title: str, group: Group = source_of) -> dict[str, float]:
    """Median errors and coverage; the band of a source comes from the residuals of the others."""
    by_source: dict[str, list[float]] = {}
    inside = []
    for row, guess in pairs:
        by_source.setdefault(row.source, []).append(abs(guess / row.value - 1))
        others = [(float(np.log(r.value / g)), group(r)) for r, g in pairs if group(r) != group(row)]
        low, high = band([residual for residual, _ in others], groups=len({name for _, name in others}))
        inside.append(low <= np.log(row.value / guess) <= high)
    errors = [error for values in by_source.values() for error in values]
    medians = {source: statistics.median(values) for source, values in by_source.items()}
    figures = {
        "rows": float(len(pairs)),
        "median_error": statistics.median(errors),
        "median_of_source_medians": statistics.median(medians.values()),
        "coverage": float(np.mean(inside)),
    }
    print(f"{title}: " + ", ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    for source, value in medians.items():
        print(f"    {source:28} {len(by_source[source]):4} rows  {value:.1%}")
    return figures


def fit_kind(rows: Sequence[Row], *, title: str) -> tuple[Coefficients, Interval, dict[str, float]]:
    """Coefficients from all rows; band and figures from held-out sources."""
    cache = {id(row): vectors(row) for row in rows}

    def train(chosen: Sequence[Row]) -> Guess:
        logs = fit(chosen, cache)
        return lambda row: predicted(cache[id(row)], logs)

    pairs = held_out(rows, train)
    figures = report(pairs, title=f"{title}, sources held out")
    labs = report(held_out(rows, train, group=lab_of), title=f"{title}, labs held out", group=lab_of)
    for name, group in (("sources", source_of), ("labs", lab_of)):
        report(held_out(rows, train_crude, group=group), title=f"{title}, totals alone, {name} held out", group=group)
    logs = fit(rows, cache)
    fitted = statistics.median(abs(predicted(cache[id(row)], logs) / row.value - 1) for row in rows)
    residuals = [float(np.log(row.value / guess)) for row, guess in pairs]
    low, high = np.exp(band(residuals, groups=len({row.source for row in rows})))
    figures |= {f"lab_{key}": labs[key] for key in ("median_error", "median_of_source_medians", "coverage")}
    figures["fitted_median_error"] = fitted
    values = {key: round(float(value), 5) for key, value in zip(KEYS, np.exp(logs), strict=True)}
    return Coefficients(**values), Interval(low=round(float(low), 3), high=round(float(high), 3)), figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = read_rows(args.measurements)
    print(RULES)
    made = {kind: fit_kind([row for row in rows if row.kind == kind], title=kind) for kind in ("cnn", "llm")}
    power, power_figures = fit_power(args.measurements, {kind: value[0] for kind, value in made.items()})
    figures = {f"{kind}_{key}": round(value, 4) for kind, result in made.items() for key, value in result[2].items()}
    figures |= {f"power_{key}": round(value, 4) for key, value in power_figures.items()}
    table = Table(
        schema=1,
        version=VERSION,
        time=made["cnn"][0],
        llm=made["llm"][0],
        power=power,
        intervals={kind: result[1] for kind, result in made.items()},
        report=figures,
    )
    print(json.dumps(to_json(table), indent=1))
    if args.write:
        write_json(DATA, to_json(table))


if __name__ == "__main__":
    main()
