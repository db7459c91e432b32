"""``edgeds tune``: measure power modes, batches and forms of a bundle on this board, and keep what was found."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.cli.options import add_trust
from edgeds.cli.output import emit_json, emit_text
from edgeds.errors import BundleError, SpecError

if TYPE_CHECKING:
    from edgeds.boards.cost_file import ModelWork
    from edgeds.boards.plan_spec import BoardScale
    from edgeds.bundle import Bundle
    from edgeds.report.tune import TuneOutcome
    from edgeds.report.tune_device import TuneStep
    from edgeds.report.tune_state import TuneRow

SUMMARY = "Measure power modes, batches and forms of a bundle on this board, steadily and not too hot; resumable."

EXAMPLES = """\
examples:
  edgeds tune yolo.bundle                                     batches 1 2 4 8 in the mode this board is in
  edgeds tune yolo.bundle --modes 15W,25W,MAXN --set-modes    switches with sudo nvpmodel, and back at the end
  edgeds tune yolo.bundle --precision int8 --size 640 --size 480 --minutes 20
  edgeds plan yolo.bundle --target jetson --watts 15          then plans with what was measured

The state is kept in BUNDLE/engines/tune.json after every step: run it again to go on. Plans take the measurements from
BUNDLE/engines/measured.json.
"""

INTERRUPTED = 130
DEFAULT_BATCHES = (1, 2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle folder")
    parser.add_argument("--modes", metavar="MODE,MODE", help="power modes to walk through (default: the one it is in)")
    parser.add_argument("--set-modes", action="store_true", help="allow sudo nvpmodel; the mode is set back at the end")
    parser.add_argument("--precision", action="append", choices=("fp32", "fp16", "int8"), help="repeatable")
    parser.add_argument("--batch", action="append", type=int, metavar="N", help="repeatable (default: 1 2 4 8)")
    parser.add_argument("--size", action="append", default=[], metavar="HxW", help="repeatable (default: the bundle's)")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no step after so long")
    parser.add_argument("--window", type=float, default=3.0, metavar="S", help="one window of measurement (default 3)")
    parser.add_argument("--start-temp", type=float, default=60.0, metavar="C", help="start a step below (default 60)")
    parser.add_argument("--latency-ms", type=float, metavar="L", help="try no larger batches beyond this latency")
    parser.add_argument("--backend", default="auto", help="auto, onnxruntime (cpu) or tensorrt (default: auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of one run")
    parser.add_argument("--restart", action="store_true", help="forget an earlier run")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when something was measured, 1 when nothing could be, 130 when interrupted."""
    from edgeds.bundle import open_bundle
    from edgeds.report.tune import TuneOptions, tune
    from edgeds.report.tune_device import ThisMachine
    from edgeds.report.tune_result import order_steps, store_measured, store_scale

    options = TuneOptions(
        window_s=args.window, start_temp_c=args.start_temp, minutes=args.minutes, latency_limit_ms=args.latency_ms
    )
    modes = [text.strip() for text in args.modes.split(",") if text.strip()] if args.modes else []
    if modes and not args.set_modes:
        raise SpecError("--modes switches power modes with sudo nvpmodel: allow that with --set-modes")
    if not args.bundle.is_dir():
        raise SpecError(f"{args.bundle}: not a bundle folder; unzip it first, since measurements are kept in it")
    with open_bundle(args.bundle, quiet=args.quiet) as bundle:
        work = _work(bundle)
        device = ThisMachine(bundle, backend=args.backend, threads=args.threads, set_modes=args.set_modes)
        try:
            steps = order_steps(plan_steps(bundle, args, modes=modes), work=work, board=device.board)
            outcome = tune(
                steps, device=device, root=bundle.root, options=options, restart=args.restart, quiet=args.quiet
            )
            measured = store_measured(bundle.root, outcome.state)
            scale = store_scale(bundle.root, outcome.state, work=work) if work is not None else None
        finally:
            device.close()
    if args.json:
        emit_json(document(outcome, measured=len(measured), scale=scale, bundle=args.bundle))
    else:
        emit_text("\n".join(describe(outcome, scale=scale)))
    if outcome.interrupted:
        return INTERRUPTED
    return 0 if outcome.state.rows else 1


