"""Fit the DLA's constants on published rows of two DLA cores with the GPU idle, and print how wrong they are.

    python -m benchmarks.predictor.fit_dla MEASUREMENTS.csv

Each network is also predicted by a fit that did not see it. The values go into ``edgeds/boards/assumptions.json`` by
hand. Rows of networks without a cost file, and of 2:4 weights, are left out.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.predictor.rows import COSTS
from edgeds.boards.catalogue import load_catalogue
from edgeds.boards.cost_file import read_cost
from edgeds.boards.fusion import Kernel, fuse_layers
from edgeds.boards.predictor import resize_work

SOURCE = "nvidia_dla_sw"
CORES = 2
NETWORKS = {
    "ResNet-50 v1.5": ("resnet50", (1, 3, 224, 224)),
    "ResNet-34 backbone": ("resnet34", (1, 3, 768, 1280)),
    "RetinaNet ResNeXt-50": ("retinanet-resnext50", (1, 3, 800, 800)),
    "SSD-MobileNet-v1": ("ssd-mobilenet-v1", (1, 3, 300, 300)),
    "SSD-ResNet34": ("ssd-resnet34", (1, 3, 1200, 1200)),
}
GRID = {
    "efficiency_int8": (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0),
    "bandwidth_share": (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5),
    "layer_us": (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 14.0),
}
Row = tuple[str, Sequence[Kernel], float, float, float]


def read_rows(path: Path) -> list[Row]:
    """(network, kernels, GHz of a core, GB/s of the mode, milliseconds of one image on one of two busy cores)."""
    board = load_catalogue().find("agx-orin-64gb")
    if board is None:
        raise SystemExit("the catalogue has no agx-orin-64gb")
    modes = {mode.label: mode for mode in board.modes}
    found = []
    with path.open(encoding="utf-8", newline="") as stream:
        for item in csv.DictReader(stream):
            if item["source_id"] != SOURCE or item["precision"] != "int8" or item["model"] not in NETWORKS:
                continue
            name, shape = NETWORKS[item["model"]]
            mode, work = modes[item["power_mode"]], read_cost(COSTS / f"{name}.json")
            kernels = fuse_layers(resize_work(work, {next(iter(work.inputs)): shape}), batch=1)
            rate = float(item["value"]) / CORES
            found.append((item["model"], kernels, (mode.dla_mhz[0] or 0) / 1e3, mode.dram_gb_s or 0, 1e3 / rate))
    return found


def predicted(row: Row, values: Sequence[float]) -> float:
    """Milliseconds: the formula of ``edgeds/boards/dla.py``, over arrays."""
    efficiency, share, layer_us = values
    _, kernels, ghz, gb_s, _ = row
    flops = np.array([k.flops * k.is_matrix for k in kernels])
    size = np.array([k.params + k.read + k.written for k in kernels])
    compute = flops / (16384 * ghz * 1e9 * efficiency)
    return float(np.hypot(compute, size / (gb_s * 1e9 * share)).sum() * 1e3 + layer_us * len(kernels) / 1e3)


def fit(rows: Sequence[Row]) -> tuple[float, ...]:
    """The point of the grid with the least sum of squared log errors."""

    def loss(values: Sequence[float]) -> float:
        return sum(np.log(predicted(row, values) / row[4]) ** 2 for row in rows)

    return min(itertools.product(*GRID.values()), key=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    rows = read_rows(parser.parse_args().measurements)
    errors = []
    for name in NETWORKS:
        values = fit([row for row in rows if row[0] != name])
        held = [predicted(row, values) / row[4] - 1 for row in rows if row[0] == name]
        errors += held
        print(f"held out {name:20} " + " ".join(f"{error:+.1%}" for error in held))
    values = fit(rows)
    seen = " ".join(f"{predicted(row, values) / row[4] - 1:+.1%}" for row in rows)
    print("fitted on all", dict(zip(GRID, values, strict=True)), seen)
    print(f"median error of networks held out: {statistics.median(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
