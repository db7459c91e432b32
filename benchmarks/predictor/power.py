"""Fit watts: module rails of LLM decode, wall power of MLPerf, and one rail of small boards, brought to one scale."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.predictor.rows import COSTS, model_name, place_row
from edgeds.boards.coefficients import PowerCoefficients
from edgeds.boards.cost_file import read_cost
from edgeds.boards.fusion import fuse_layers
from edgeds.boards.predictor import machine_of, power_terms, workload_kind
from edgeds.boards.roofline import Coefficients, choose_precision, time_kernel

WALL = 0.87
"""Module over wall power: the wall is 10 to 15 % higher (notes of iiswc26_orin_llm)."""
_PRECISIONS = {"fp16": "fp16", "int8": "int8", "w4a16": "int4", "q8_0": "int8", "q4_k_m": "int4"}


@dataclass(frozen=True, kw_only=True)
class Watts:
    """One row: the four terms of the power model, what was read, and whether only the GPU rail was."""

    source: str
    board: str
    terms: tuple[float, float, float, float]
    value: float
    is_rail: bool


def read_watts(path: Path, coefficients: Mapping[str, Coefficients]) -> list[Watts]:
    """Power rows of models with a cost file. Left out: DLA work, clocks that notes contradict, unknown precision."""
    found = []
    with path.open(encoding="utf-8", newline="") as stream:
        for item in csv.DictReader(stream):
            name, precision = model_name(item["model"]), _PRECISIONS.get(item["precision"])
            cost, placed = COSTS / f"{name}.json", place_row(item)
            skip = "WARNING" in item["notes"] or "DLA" in item["notes"].replace("DLA 0 MHz", "")
            if item["metric"] != "power_w" or precision is None or not cost.exists() or placed is None or skip:
                continue
            board, mode = placed
            if not (mode.sm and mode.gpu_mhz and mode.dram_gb_s) or not item["batch"]:
                continue
            machine = machine_of(board, mode)
            kernels = fuse_layers(read_cost(cost), batch=int(item["batch"]))
            c = coefficients[workload_kind(kernels)]
            chosen = [choose_precision(k, precision=precision, is_quantized=False) for k in kernels]
            times = [time_kernel(k, machine, precision=p, coefficients=c) for k, p in zip(kernels, chosen, strict=True)]
            wall = item["source_id"].startswith("mlperf")
            found.append(
                Watts(
                    source=item["source_id"],
                    board=board.name,
                    terms=power_terms(times, machine=machine),
                    value=float(item["value"]) * (WALL if wall else 1),
                    is_rail="rail only" in item["notes"],
                )
            )
    return found


def _matrix(rows: list[Watts]) -> np.ndarray:
    # One rail carries the GPU and CPU: the module's static part and its DRAM are not on it, a fifth term is.
    return np.array([[0, 0, row.terms[2], 0, 1] if row.is_rail else [*row.terms, 0] for row in rows], float)


def _solve(rows: list[Watts]) -> np.ndarray:
    """Least squares on relative errors with a ridge towards plausible watts; nothing below zero."""
    values = np.array([row.value for row in rows])
    scaled = _matrix(rows) / values[:, None]
    guess = np.array([3.0, 2.5, 0.8, 3.0, 1.0])
    ridge = np.diag(0.3 / guess)
    stacked, wanted = np.vstack([scaled, ridge]), np.concatenate([np.ones(len(rows)), np.full(5, 0.3)])
    return np.maximum(np.linalg.lstsq(stacked, wanted, rcond=None)[0], 0.0)


def fit_power(path: Path, coefficients: Mapping[str, Coefficients]) -> tuple[PowerCoefficients, dict[str, float]]:
    """The coefficients, and median errors with whole sources held out."""
    rows = read_watts(path, coefficients)
    errors: dict[str, list[float]] = {}
    for source in sorted({row.source for row in rows}):
        solved = _solve([row for row in rows if row.source != source])
        held = [row for row in rows if row.source == source]
        guesses = _matrix(held) @ solved
        errors[source] = [abs(g / row.value - 1) for g, row in zip(guesses, held, strict=True)]
    for source, values in errors.items():
        print(f"power {source:28} {len(values):4} rows  {statistics.median(values):.1%}")
    everything = [error for values in errors.values() for error in values]
    figures = {
        "rows": float(len(rows)),
        "median_error": statistics.median(everything),
        "median_of_source_medians": statistics.median(statistics.median(values) for values in errors.values()),
    }
    solved = _solve(rows)
    print("power", figures, "rail constant", round(float(solved[4]), 2))
    names = ("static_w", "memory_static_w", "gpu_w", "dram_w")
    watts = {name: round(float(v), 4) for name, v in zip(names, solved[:4], strict=True)}
    return PowerCoefficients(**watts), figures
