"""mAP of a detector in float and in INT8, calibrated with this product and with onnxruntime's quantize_static.

    python -m benchmarks.accuracy --data DIR

Calibrated on the train half, measured on the val half, at 640 and at 320 px, every form through the same pipeline and
the same evaluator, on ONNX Runtime's CPU kernels. Stated limits for the default method, for both INT8 forms: at most
0.2 points of mAP50-95 lost at 640 and 0.5 at 320 px, with at least 97 % of the convolution FLOPs in INT8. The autopilot
searches on the train half, labels included, so that the val half says nothing to it: at most 0.3 points lost, with at
least 95 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Limit, count, find_model, finish, make_parser, run_main
from benchmarks.forms import CPU_INT8, FLOAT, TRT_INT8, open_images, quantize_forms, train_images
from benchmarks.peer import PEER, quantize_with_peer
from edgeds.compress.accuracy_limit import Limit as AccuracyLimit
from edgeds.compress.calibset import CalibrationSet
from edgeds.compress.quantize import DEFAULT_METHOD, quantize_model
from edgeds.graph.cost import count_cost
from edgeds.graph.io import input_specs, load_model
from edgeds.pipelines.yolo import YoloPipeline
from edgeds.report.accuracy import evaluate_detector
from edgeds.report.datasets import open_detection_dataset
from edgeds.specs import Resolution
from edgeds.workshop.detector import DetectorSetup, describe_detector
from edgeds.workshop.measure import detection_metric

LOSS_LIMITS = {640: 0.2, 320: 0.5}
DEFAULT_LOSS_LIMIT = 0.5
SHARE_LIMIT = 0.97
AUTOPILOT_DROP, AUTOPILOT_SHARE = 0.3, 0.95
PEER_PERCENTILE = 99.99
METHODS = ("minmax", "percentile", "entropy", "mse")


def measure_map(path: Path, setup: DetectorSetup, arguments: argparse.Namespace) -> dict[str, Any]:
    """mAP of one model file on the val half, in percent."""
    dataset = open_detection_dataset(arguments.data, split=arguments.split, names=setup.names, limit=arguments.limit)
    with YoloPipeline.from_model(
        path,
        names=setup.names,
        head=setup.layout,
        preprocess=setup.preprocess,
        buckets=setup.sizes,
        threads=arguments.threads,
    ) as pipeline:
        scores = evaluate_detector(pipeline, dataset, quiet=arguments.quiet)
    return {"map": 100 * scores["map50_95"], "map50": 100 * scores["map50"], "images": scores["images"]}


def conv_share(path: Path, size: int) -> float:
    """Share of the FLOPs of Conv and ConvTranspose that have INT8 inputs, as the cost model counts them."""
    model = load_model(path)
    (spec,) = input_specs(model)
    layers = [
        layer for layer in count_cost(model, {spec.name: (1, 3, size, size)}).layers if layer.op.startswith("Conv")
    ]
    total = sum(layer.flops for layer in layers)
    return sum(layer.flops for layer in layers if layer.precision == "int8") / total if total else 0.0


def measure_size(
    model: Path, size: int, folder: Path, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[Limit]]:
    """All rows of one input size: float, our methods in both forms, the peer's."""
    setup = describe_detector(model, sizes=(Resolution(size, size),))
    images = open_images(model, train_images(arguments.data), size=size, limit=arguments.calib_images)
    plain = measure_map(model, setup, arguments)
    rows = [{"size": size, "what": FLOAT, "calib": None, "share": 0.0, **plain}]
    limits: list[Limit] = []

    def add(what: str, path: Path, calib: int) -> dict[str, Any]:
        row = {"size": size, "what": what, "calib": calib, "share": conv_share(path, size)}
        rows.append({**row, **measure_map(path, setup, arguments)})
        return rows[-1]

    for method in dict.fromkeys((DEFAULT_METHOD, *arguments.methods)):
        files, _ = quantize_forms(
            model, images, folder, method=method, threads=arguments.threads, quiet=arguments.quiet
        )
        for form in (TRT_INT8, CPU_INT8):
            row = add(f"{form}, {method}", files[form], images.samples)
            if method == DEFAULT_METHOD:
                loss = plain["map"] - row["map"]
                limit = LOSS_LIMITS.get(size, DEFAULT_LOSS_LIMIT)
                limits.append(Limit(name=f"points lost at {size} px, {form}", value=loss, limit=limit))
                if form == TRT_INT8:
                    name = f"conv FLOPs in INT8 at {size} px"
                    limits.append(Limit(name=name, value=row["share"], limit=SHARE_LIMIT, at_most=False))
    if not arguments.no_autopilot:
        path = fly(model, images, folder, size, arguments)
        row = add(f"{TRT_INT8}, autopilot", path, images.samples)
        limits.append(
            Limit(name=f"points lost at {size} px, autopilot", value=plain["map"] - row["map"], limit=AUTOPILOT_DROP)
        )
        name = f"conv FLOPs in INT8 at {size} px, autopilot"
        limits.append(Limit(name=name, value=row["share"], limit=AUTOPILOT_SHARE, at_most=False))
    few = open_images(model, train_images(arguments.data), size=size, limit=arguments.peer_images)
    for method, percentile in () if arguments.no_peer else (("MinMax", None), ("Percentile", PEER_PERCENTILE)):
        path = folder / f"peer-{method}.onnx"
        quantize_with_peer(
            model,
            few,
            path,
            method=method,
            total=arguments.peer_images,
            percentile=percentile,
            quiet=arguments.quiet,
        )
        add(f"{PEER}, {method}{f' {percentile}' if percentile else ''}", path, few.samples)
    for row in rows:
        row["loss"] = plain["map"] - row["map"]
    return rows, limits


