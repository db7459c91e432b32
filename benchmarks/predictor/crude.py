"""The yardstick: a fit on totals alone, held out in the same way on the same rows. Per-layer modelling has to beat it.

log(latency) is linear in log(FLOPs / peak), log(bytes / bandwidth), log(SM x clock) and log(batch), with one constant
for each precision and kind of network (SiLU or not): nine coefficients, ridge regression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.predictor.rows import Row
from edgeds.boards.predictor import machine_of

RIDGE = 0.01


def features(row: Row) -> np.ndarray:
    """Nine numbers of a row that know nothing about its layers."""
    machine = machine_of(row.board, row.mode)
    scale = row.batch / row.work.batch
    flops = sum(layer.flops for layer in row.work.layers) * scale
    moved = sum(layer.bytes_read + layer.bytes_written for layer in row.work.layers) * scale
    engine = "fp16" if row.precision == "int4" else row.precision
    smooth = any(layer.op == "Swish" for layer in row.work.layers)
    return np.array(
        [
            np.log(flops / machine.peak_flops[engine] * 1e3),
            np.log(moved / machine.dram_gb_s / 1e6),
            np.log(machine.sm * machine.gpu_mhz / 1e4),
            np.log(row.batch),
            *(float(engine == name) for name in ("fp32", "fp16", "int8")),
            float(smooth),
            1.0,
        ]
    )


def train_crude(rows: Sequence[Row]) -> Callable[[Row], float]:
    """Fit on ``rows``; gives milliseconds for any row."""
    x = np.stack([features(row) for row in rows])
    y = np.log([row.value for row in rows])
    counts = {source: sum(row.source == source for row in rows) for source in {row.source for row in rows}}
    w = np.array([counts[row.source] ** -0.5 for row in rows])[:, None]
    solution = np.linalg.solve(x.T @ (w * x) + RIDGE * np.eye(x.shape[1]), x.T @ (w[:, 0] * y))
    return lambda row: float(np.exp(features(row) @ solution))
