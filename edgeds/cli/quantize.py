"""``edgeds quantize``: calibrate a float ONNX model and write its INT8 form with explicit Q/DQ."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.cli.output import emit_json, emit_text
from edgeds.engines.base import check_threads
from edgeds.errors import SpecError
from edgeds.specs import Resolution, to_json

if TYPE_CHECKING:
    from edgeds.compress.accuracy_limit import Limit
    from edgeds.compress.calibset import CalibrationSet
    from edgeds.compress.quantize import QuantizeReport

SUMMARY = "Calibrate a float ONNX model on samples and write its INT8 form (explicit symmetric Q/DQ)."

EXAMPLES = """\
examples:
  edgeds quantize yolo11n.onnx --calib images/ --size 640 --out yolo11n.int8.onnx
  edgeds quantize model.onnx --calib feeds/ --method mse --out int8.onnx --json       folder of .npz, one feed each
  edgeds quantize model.onnx --calib samples.npz --exclude /head/Conv --out int8.onnx
  edgeds quantize yolo11n.onnx --calib images/ --out int8.onnx --cpu-out cpu.onnx     also the fast form for CPUs
  edgeds quantize yolo11n.onnx --calib images/ --out int8.onnx --table-out calib.table    also for trtexec --calib
  edgeds quantize encoder.onnx --weights int4 --calib feeds.npz --out int4.onnx --cpu-out cpu.onnx    weights only
  edgeds quantize yolo11n.onnx --calib images/ --max-drop 0.3 --data coco128/ --out int8.onnx   within a limit