def fly(model: Path, images: CalibrationSet, folder: Path, size: int, arguments: argparse.Namespace) -> Path:
    """The model that the autopilot finds with the images and labels of the train half."""
    path = folder / f"autopilot-{size}.onnx"
    measure = detection_metric(model, data=arguments.data, split="train", size=Resolution(size, size))
    limit = AccuracyLimit(max_drop=AUTOPILOT_DROP, measure=measure, metric="mAP50-95", min_share=AUTOPILOT_SHARE)
    report = quantize_model(model, images, out=path, limit=limit, threads=arguments.threads, quiet=arguments.quiet)
    print(f"autopilot at {size} px: {json.dumps(report.autopilot)}", file=sys.stderr)
    return path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("accuracy", about="mAP of float and INT8, ours and the peer's.")
    parser.add_argument("--sizes", type=count, nargs="+", default=[640, 320], help="input sides (default 640 320)")
    parser.add_argument("--split", default="val", help="the half to measure on (default val)")
    parser.add_argument("--limit", type=count, help="measure on the first so many images only")
    parser.add_argument("--calib-images", type=count, help="images to calibrate on (default: the whole train half)")
    parser.add_argument("--peer-images", type=count, default=16, help="images for the peer (default 16)")
    parser.add_argument("--no-autopilot", action="store_true", help="leave the search under a limit out")
    parser.add_argument("--no-peer", action="store_true", help="leave the peer out")
    parser.add_argument(
        "--methods", nargs="*", choices=METHODS, default=list(METHODS), help="methods beside the default (all)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    model = find_model(arguments.model, quiet=arguments.quiet)
    rows: list[dict[str, Any]] = []
    limits: list[Limit] = []
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            found, judged = measure_size(model, size, Path(folder), arguments)
        rows += found
        limits += judged
    return finish(
        "accuracy",
        header=["px", "what", "calibrated on", "mAP50-95", "mAP50", "points lost", "conv FLOPs INT8"],
        rows=[_cells(row) for row in rows],
        limits=limits,
        arguments=arguments,
        figures={"rows": rows},
    )


def _cells(row: Mapping[str, Any]) -> list[Any]:
    scores = [f"{row[name]:.2f}" for name in ("map", "map50", "loss")]
    return [row["size"], row["what"], row["calib"], *scores, f"{100 * row['share']:.1f} %"]


if __name__ == "__main__":
    run_main(main)
