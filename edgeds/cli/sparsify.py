"""``edgeds sparsify``: make weights 2:4 sparse, as the sparse tensor cores of Ampere and later need."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.cli.output import emit_json, emit_text
from edgeds.engines.base import check_threads
from edgeds.errors import ModelError, SpecError
from edgeds.specs import Resolution, to_json

if TYPE_CHECKING:
    from edgeds.compress.calibset import CalibrationSet
    from edgeds.compress.sparsity import SparsityReport

SUMMARY = "Make the weights of layers 2:4 sparse, by magnitude or with calibration samples; quantize afterwards."

EXAMPLES = """\
examples:
  edgeds sparsify yolo11n.onnx --out sparse.onnx --max-error 0.3               two largest of four stay
  edgeds sparsify yolo11n.onnx --calib images/ --size 320 --out sparse.onnx    weights that stay make up for it
  edgeds inspect sparse.onnx --json                                            sparse_2_4 lists the layers
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="float ONNX model")
    parser.add_argument("--out", required=True, type=Path, metavar="OUT.onnx", help="model to write")
    parser.add_argument("--calib", type=Path, metavar="PATH", help="folder of images, .npz/.npy, or folder of them")
    parser.add_argument("--size", metavar="HxW", help="resolution of calibration images (default: the model's)")
    parser.add_argument("--samples", type=int, default=32, metavar="N", help="samples at most (default %(default)s)")
    parser.add_argument(
        "--method", choices=("magnitude", "second-order"), help="default: second-order with --calib, else magnitude"
    )
    parser.add_argument(
        "--max-error",
        type=float,
        default=0.01,
        metavar="X",
        help="leave a layer dense whose output would change by more than this share of its energy (default 0.01)",
    )
    parser.add_argument("--min-weights", type=int, default=1024, metavar="N", help="leave smaller layers dense")
    parser.add_argument("--exclude", action="append", default=[], metavar="NODE", help="leave dense, repeatable")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.out.suffix.lower() != ".onnx":
        raise SpecError(f"--out {args.out}: name a file that ends in .onnx")
    if args.calib is None and args.size is not None:
        raise SpecError("--size is the size of calibration images; give --calib too")
    if args.threads is not None:
        check_threads(args.threads)
    from edgeds.compress.sparsity import sparsify
    from edgeds.graph.io import load_model, save_model
    from edgeds.graph.session import open_session

    report = sparsify(
        load_model(args.model),
        _open_set(args) if args.calib is not None else (),
        method=args.method or ("second-order" if args.calib is not None else "magnitude"),
        max_error=args.max_error,
        min_weights=args.min_weights,
        exclude=args.exclude,
        threads=args.threads,
        quiet=args.quiet,
    )
    if not report.sparse:
        shown = f"; {report.layers[0].node!r}: {report.layers[0].reason}" if report.layers else ""
        raise ModelError(f"{args.model}: no layer can be 2:4 within --max-error {args.max_error:g}{shown}")
    open_session(report.model, threads=args.threads)
    save_model(report.model, args.out)
    if args.json:
        emit_json(report_json(report, out=args.out))
    else:
        emit_text("\n".join(describe(report, out=args.out)))
    return 0


def _open_set(args: argparse.Namespace) -> CalibrationSet:
    from edgeds.workshop.calibration import open_model_set

    size = Resolution.parse(args.size) if args.size else None
    return open_model_set(args.model, args.calib, size=size, limit=args.samples)


def report_json(report: SparsityReport, *, out: Path) -> dict[str, Any]:
    """The document of ``--json``."""
    return {
        "model": str(out),
        "method": report.method,
        "sparse_2_4": list(report.sparse),
        "layers": to_json(report.layers),
    }


def describe(report: SparsityReport, *, out: Path) -> list[str]:
    """The report for people."""
    lines = [f"wrote {out}: {len(report.sparse)} of {len(report.layers)} layers are 2:4 now ({report.method})"]
    lines += [f"  dense  {layer.node}: {layer.reason}" for layer in report.layers if layer.reason is not None]
    return lines