def plan_steps(bundle: Bundle, args: argparse.Namespace, *, modes: list[str]) -> list[TuneStep]:
    """All combinations that were asked for. Raises SpecError for impossible ones."""
    from edgeds.report.tune_device import TuneStep
    from edgeds.specs import Resolution

    manifest = bundle.manifest
    have = ["int8"] if {"int8", "cpu_int8"} & set(manifest.models) else []
    have += ["fp16"] if {"float", "float16"} & set(manifest.models) else []
    precisions = list(dict.fromkeys(args.precision or have))
    sizes = [str(Resolution.parse(text)) for text in args.size] or [str(size) for size in manifest.buckets]
    batches = sorted(set(args.batch or [one for one in DEFAULT_BATCHES if one <= manifest.max_batch]))
    if batches[0] < 1:
        raise SpecError(f"--batch {batches[0]}: need at least 1")
    walked: Sequence[str | None] = modes or [None]
    served: Sequence[str | None] = sizes or [None]
    return [
        TuneStep(mode=mode, precision=precision, size=size, batch=batch)
        for mode, precision, size, batch in itertools.product(walked, precisions, served, batches)
    ]


def _work(bundle: Bundle) -> ModelWork | None:
    from edgeds.cli.predict import bundle_work

    try:
        return bundle_work(bundle)
    except BundleError:
        return None  # an old bundle: measured all the same, only nothing to compare with


def document(outcome: TuneOutcome, *, measured: int, scale: BoardScale | None, bundle: Path) -> dict[str, Any]:
    """What ``--json`` prints."""
    from edgeds.boards.plan_file import MEASURED_NAME
    from edgeds.report.tune_result import best_rows
    from edgeds.report.tune_state import state_path
    from edgeds.specs import to_json

    state = outcome.state
    return {
        "board": state.board,
        "device": state.device,
        "mode": state.original_mode,
        "rows": [{**to_json(row), "fps": row.fps, "usable": row.usable} for row in state.rows],
        "skipped": to_json(state.skipped),
        "best": {name: to_json(row) for name, row in best_rows(state.rows).items()},
        "measured": str(state_path(bundle).with_name(MEASURED_NAME)),
        "measured_rows": measured,
        "scale": to_json(scale) if scale is not None else None,
        "complete": outcome.complete,
        "interrupted": outcome.interrupted,
        "notes": list(outcome.notes),
    }


def describe(outcome: TuneOutcome, *, scale: BoardScale | None) -> list[str]:
    """The result for people."""
    from edgeds.report.tune_result import best_rows

    state = outcome.state
    lines = [f"measured on {state.board or state.device}, mode {state.original_mode or 'unknown'}"]
    lines += [_line(row) for row in state.rows]
    lines += [f"  skipped {one.step.key}: {one.reason}" for one in state.skipped]
    for name, row in best_rows(state.rows).items():
        lines.append(f"best {name}: {row.step.key if row is not None else 'unknown'}")
    if scale is not None:
        power = "" if scale.power is None else f", power x {scale.power:.2f}"
        lines.append(f"predictions for this board: latency x {scale.latency:.2f}{power} ({scale.rows} rows)")
    return [*lines, *(f"note: {note}" for note in outcome.notes)]


def _line(row: TuneRow) -> str:
    power = f"{row.power_w:.3g} W" if row.power_w is not None else f"power {row.power_source}"
    flags = "" if row.usable else " (throttled, not used)" if row.throttled else " (not steady, not used)"
    return f"  {row.step.key}: {row.latency_ms:.3g} ms, {row.fps:.4g} per second, {power}{flags}"
