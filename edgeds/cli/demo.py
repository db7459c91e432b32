"""``edgeds demo``: the main job from end to end on real weights and photographs."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgeds.cli.output import emit_json, emit_text
from edgeds.errors import SpecError

SUMMARY = "Fetch a detector, calibrate it to INT8, pack a bundle, run it on photographs, measure float against INT8."

DEFAULT_OUT = Path("edgeds-demo")

EXAMPLES = """\
examples:
  edgeds demo                            writes edgeds-demo/ with pictures and report.html
  edgeds demo --out /tmp/demo --json
  edgeds demo --data my-images/          calibrate and run on your own photographs
  edgeds demo --size 320 --seconds 2     faster on a slow machine
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"folder (default {DEFAULT_OUT}, in place of an earlier demo)"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="your own images instead of the sample photographs")
    parser.add_argument(
        "--size", type=int, default=640, metavar="PX", help="long side of the input (default %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=6.0, metavar="S", help="measuring time per precision (default %(default)s)"
    )
    parser.add_argument("--replace", action="store_true", help="replace what an earlier demo left in DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if not 32 <= args.size <= 4096:
        raise SpecError(f"--size {args.size}: give 32 to 4096 pixels")
    if not 0.1 <= args.seconds <= 3600:
        raise SpecError(f"--seconds {args.seconds}: give 0.1 to 3600")
    from edgeds.workshop.demo import run_demo

    out = DEFAULT_OUT if args.out is None else args.out
    replace = args.replace or args.out is None  # the same command runs twice; only a demo's own files are replaced
    result = run_demo(
        out, data=args.data, long_side_px=args.size, seconds=args.seconds, replace=replace, quiet=args.quiet
    )
    if args.json:
        emit_json(vars(result))
        return 0
    emit_text(f"bundle      {result.bundle}")
    emit_text(f"pictures    {len(result.images)} in {out / 'pictures'}, {result.detections} objects found")
    emit_text(f"float       {result.fps_float:.1f} frames/s on this CPU, end to end")
    ratio = f" ({result.fps_int8 / result.fps_float:.2f} x float)" if result.fps_float > 0 else ""
    emit_text(f"INT8        {result.fps_int8:.1f} frames/s{ratio}")
    emit_text(f"report      {result.report}")
    return 0
