"""Options that ``run`` and ``eval`` share, and opening what they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from edgeds.errors import SpecError
from edgeds.pipelines.yolo import FAMILIES, YoloPipeline
from edgeds.specs import Resolution


def add_detector_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and how to run it."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle folder or zip, or a plain .onnx of a YOLO")
    parser.add_argument("--backend", default="auto", help="auto, onnxruntime (cpu) or tensorrt (default %(default)s)")
    parser.add_argument(
        "--precision", choices=("auto", "float", "int8", "int4"), default="auto", help="model of the bundle"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the physical cores)")
    parser.add_argument(
        "--size", action="append", default=[], metavar="HxW", help="input resolution instead of the stored, repeatable"
    )
    parser.add_argument("--head", metavar="FAMILY", help=f"output layout of a plain .onnx: {', '.join(FAMILIES)}")


def open_detector(args: argparse.Namespace, **thresholds: Any) -> YoloPipeline:
    """The pipeline that the arguments name. Raises SpecError for options that a bundle or a plain model cannot take."""
    options: dict[str, Any] = {"backend": args.backend, "threads": args.threads, **thresholds}
    if args.size:
        options["buckets"] = [Resolution.parse(size) for size in args.size]
    path: Path = args.bundle
    if path.suffix.lower() == ".onnx":
        if args.precision != "auto":
            raise SpecError(f"{path}: --precision chooses a model of a bundle; a plain .onnx has only its own")
        return YoloPipeline.from_model(path, head=args.head, **options)
    if args.head is not None:
        raise SpecError(f"{path}: --head is for a plain .onnx; a bundle states its own head")
    return YoloPipeline.from_bundle(path, precision=args.precision, **options)
