"""Float against INT8 on the CPU engine: the uint8 form that bundles carry for it, and the int8 form for TensorRT.

    python -m benchmarks.cpu_speed --data DIR

Stated limit: the CPU form runs at 1.15 x the speed of float or more, by median processor time of single runs taken in
turns. The TensorRT form is shown to say why there is a second form; it is not meant to run here.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Limit,
    Times,
    count,
    find_model,
    finish,
    make_parser,
    measure_in_turns,
    ratio,
    run_main,
)
from benchmarks.forms import CPU_INT8, FLOAT, open_images, quantize_forms, train_images
from edgeds.engines import Engine, open_engine

LIMIT = 1.15


def time_forms(
    files: Mapping[str, Path], images: Any, *, threads: int, rounds: int, what: str, quiet: bool = False
) -> dict[str, Times]:
    """Median times of one run of each form at batch 1, on the same image within a round."""
    feeds = list(images)
    with contextlib.ExitStack() as stack:

        def runner(path: Path) -> Callable[[], Any]:
            engine: Engine = stack.enter_context(open_engine(path, backend="onnxruntime", threads=threads))
            turn = iter(range(1 << 62))
            return lambda: engine.infer(feeds[next(turn) % len(feeds)])

        calls = {name: runner(path) for name, path in files.items()}
        return measure_in_turns(calls, rounds=rounds, what=what, quiet=quiet)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("cpu_speed", about="Speed of float and INT8 on the CPU engine.")
    parser.add_argument("--sizes", type=count, nargs="+", default=[320, 640], help="input sides (default 320 640)")
    parser.add_argument("--images", type=count, default=16, help="images to calibrate on (default 16)")
    parser.add_argument("--rounds", type=count, default=40, help="timed runs of each form (default 40)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    model = find_model(arguments.model, quiet=arguments.quiet)
    source, options = train_images(arguments.data), {"threads": arguments.threads, "quiet": arguments.quiet}
    rows: list[list[Any]] = []
    limits = []
    with tempfile.TemporaryDirectory() as folder:
        images = open_images(model, source, size=arguments.sizes[0], limit=arguments.images)
        files, _ = quantize_forms(model, images, Path(folder), **options)
        for size in arguments.sizes:
            images = open_images(model, source, size=size, limit=4)
            times = time_forms(files, images, rounds=arguments.rounds, what=f"timing {size} px", **options)
            plain = times[FLOAT]
            for name, item in times.items():
                speed = (ratio(plain.cpu_s, item.cpu_s), ratio(plain.wall_s, item.wall_s))
                rows.append([size, name, item.cpu_s * 1000, item.wall_s * 1000, *speed])
            speedup = ratio(plain.cpu_s, times[CPU_INT8].cpu_s)
            limits.append(Limit(name=f"{CPU_INT8} / float, CPU, {size} px", value=speedup, limit=LIMIT, at_most=False))
    header = ["px", "form", "CPU ms", "wall ms", "x float CPU", "x float wall"]
    figures = {"rows": [dict(zip(header, row, strict=True)) for row in rows]}
    return finish("cpu_speed", header=header, rows=rows, limits=limits, arguments=arguments, figures=figures)


if __name__ == "__main__":
    run_main(main)