"""

_SHOWN = 12
_BLAMED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="float ONNX model")
    parser.add_argument(
        "--calib",
        type=Path,
        metavar="PATH",
        help="folder of images, .npz/.npy, or folder of them (not needed by --weights)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="OUT.onnx", help="quantized model to write")
    parser.add_argument("--cpu-out", type=Path, metavar="FILE", help="also write the uint8 form for ONNX Runtime")
    parser.add_argument(
        "--method",
        choices=("minmax", "percentile", "entropy", "mse", "auto"),
        help="how a tensor's range is chosen (default mse); auto compares them on held-out samples",
    )
    parser.add_argument(
        "--percentile", type=float, default=None, metavar="P", help="of the percentile method (default 99.999)"
    )
    parser.add_argument("--size", metavar="HxW", help="resolution of calibration images (default: the model's)")
    parser.add_argument("--samples", type=int, metavar="N", help="use N evenly spaced samples (default: all)")
    parser.add_argument(
        "--ranges", type=Path, metavar="FILE", help="reuse this range table if it still fits, or a TensorRT table"
    )
    parser.add_argument("--table-out", type=Path, metavar="FILE", help="also write a TensorRT calibration table")
    parser.add_argument(
        "--table-version", default="10.3", metavar="V", help="TensorRT that reads that table (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    weights = parser.add_argument_group("weights only (activations stay float; of MatMuls with constant matrices)")
    weights.add_argument("--weights", choices=("int8", "int4"), help="round weights, nothing else")
    weights.add_argument("--group", type=int, metavar="N", help="inputs that share a scale (int4: 64, for CPUs 32)")
    limit = parser.add_argument_group("accuracy limit (methods, ranges and layers are then searched)")
    limit.add_argument("--max-drop", type=float, metavar="D", help="points of 100 that INT8 may lose; exit 1 above it")
    limit.add_argument("--data", type=Path, metavar="DIR", help="labelled images, for mAP50-95 instead of agreement")
    limit.add_argument("--split", help="split of --data to measure on")
    limit.add_argument("--min-int8", type=float, metavar="SHARE", help="share of FLOPs that stays INT8 (default 0.5)")
    limit.add_argument("--minutes", type=float, metavar="M", help="try nothing new after so long (default 30)")
    limit.add_argument("--target", metavar="NAME@MODE", help="board whose predicted time says which layers are cheap")
    nodes = parser.add_argument_group("what is quantized")
    nodes.add_argument("--exclude", action="append", default=[], metavar="NODE", help="keep a node float, repeatable")
    nodes.add_argument("--only", action="append", default=[], metavar="NODE", help="quantize only these, repeatable")
    nodes.add_argument("--op-types", default="Conv,ConvTranspose,Gemm,MatMul", metavar="A,B", help="operator types")
    nodes.add_argument("--no-residual", action="store_true", help="no Q/DQ on the shortcut of residual Adds")
    nodes.add_argument("--concat", choices=("after", "before"), default="after", help="side of a Concat that has Q/DQ")
    nodes.add_argument("--dedicated-qdq", action="store_true", help="one Q/DQ pair per consumer, not one per tensor")
    nodes.add_argument("--quantize-tail", action="store_true", help="quantize a detector's last layers too")
    nodes.add_argument("--no-bias-correction", action="store_true", help="leave biases as they are")
    images = parser.add_argument_group(
        "how calibration images are prepared (default: what a YOLO model says, or RGB 0..1)"
    )
    images.add_argument("--resize", choices=("letterbox", "stretch", "crop"), help="fit to the size")
    images.add_argument("--channels", choices=("rgb", "bgr", "gray"), help="channel order")
    images.add_argument("--scale", type=float, metavar="S", help="factor on pixels 0..255 (default 1/255)")
    images.add_argument("--mean", metavar="R,G,B", help="subtracted after scaling")
    images.add_argument("--std", metavar="R,G,B", help="divided by after that")


def run(args: argparse.Namespace) -> int:
    if args.out.suffix.lower() != ".onnx" or (args.cpu_out is not None and args.cpu_out.suffix.lower() != ".onnx"):
        raise SpecError(f"--out {args.out}: name a file that ends in .onnx")
    if args.weights is not None:
        return _run_weights(args)
    if args.group is not None:
        raise SpecError("--group belongs to --weights int4")
    if args.calib is None:
        raise SpecError("calibration samples are needed: give --calib PATH, or --weights to round weights only")
    if args.max_drop is not None and args.method is not None:
        raise SpecError(f"--max-drop tries every method itself: leave --method {args.method} out")
    if args.percentile is not None and args.max_drop is None and args.method not in ("percentile", "auto"):
        raise SpecError(f"--percentile belongs to --method percentile, not {args.method or 'mse, the default'}")
    if args.threads is not None:
        check_threads(args.threads)
    from edgeds.compress.placement import Selection
    from edgeds.compress.quantize import DEFAULT_METHOD, DEFAULT_PERCENTILE, quantize_model

    limit = _limit(args)
    report = quantize_model(
        args.model,
        _open_set(args),
        out=args.out,
        method=args.method or DEFAULT_METHOD,
        percentile=args.percentile if args.percentile is not None else DEFAULT_PERCENTILE,
        selection=Selection(
            op_types=tuple(name.strip() for name in args.op_types.split(",") if name.strip()),
            exclude=tuple(args.exclude),
            only=tuple(args.only),
            residual=not args.no_residual,
            concat=args.concat,
            keep_tail=not args.quantize_tail,
        ),
        cpu_out=args.cpu_out,
        ranges_in=args.ranges,
        table_out=args.table_out,
        table_version=args.table_version,
        dedicated=args.dedicated_qdq,
        bias_correction=not args.no_bias_correction,
        threads=args.threads,
        limit=limit,
        target=args.target,
        quiet=args.quiet,
    )
    if args.json:
        emit_json(report_json(report))
    else:
        emit_text("\n".join(describe(report)))
    return 0 if report.autopilot is None or report.autopilot["holds"] else 1


def _run_weights(args: argparse.Namespace) -> int:
    from edgeds.compress.weights_only import DEFAULT_SAMPLES, quantize_weights_only

    for flag in ("method", "percentile", "ranges", "table_out", "max_drop", "data"):
        if getattr(args, flag) is not None:
            raise SpecError(f"--{flag.replace('_', '-')} is for activations, which --weights leaves float")
    report = quantize_weights_only(
        args.model,
        out=args.out,
        weights=args.weights,
        cpu_out=args.cpu_out,
        group=args.group,
        calibration=None if args.calib is None else _open_set(args),
        samples=args.samples or DEFAULT_SAMPLES,
        threads=args.threads,
        quiet=args.quiet,
    )
    if args.json:
        emit_json(report)
        return 0
    lines = [
        f"wrote       {report.model}" + (f" and {report.cpu_model}" if report.cpu_model else ""),
        f"weights     {report.layers} layers in {report.weights.upper()}, "
        f"{report.weights_bytes_float / 2**20:.2f} -> {report.weights_bytes / 2**20:.2f} MiB"
        + (f", made up for on {report.samples} samples" if report.compensated else ""),
    ]
    if report.sqnr_db is not None:
        lines.append(f"SQNR        {report.sqnr_db:.1f} dB on the worst output")
    emit_text("\n".join([*lines, *(f"float       {name}: {why}" for name, why in report.left[:_SHOWN])]))
    return 0


def _limit(args: argparse.Namespace) -> Limit | None:
    from edgeds.compress.accuracy_limit import DEFAULT_MINUTES, DEFAULT_SHARE, Limit

    flags = {"--data": args.data, "--split": args.split, "--target": args.target}
    flags |= {"--min-int8": args.min_int8, "--minutes": args.minutes}
    if args.max_drop is None:
        for flag, value in flags.items():
            if value is not None:
                raise SpecError(f"{flag} belongs to an accuracy limit: give --max-drop too")
        return None
    if args.split is not None and args.data is None:
        raise SpecError("--split is one of --data: give --data too")
    limit = Limit(
        max_drop=args.max_drop,
        min_share=DEFAULT_SHARE if args.min_int8 is None else args.min_int8,
        minutes=DEFAULT_MINUTES if args.minutes is None else args.minutes,
    )
    if args.data is None:
        return limit
    from edgeds.workshop.measure import detection_metric

    size = Resolution.parse(args.size) if args.size else None
    measure = detection_metric(args.model, data=args.data, split=args.split, size=size, preprocess=_preprocess(args))
    return replace(limit, measure=measure, metric="mAP50-95")


def _open_set(args: argparse.Namespace) -> CalibrationSet:
    from edgeds.workshop.calibration import open_model_set

    size = Resolution.parse(args.size) if args.size else None
    return open_model_set(args.model, args.calib, size=size, preprocess=_preprocess(args), limit=args.samples)


def _preprocess(args: argparse.Namespace) -> Any:
    """The preprocessing given on the command line, None when nothing was given."""
    from edgeds.preproc import ImagePreprocess

    given: dict[str, Any] = {"mode": args.resize, "channels": args.channels, "scale": args.scale}
    for name in ("mean", "std"):
        text = getattr(args, name)
        if text is not None:
            try:
                values = tuple(float(part) for part in text.split(","))
            except ValueError as error:
                raise SpecError(f"--{name} {text!r}: give one or three numbers, 0.485,0.456,0.406") from error
            given[name] = values * 3 if len(values) == 1 else values
    given = {name: value for name, value in given.items() if value is not None}
    return ImagePreprocess(stride=1, **given) if given else None


def report_json(report: QuantizeReport) -> dict[str, Any]:
    """The report as the command-line contract has it: everything but the raw feeds."""
    data: dict[str, Any] = to_json(replace(report, checked_feeds=()))
    data.pop("checked_feeds")
    return data


def describe(report: QuantizeReport) -> list[str]:
    """The report for people."""
    share, sqnr = report.int8_flops_share, report.sqnr_db
    lines = [
        f"wrote       {report.int8_model}" + (f" and {report.cpu_model}" if report.cpu_model else ""),
        f"calibrated  {report.samples} samples, {report.method}, {', '.join(report.shapes)}",
        f"INT8        {share:.1%} of Conv/MatMul FLOPs, {report.quantized_nodes} nodes",
        f"SQNR        {'exact' if sqnr is None else f'{sqnr:.1f} dB'} on the worst output",
        f"weights     {report.weights_bytes_float / 2**20:.2f} -> {report.weights_bytes_int8 / 2**20:.2f} MiB",
        f"ranges      {report.ranges}" + (f" and {report.table}" if report.table else ""),
    ]
    for output in report.outputs:
        shown = "exact" if output.sqnr_db is None else f"{output.sqnr_db:.1f} dB"
        lines.append(f"  output {output.name}: {shown}, largest difference {output.max_abs_error:.4g}")
        if output.changed_shapes:
            lines.append(f"    not compared on {output.changed_shapes} samples, where its shape changed")
    for name, figure in report.methods.items():
        shown = "exact" if figure is None else f"{figure:.1f} dB"
        lines.append(f"  method {name}: {shown} on held-out samples{' (used)' if name == report.method else ''}")
    lines += _describe_limit(report.autopilot) if report.autopilot is not None else []
    if report.float_nodes:
        lines.append(f"float       {len(report.float_nodes)} nodes:")
        lines += [f"  {item.node}: {item.reason}" for item in report.float_nodes[:_SHOWN]]
        if len(report.float_nodes) > _SHOWN:
            lines.append(f"  and {len(report.float_nodes) - _SHOWN} more (--json lists all)")
    worst = sorted(
        (layer for layer in report.layers if layer.sqnr_db is not None), key=lambda layer: layer.sqnr_db or 0.0
    )
    if worst:
        lines.append("lowest SQNR by layer (error accumulated up to there):")
        lines += [f"  {layer.sqnr_db:6.1f} dB  {layer.node}" for layer in worst[:5]]
    return lines + [f"note        {note}" for note in report.notes]


def _describe_limit(found: Mapping[str, Any]) -> list[str]:
    """What the autopilot did, and what is to blame when the limit does not hold."""
    verdict = "holds" if found["holds"] else "DOES NOT HOLD"
    lines = [
        f"limit       {found['drop']:.2f} points of {found['metric']} lost ({found['float']:.2f} to "
        f"{found['int8']:.2f}), {found['max_drop']:g} allowed: {verdict}",
        f"  with      {found['method']}",
    ]
    if not found["holds"]:
        lines += [f"  to blame  {layer['node']}" for layer in found["blame"][:_BLAMED]]
    return lines
