"""Time and memory of calibrating a detector, against plain float inference and onnxruntime's quantize_static.

    python -m benchmarks.calibration --data DIR

Stated limits: collecting ranges (entropy, 320 px, 64 images) takes at most 1.6 x the time of float inference over the
same images, decoding and preprocessing included in both; peak memory at most one third of quantize_static's with
Entropy, both as measured and as the increase over an interpreter that has imported the same libraries; equal within
5 % for 20 and for 400 samples. Every side that is measured for memory runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    PEAK_FIELD,
    Limit,
    Times,
    count,
    find_model,
    finish,
    make_parser,
    measure,
    measure_in_turns,
    memory_mib,
    ratio,
    run_main,
    run_side,
)
from benchmarks.forms import open_images, train_images
from benchmarks.peer import PEER, quantize_with_peer
from edgeds.compress.calibset import CalibrationSet
from edgeds.compress.cpu_variant import cpu_tensors
from edgeds.compress.placement import Selection, plan_placement
from edgeds.compress.quantize import prepare_float, quantize_model
from edgeds.compress.ranges import collect_ranges
from edgeds.compress.tail import find_detector_tail
from edgeds.graph.session import open_session
from edgeds.graph.view import GraphView
from edgeds.preproc import IMAGE_SUFFIXES, ImagePreprocess, prepare_image, read_image
from edgeds.specs import Resolution

TIME_LIMIT, MEMORY_LIMIT, GROWTH_LIMIT = 1.6, 1 / 3, 0.05
FEW, MANY = 20, 400


@dataclass(frozen=True)
class SyntheticImages:
    """Distinct pictures (coloured noise at several scales), made when they are read."""

    number: int
    size_px: int

    def __iter__(self) -> Iterator[np.ndarray]:
        for index in range(self.number):
            random = np.random.default_rng(index)
            cells = random.integers(0, 256, (self.size_px // 32, self.size_px // 32, 3), dtype=np.uint8)
            noise = random.integers(0, 32, (self.size_px, self.size_px, 3), dtype=np.uint8)
            yield np.clip(np.kron(cells, np.ones((32, 32, 1), np.uint8)).astype(np.int16) + noise, 0, 255).astype(
                np.uint8
            )


def list_images(folder: Path, limit: int) -> list[Path]:
    """The first ``limit`` images; the calibration set spreads its choice, which is the same work."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)[:limit]


def time_calibration(model: Path, images: CalibrationSet, arguments: argparse.Namespace) -> dict[str, Times]:
    """Float inference and collecting ranges in turns, then the whole of quantize_model once."""
    threads, method = arguments.threads, arguments.method
    prepared = prepare_float(model)
    view = GraphView(prepared, copy=False)
    plan = plan_placement(view, find_detector_tail(view), Selection())
    tensors = tuple(dict.fromkeys((*plan.tensors, *cpu_tensors(view, plan))))
    session = open_session(model, threads=threads)
    (name,) = (item.name for item in session.get_inputs())
    paths = list_images(train_images(arguments.data), arguments.images)

    def infer() -> None:
        # What anyone would write: no hashing of the images, no checks.
        for path in paths:
            pixels, _ = prepare_image(read_image(path), ImagePreprocess(), Resolution(arguments.size, arguments.size))
            session.run(None, {name: pixels[None]})

    def calibrate() -> None:
        collect_ranges(prepared, tensors, images, method=method, threads=threads, quiet=True)

    calls: dict[str, Callable[[], Any]] = {"float": infer, "ranges": calibrate}
    times = measure_in_turns(calls, rounds=arguments.rounds, what="timing", quiet=arguments.quiet)
    with tempfile.TemporaryDirectory() as folder:
        times["quantize"] = measure(lambda: _quantize(model, images, Path(folder), arguments))
    return times


def _quantize(model: Path, images: CalibrationSet, folder: Path, arguments: argparse.Namespace) -> None:
    quantize_model(
        model,
        images,
        out=folder / "int8.onnx",
        cpu_out=folder / "cpu.onnx",
        method=arguments.method,
        threads=arguments.threads,
        quiet=arguments.quiet,
    )


