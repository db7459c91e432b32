"""``edgeds prune``: remove channels from an ONNX model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.cli.output import emit_json, emit_text
from edgeds.engines.base import check_threads
from edgeds.errors import SpecError
from edgeds.specs import Budget, Resolution, to_json

if TYPE_CHECKING:
    from edgeds.compress.calibset import CalibrationSet
    from edgeds.compress.heads import TransformerReport
    from edgeds.compress.prune import PruneOptions, PruneReport

SUMMARY = (
    "Remove whole channels from a float ONNX model, so that it is smaller and faster everywhere; quantize afterwards."
)

EXAMPLES = """\
examples:
  edgeds prune yolo11n.onnx --ratio 0.2 --out small.onnx                              a fifth of the channels
  edgeds prune yolo11n.onnx --ratio 0.2 --calib images/ --size 320 --out small.onnx   what is left makes up for it
  edgeds prune yolo11n.onnx --speedup 1.3 --target orin-nx-16gb@25W --out small.onnx   until predicted 1.3 x as fast
  edgeds prune yolo11n.onnx --ratio 0.3 --keep '/model.0/*' --out small.onnx          some layers stay
  edgeds prune bert.onnx --heads 0.25 --ffn 0.25 --layers 1 --calib feeds/ --out small.onnx   parts of a transformer
