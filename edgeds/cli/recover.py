"""``edgeds recover``: train a pruned or quantized model against its dense original, without labels."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.cli.output import emit_json, emit_text
from edgeds.errors import SpecError
from edgeds.specs import Resolution, to_json

if TYPE_CHECKING:
    from edgeds.compress.recover import RecoverReport

SUMMARY = "Train a pruned or INT8 model to give what its dense original gives, on samples without labels (needs torch)."

EXAMPLES = """\
examples:
  edgeds recover small.onnx --teacher yolo11n.onnx --calib images/ --size 320 --minutes 30 --out better.onnx
  edgeds recover small.onnx --teacher yolo11n.onnx --calib images/ --size 320 --out better.onnx --resume
  edgeds recover small.onnx --teacher yolo11n.onnx --calib images/ --size 320 --qat --out int8.onnx        INT8
  edgeds recover int8.onnx --teacher yolo11n.onnx --calib images/ --size 320 --steps 100 --out better.onnx
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="pruned float model, or a Q/DQ model (QAT)")
    parser.add_argument("--teacher", required=True, type=Path, metavar="DENSE.onnx", help="the model it was made from")
    parser.add_argument("--calib", required=True, type=Path, metavar="PATH", help="images, .npz/.npy, or a folder")
    parser.add_argument("--out", required=True, type=Path, metavar="OUT.onnx", help="model to write")
    parser.add_argument("--size", metavar="HxW", help="resolution of images (default: the model's)")
    parser.add_argument("--samples", type=int, metavar="N", help="samples at most (default: all)")
    length = parser.add_argument_group("how long (default: 200 steps)")
    length.add_argument("--steps", type=int, metavar="N", help="steps of --batch samples")
    length.add_argument("--minutes", type=float, metavar="M", help="time; with --steps whichever ends first")
    length.add_argument("--resume", action="store_true", help="go on where an interrupted run stopped")
    how = parser.add_argument_group("how")
    how.add_argument("--batch", type=int, default=4, metavar="N", help="samples per step (default %(default)s)")
    how.add_argument(
        "--lr",
        type=float,
        default=1e-3,
        metavar="RATE",
        help="highest step, a share of each weight (default %(default)s)",
    )
    how.add_argument(
        "--qat", action="store_true", help="quantize MODEL to INT8 first and train through the rounding it is run with"
    )
    how.add_argument(
        "--no-augment", action="store_true", help="images as they are, not mirrored, zoomed and pasted over one another"
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="order of samples (default %(default)s)")
    how.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N")
    how.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    from edgeds.compress.recover import recover_model
    from edgeds.compress.recover_options import RecoverOptions
    from edgeds.workshop.calibration import open_model_set

    if args.samples is not None and args.samples < 1:
        raise SpecError(f"--samples: expected a whole number from 1, got {args.samples}")
    options = RecoverOptions(
        steps=args.steps,
        minutes=args.minutes,
        batch=args.batch,
        learning_rate=args.lr,
        augment=not args.no_augment,
        qat=args.qat,
        seed=args.seed,
        device=args.device,
        threads=args.threads,
    )
    size = Resolution.parse(args.size) if args.size else None
    samples = open_model_set(args.teacher, args.calib, size=size, limit=args.samples)
    try:
        report = recover_model(
            args.model,
            teacher=args.teacher,
            samples=samples,
            out=args.out,
            options=options,
            resume=args.resume,
            quiet=args.quiet,
        )
    except KeyboardInterrupt:
        if args.out.with_suffix(".recover.safetensors").exists():
            words = [word for word in sys.argv[1:] if word != "--resume"]
            print(f"stopped; go on with: edgeds {shlex.join([*words, '--resume'])}", file=sys.stderr)
        raise
    if args.json:
        emit_json(to_json(report))
    else:
        emit_text("\n".join(describe(report)))
    return 0


def describe(report: RecoverReport) -> list[str]:
    """The report for people."""
    kind = "INT8 weights through their rounding (QAT)" if report.quantized else "float weights"
    lines = [
        f"wrote {report.model}",
        f"  trained     {report.parameters} parameters, {kind}, {report.steps} steps in {report.seconds:.0f} s "
        f"on {report.device}",
        f"  learned     {report.targets} tensors of {report.teacher} from {report.samples} samples",
        f"  loss        {report.loss_before:.4g} -> {report.loss_after:.4g} on {report.held_out} samples held out",
    ]
    return [*lines, *(f"note: {note}" for note in report.notes)]