def memory_side(side: str, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Quantize in this process with the tool ``side`` and state its memory before and at the peak."""
    import cv2  # noqa: F401
    import onnx  # noqa: F401
    import onnxruntime.quantization  # noqa: F401

    synthetic = side == "synthetic"
    source = SyntheticImages(arguments.images, arguments.size) if synthetic else train_images(arguments.data)
    start_mib = memory_mib()
    images = open_images(model, source, size=arguments.size, limit=arguments.images)
    with tempfile.TemporaryDirectory() as folder:
        if side == "peer":
            taken = measure(
                lambda: quantize_with_peer(
                    model,
                    images,
                    Path(folder) / "peer.onnx",
                    method="Entropy",
                    total=arguments.images,
                    quiet=arguments.quiet,
                )
            )
        else:
            taken = measure(lambda: _quantize(model, images, Path(folder), arguments))
    return {
        "start_mib": start_mib,
        "peak_mib": memory_mib(PEAK_FIELD),
        "samples": images.samples,
        "wall_s": taken.wall_s,
        "cpu_s": taken.cpu_s,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("calibration", about="Time and memory of calibration against float inference and the peer.")
    parser.add_argument("--images", type=count, default=64, help="images to calibrate on (default 64)")
    parser.add_argument("--peer-images", type=count, help="images for the peer, about 75 MB each (default: --images)")
    parser.add_argument("--size", type=count, default=320, help="side of the square input in pixels (default 320)")
    parser.add_argument("--method", default="entropy", help="our calibration method (default entropy)")
    parser.add_argument("--rounds", type=count, default=3, help="timed passes of each kind (default 3)")
    parser.add_argument("--few", type=count, default=FEW, help=f"samples of the small set (default {FEW})")
    parser.add_argument("--many", type=count, default=MANY, help=f"samples of the large set (default {MANY})")
    parser.add_argument("--side", choices=("ours", "peer", "synthetic"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    model = find_model(arguments.model, quiet=arguments.quiet)
    if arguments.side is not None:
        print(json.dumps(memory_side(arguments.side, model, arguments)))
        return 0

    def side(name: str, images: int) -> dict[str, Any]:
        options = {
            "--side": name,
            "--data": arguments.data.absolute(),
            "--model": model,
            "--images": images,
            "--size": arguments.size,
            "--method": arguments.method,
            "--threads": arguments.threads,
        }
        return run_side("calibration", [str(item) for pair in options.items() for item in pair], quiet=arguments.quiet)

    source = train_images(arguments.data)
    images = open_images(model, source, size=arguments.size, limit=arguments.images)
    times = time_calibration(model, images, arguments)
    memory = {
        "ours": side("ours", arguments.images),
        "ours, small set": side("synthetic", arguments.few),
        "ours, large set": side("synthetic", arguments.many),
        PEER: side("peer", arguments.peer_images or arguments.images),
    }
    return report(times, memory, arguments)


def report(times: dict[str, Times], memory: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> int:
    """Print the table of ratios and judge the limits."""
    plain, ours, peer = times["float"], memory["ours"], memory[PEER]
    increase = {name: found["peak_mib"] - found["start_mib"] for name, found in memory.items()}
    rows: list[list[Any]] = [
        [
            *(name, arguments.images, item.wall_s, item.cpu_s),
            *(ratio(item.wall_s, plain.wall_s), ratio(item.cpu_s, plain.cpu_s)),
            *(None,) * 4,
        ]
        for name, item in (
            ("float inference", plain),
            (f"collect ranges ({arguments.method})", times["ranges"]),
            ("whole quantize_model", times["quantize"]),
        )
    ]
    for name, found in memory.items():
        rows.append(
            [
                *(name, found["samples"], found["wall_s"], found["cpu_s"], None, None),
                *(found["peak_mib"], increase[name]),
                *(ratio(found["peak_mib"], peer["peak_mib"]), ratio(increase[name], increase[PEER])),
            ]
        )
    few, many = memory["ours, small set"], memory["ours, large set"]
    growth = abs(ratio(many["peak_mib"], few["peak_mib"]) - 1)
    limits = [
        Limit(name="collecting ranges / float inference, wall", value=rows[1][4], limit=TIME_LIMIT),
        Limit(name="collecting ranges / float inference, CPU", value=rows[1][5], limit=TIME_LIMIT),
        Limit(name="peak memory / peer", value=ratio(ours["peak_mib"], peer["peak_mib"]), limit=MEMORY_LIMIT),
        Limit(name="peak increase / peer", value=ratio(increase["ours"], increase[PEER]), limit=MEMORY_LIMIT),
        Limit(name=f"peak at {many['samples']} v {few['samples']} samples", value=growth, limit=GROWTH_LIMIT),
    ]
    header = ["what", "images", "wall s", "CPU s", "x float wall", "x float CPU"]
    header += ["peak MiB", "increase MiB", "peak / peer", "increase / peer"]
    figures = {"times": {name: vars(item) for name, item in times.items()}, "memory": memory}
    return finish("calibration", header=header, rows=rows, limits=limits, arguments=arguments, figures=figures)


if __name__ == "__main__":
    run_main(main)
