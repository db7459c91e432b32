"""A pruned detector: accuracy as pruned and re-solved, and as a curve over minutes of training without labels.

    python -m benchmarks.recover --data DIR [--ratio 0.2] [--minutes 4 4 7]

Pruned, re-solved and trained on the train half without its labels, measured on the val half. Training is done in legs,
each with a learning rate of its own that falls to nothing, from what the leg before wrote. CPU speed is taken in turns
with the dense model; the board's figure is predicted.

Stated limits: half of the dense mAP before training, at most 8 points lost after all legs, 1.15 x on the CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import measure_map
from benchmarks.common import Limit, count, find_model, finish, make_parser, measure_in_turns, ratio, run_main
from benchmarks.forms import train_images
from edgeds.compress.prune_goal import Goal
from edgeds.engines.onnxruntime import OnnxRuntimeEngine
from edgeds.graph.cost import count_cost
from edgeds.graph.io import load_model
from edgeds.specs import Resolution
from edgeds.workshop.detector import describe_detector
from edgeds.workshop.pruning import prune_detector
from edgeds.workshop.recovering import recover_detector

TARGET = "orin-nano-8gb@15W"
KEPT_LIMIT, LOST_LIMIT, SPEED_LIMIT = 0.5, 8.0, 1.15


def measure_speed(dense: Path, pruned: Path, arguments: argparse.Namespace) -> float:
    """How many times faster the pruned model is on the CPU."""
    size = arguments.size
    engines = {name: OnnxRuntimeEngine(path, threads=arguments.threads) for name, path in (("a", dense), ("b", pruned))}
    try:
        image = np.random.default_rng(0).random((1, 3, size, size), dtype=np.float32)
        calls = {
            name: lambda engine=engine: [engine.infer({engine.inputs[0].name: image}) for _ in range(5)]
            for name, engine in engines.items()
        }
        times = measure_in_turns(calls, rounds=arguments.rounds, what="timing", quiet=arguments.quiet)
    finally:
        for engine in engines.values():
            engine.close()
    return ratio(times["a"].wall_s, times["b"].wall_s)


def predicted_speedup(dense: Path, pruned: Path, target: str) -> float:
    """Of the board, in INT8."""
    goal = Goal.of(ratio=0.0, speedup=None, budget=None, target=target, precision="int8")
    before, after = (goal.cost(load_model(path)) for path in (dense, pruned))
    return ratio(before, after)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("recover", about="mAP of a pruned detector over minutes of training, speed beside it.")
    parser.add_argument("--size", type=count, default=320, help="input side (default 320)")
    parser.add_argument("--ratio", type=float, default=0.2, help="share of the channels to remove (default 0.2)")
    parser.add_argument("--samples", type=count, default=32, help="images to rank and re-solve on (default 32)")
    parser.add_argument("--minutes", type=float, nargs="*", default=[4.0, 4.0, 7.0], help="legs (default 4 4 7)")
    parser.add_argument("--target", default=TARGET, metavar="NAME@MODE", help=f"board to predict (default {TARGET})")
    parser.add_argument("--rounds", type=count, default=5, help="timed runs of each model (default 5)")
    parser.add_argument("--split", default="val", help="split to measure on (default val)")
    parser.add_argument("--limit", type=count, help="measure on the first so many images only")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    dense = find_model(arguments.model, quiet=arguments.quiet)
    size = Resolution(arguments.size, arguments.size)
    setup = describe_detector(dense, sizes=(size,))
    images = train_images(arguments.data)
    rows: list[dict[str, Any]] = []

    def add(what: str, path: Path, minutes: float) -> float:
        found = measure_map(path, setup, arguments)["map"]
        rows.append({"what": what, "minutes": minutes, "map": found, "params": count_cost(load_model(path)).params})
        return float(found)

    with tempfile.TemporaryDirectory() as name:
        folder, spent = Path(name), 0.0
        before = add("dense", dense, 0.0)
        pruned = folder / "pruned.onnx"
        how: dict[str, Any] = {"calib": images, "size": size, "quiet": arguments.quiet}
        prune_detector(dense, out=pruned, ratio=arguments.ratio, samples=arguments.samples, **how)
        start = last = add("pruned, re-solved", pruned, 0.0)
        student = pruned
        for number, minutes in enumerate(arguments.minutes):
            out = folder / f"leg{number}.onnx"
            recover_detector(student, teacher=dense, out=out, minutes=minutes, **how)
            student, spent = out, spent + minutes
            last = add("trained", student, spent)
        speed = measure_speed(dense, student, arguments)
        predicted = predicted_speedup(dense, student, arguments.target)
    limits = [
        Limit(name="mAP kept before training", value=ratio(start, before), limit=KEPT_LIMIT, at_most=False),
        Limit(name="points lost after training", value=before - last, limit=LOST_LIMIT),
        Limit(name="speed on the CPU v dense", value=speed, limit=SPEED_LIMIT, at_most=False),
    ]
    print(f"predicted speed-up on {arguments.target}, INT8: {predicted:.3g}")
    return finish(
        "recover",
        header=["what", "minutes", "mAP50-95", "parameters"],
        rows=[[row["what"], row["minutes"], row["map"], row["params"]] for row in rows],
        limits=limits,
        arguments=arguments,
        figures={"rows": rows, "cpu_speedup": speed, "predicted_speedup": predicted, "target": arguments.target},
    )


if __name__ == "__main__":
    run_main(main)