"""
_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="float ONNX model")
    parser.add_argument("--out", required=True, type=Path, metavar="OUT.onnx", help="model to write")
    goal = parser.add_argument_group("how much (one of them)")
    goal.add_argument(
        "--ratio", type=float, metavar="R", help="share of the removable channels to remove, at least 0 and below 1"
    )
    goal.add_argument("--speedup", type=float, metavar="X", help="in predicted latency with --target, else in FLOPs")
    goal.add_argument("--budget", metavar="KEY=VALUE", help="latency-ms=VALUE or fps=VALUE, predicted; needs --target")
    goal.add_argument("--target", metavar="NAME[@MODE]", help="board to predict for; see edgeds targets")
    goal.add_argument("--precision", default="int8", help="precision to predict at (default %(default)s)")
    parts = parser.add_argument_group("how much of a transformer (any of them, instead)")
    parts.add_argument("--heads", type=float, metavar="R", help="share of the attention heads, below 1")
    parts.add_argument("--ffn", type=float, metavar="R", help="share of the feed-forward width, below 1")
    parts.add_argument("--layers", type=int, metavar="N", help="layers to drop, those that cost least")
    which = parser.add_argument_group("which")
    which.add_argument(
        "--method",
        choices=("l2", "l1", "bn", "activation", "taylor", "sensitivity"),
        help="importance (default: sensitivity with --calib, else l2)",
    )
    which.add_argument(
        "--uniform", action="store_true", help="the same share of every layer instead of a ranking over all"
    )
    which.add_argument("--keep", action="append", default=[], metavar="NAME", help="node to keep whole; * matches any")
    which.add_argument(
        "--multiple", type=int, metavar="N", help="keep widths at multiples of N (default: 8 from 32 channels on)"
    )
    which.add_argument("--min-channels", type=int, default=1, metavar="N", help="least width of a layer")
    samples = parser.add_argument_group("calibration")
    samples.add_argument("--calib", type=Path, metavar="PATH", help="folder of images, .npz/.npy, or folder of them")
    samples.add_argument("--size", metavar="HxW", help="resolution of calibration images (default: the model's)")
    samples.add_argument("--samples", type=int, default=48, metavar="N", help="samples at most (default %(default)s)")
    samples.add_argument("--no-reconstruct", action="store_true", help="do not re-solve weights on the samples")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.out.suffix.lower() != ".onnx":
        raise SpecError(f"--out {args.out}: name a file that ends in .onnx")
    if args.calib is None and args.size is not None:
        raise SpecError("--size is the size of calibration images; give --calib too")
    parts = [value is not None for value in (args.heads, args.ffn, args.layers)]
    goals = [value is not None for value in (args.ratio, args.speedup, args.budget)]
    if sum(goals) + any(parts) != 1:
        raise SpecError(
            "say how much to remove with exactly one of --ratio, --speedup and --budget, "
            "or of a transformer with --heads, --ffn and --layers"
        )
    if any(parts) and args.target is not None:
        raise SpecError("--target is for --ratio, --speedup and --budget; for a pruned transformer see edgeds predict")
    if args.threads is not None:
        check_threads(args.threads)
    from edgeds.compress.prune import PruneOptions

    options = PruneOptions(
        method=args.method,
        scope="uniform" if args.uniform else "global",
        multiple=args.multiple,
        min_channels=args.min_channels,
        keep=tuple(args.keep),
        reconstruct=not args.no_reconstruct,
        samples=args.samples,
        threads=args.threads,
    )
    report = _prune_parts(args, options) if any(parts) else _prune_channels(args, options)
    if args.json:
        emit_json(to_json(report))
        return 0
    from edgeds.compress.heads import TransformerReport

    emit_text("\n".join(describe_parts(report) if isinstance(report, TransformerReport) else describe(report)))
    return 0


def _prune_parts(args: argparse.Namespace, options: PruneOptions) -> TransformerReport:
    from edgeds.compress.heads import prune_transformer

    return prune_transformer(
        args.model,
        out=args.out,
        heads=args.heads or 0.0,
        ffn=args.ffn or 0.0,
        layers=args.layers or 0,
        calibration=_open_set(args) if args.calib is not None else None,
        options=options,
        quiet=args.quiet,
    )


def _prune_channels(args: argparse.Namespace, options: PruneOptions) -> PruneReport:
    from edgeds.compress.prune import prune_model

    return prune_model(
        args.model,
        out=args.out,
        ratio=args.ratio,
        speedup=args.speedup,
        budget=_budget(args.budget) if args.budget is not None else None,
        target=args.target,
        precision=args.precision,
        calibration=_open_set(args) if args.calib is not None else None,
        options=options,
        quiet=args.quiet,
    )


def _budget(text: str) -> Budget:
    key, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError as error:
        raise SpecError(f"--budget {text!r}: write latency-ms=8 or fps=60") from error
    if key == "latency-ms":
        return Budget(latency_ms=number)
    if key == "fps":
        return Budget(fps=number)
    raise SpecError(f"--budget {text!r}: pruning knows latency-ms=VALUE and fps=VALUE; for watts see edgeds plan")


def _open_set(args: argparse.Namespace) -> CalibrationSet:
    from edgeds.workshop.calibration import open_model_set

    size = Resolution.parse(args.size) if args.size else None
    return open_model_set(args.model, args.calib, size=size, limit=args.samples)


def describe(report: PruneReport) -> list[str]:
    """The report for people."""
    lines = [
        f"wrote {report.model}",
        f"  channels    {report.channels_before} -> {report.channels_after}  ({report.removed_share:.1%} removed, "
        f"aimed for {report.ratio:.1%})",
        f"  parameters  {report.params_before} -> {report.params_after}",
        f"  FLOPs       {report.flops_before} -> {report.flops_after}",
        f"  mapping     {report.mapping}",
    ]
    if report.samples:
        lines.append(f"  re-solved   {report.reconstructed} layers on {report.samples} samples")
    if report.predicted is not None:
        found = report.predicted
        lines.append(
            f"  predicted   {found['latency_ms_before']:.3g} -> {found['latency_ms_after']:.3g} ms on "
            f"{found['target']} at {found['precision']} (not measured)"
        )
    return [*lines, *_remarks(report)]


def _remarks(report: PruneReport | TransformerReport) -> list[str]:
    """What stayed, and notes."""
    lines = [f"  kept        {item.node}: {item.reason}" for item in report.protected[:_SHOWN]]
    if len(report.protected) > _SHOWN:
        lines.append(f"  kept        {len(report.protected) - _SHOWN} more; see {report.report}")
    return [*lines, *(f"note: {note}" for note in report.notes)]


def describe_parts(report: TransformerReport) -> list[str]:
    """The report of a transformer for people."""
    lines = [
        f"wrote {report.model}",
        f"  parameters  {report.params_before} -> {report.params_after}",
        f"  FLOPs       {report.flops_before} -> {report.flops_after}",
    ]
    for name, widths in (("heads", report.heads), ("width", report.ffn)):
        narrowed = [item for item in widths if item.after < item.before]
        lines += [f"  {name:<11} {item.before} -> {item.after}  {item.node}" for item in narrowed]
    for item in report.layers:
        cost = "alike" if item.sqnr_db is None else f"{item.sqnr_db:.1f} dB"
        lines.append(f"  layer {item.layer:<5} {'dropped' if item.dropped else 'kept'}; alone it costs: {cost}")
    if report.cosine is not None:
        ratio = "" if report.sqnr_db is None else f", {report.sqnr_db:.1f} dB"
        lines.append(f"  outputs     cosine {report.cosine:.4f}{ratio} against the dense model on samples (measured)")
    if report.reconstructed:
        lines.append(f"  re-solved   {report.reconstructed} layers on {report.samples} samples")
    return [*lines, *_remarks(report)]
