"""Memory of the CPU engine over many runs: with few input sizes and with many (reports B74 and B127).

    python -m benchmarks.memory_soak

300 runs over 40 sizes against 300 runs over 3 sizes, each in a process of its own, through the engine class; beside
them ONNX Runtime with its default options. Stated limits: resident memory grows by less than 50 kB per run (slope of a
straight line through the second half of the runs) and the peak with 40 sizes is at most 1.25 x that with 3.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    PEAK_FIELD,
    Limit,
    count,
    find_model,
    finish,
    make_parser,
    memory_mib,
    ratio,
    run_main,
    run_side,
)
from edgeds.engines import open_engine
from edgeds.progress import track
from edgeds.specs import Resolution

SLOPE_LIMIT_KB, PEAK_LIMIT = 50.0, 1.25
SIDES = {"engine": "edgeds engine", "peer": "ONNX Runtime, default options"}


def choose_sizes(number: int, *, largest: int, stride: int = 32) -> list[Resolution]:
    """``number`` different resolutions, the square of side ``largest`` among them, spread evenly over the rest."""
    sides = range(stride * 2, largest + 1, stride)
    every = [Resolution(height, width) for height in sides for width in sides]
    if number >= len(every):
        return every
    # The last one is the largest square: both sides of the comparison hold the same largest shape.
    return [every[(index + 1) * len(every) // number - 1] for index in range(number)]


def run_many(infer: Callable[[np.ndarray], Any], sizes: Sequence[Resolution], *, runs: int, quiet: bool) -> list[float]:
    """Resident MiB after each run; sizes in a random order that visits each of them equally often."""
    random = np.random.default_rng(0)
    order: list[int] = []
    while len(order) < runs:
        order += random.permutation(len(sizes)).tolist()
    resident = []
    for index in track(order[:runs], what=f"{len(sizes)} sizes", total=runs, unit="run", quiet=quiet):
        size = sizes[index]
        infer(np.zeros((1, 3, size.height_px, size.width_px), np.float32))
        resident.append(memory_mib())
    return resident


def slope_kb(resident_mib: Sequence[float]) -> float:
    """Growth per run in kB (1000 bytes), fitted over the second half of the runs."""
    half = np.asarray(resident_mib[len(resident_mib) // 2 :])
    if half.size < 2:
        return float("nan")
    return float(np.polyfit(np.arange(half.size), half, 1)[0] * (1 << 20) / 1000)


def soak(side: str, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one side in this process."""
    sizes = choose_sizes(arguments.sizes, largest=arguments.largest)
    if side == "peer":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        resident = run_many(
            lambda image: session.run(None, {name: image}), sizes, runs=arguments.runs, quiet=arguments.quiet
        )
    else:
        with open_engine(model, backend="onnxruntime", threads=arguments.threads) as engine:
            name = engine.inputs[0].name
            resident = run_many(
                lambda image: engine.infer({name: image}), sizes, runs=arguments.runs, quiet=arguments.quiet
            )
    return {"sizes": len(sizes), "peak_mib": memory_mib(PEAK_FIELD), "slope_kb": slope_kb(resident)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("memory_soak", about="Memory of the CPU engine over many runs and sizes.", data=False)
    parser.add_argument("--data", type=Path, metavar="DIR", help="not needed; taken so that all benchmarks look alike")
    parser.add_argument("--runs", type=count, default=300, help="runs per side (default 300)")
    parser.add_argument("--largest", type=count, default=320, help="largest side in pixels (default 320)")
    parser.add_argument("--few", type=count, default=3, help="sizes of the small set (default 3)")
    parser.add_argument("--many", type=count, default=40, help="sizes of the large set (default 40)")
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=count, default=3, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    model = find_model(arguments.model, quiet=arguments.quiet)
    if arguments.side is not None:
        print(json.dumps(soak(arguments.side, model, arguments)))
        return 0
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for side in SIDES:
        for sizes in (arguments.few, arguments.many):
            options = {
                "--side": side,
                "--sizes": sizes,
                "--model": model,
                "--runs": arguments.runs,
                "--largest": arguments.largest,
                "--threads": arguments.threads,
            }
            words = [str(item) for pair in options.items() for item in pair]
            found.setdefault(side, {})[sizes] = run_side("memory_soak", words, quiet=arguments.quiet)
    rows: list[list[Any]] = []
    for side, results in found.items():
        base = results[arguments.few]["peak_mib"]
        for item in results.values():
            peak = item["peak_mib"]
            rows.append([SIDES[side], item["sizes"], arguments.runs, peak, ratio(peak, base), item["slope_kb"]])
    ours = found["engine"]
    limits = [
        *(
            Limit(name=f"growth per run, kB, {item['sizes']} sizes", value=item["slope_kb"], limit=SLOPE_LIMIT_KB)
            for item in ours.values()
        ),
        Limit(
            name=f"peak, {arguments.many} v {arguments.few} sizes",
            value=ratio(ours[arguments.many]["peak_mib"], ours[arguments.few]["peak_mib"]),
            limit=PEAK_LIMIT,
        ),
    ]
    header = ["what", "sizes", "runs", "peak MiB", "x few sizes", "growth kB/run"]
    figures = {"rows": [dict(zip(header, row, strict=True)) for row in rows]}
    return finish("memory_soak", header=header, rows=rows, limits=limits, arguments=arguments, figures=figures)


if __name__ == "__main__":
    run_main(main)
