"""``edgeds plan``: which power mode, precision, batch and size meet a budget on a board."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.cli.output import emit_json, emit_text
from edgeds.cli.planinput import parse_variant, read_candidates, usual_batches
from edgeds.errors import SpecError
from edgeds.specs import Budget, Resolution

if TYPE_CHECKING:
    from edgeds.boards.board_plan import BoardPlan, Load
    from edgeds.boards.plan_spec import PlanChoice, PlanOptions, PlanResult
    from edgeds.boards.spec import Target

SUMMARY = "Find power mode, precision, batch and size that meet a budget on a board, before anyone owns it."

EXAMPLES = """\
examples:
  edgeds plan yolo11n.onnx --target orin-nx-16gb --watts 15 --fps 30
  edgeds plan yolo.bundle --target agx-orin-64gb@30W --fps 30 --streams 4 --latency-ms 60 --json
  edgeds plan yolo.bundle --target jetson --watts 15 --write            on the board: measured where it was measured
  edgeds plan cost.json --target orin-nano-8gb --size 640 --size 480 --objective latency
  edgeds plan yolo11n.onnx --target orin-nx-16gb --device gpu --device dla --fps 30
  edgeds plan qwen2.5-7b.json --target orin-nano-8gb --precision int4 --context 4096 --fps 10     tokens per second
  edgeds plan yolo11n.onnx --variant pruned.onnx=40.1 --min-accuracy 39.5 --target orin-nx-16gb --fps 60
  edgeds plan --model yolo=yolo.json:30fps --model bert=bert.json:20fps,100ms --target agx-orin-64gb --watts 30
"""

_SHOWN = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL|BUNDLE|COST.json", nargs="?", type=Path, help="what is to run")
    parser.add_argument("--target", required=True, metavar="NAME[@MODE]", help="board; without a mode, all are tried")
    limits = parser.add_argument_group("limits (none given: the best by --objective)")
    limits.add_argument("--fps", type=float, metavar="F", help="frames per second of one stream, at least")
    limits.add_argument("--streams", type=int, default=1, metavar="N", help="so many streams of that (default 1)")
    limits.add_argument("--watts", type=float, metavar="W", help="power of the module while it runs, at most")
    limits.add_argument("--latency-ms", type=float, metavar="L", help="inference and waiting for the batch, at most")
    limits.add_argument("--latency-p99-ms", type=float, metavar="L", help="the same at the upper edge of the band")
    limits.add_argument("--memory-mib", type=float, metavar="M", help="at most (default: 70 %% of the board's)")
    limits.add_argument("--energy-mj", type=float, metavar="E", help="per frame, at most")
    limits.add_argument("--min-accuracy", type=float, metavar="A", help="in points, at least; unknown does not pass")
    choice = parser.add_argument_group("what to choose from")
    choice.add_argument("--precision", action="append", choices=("fp32", "fp16", "int8", "int4"), help="repeatable")
    choice.add_argument("--device", action="append", choices=("gpu", "dla"), help="repeatable (default gpu)")
    choice.add_argument("--context", type=int, metavar="N", help="language models: tokens in the cache")
    choice.add_argument("--batch", action="append", type=int, metavar="N", help="repeatable (default 1 2 4 8 16)")
    choice.add_argument("--size", action="append", default=[], metavar="HxW", help="repeatable (default: the model's)")
    choice.add_argument("--mode", action="append", metavar="MODE", help="power modes to try, repeatable (default: all)")
    choice.add_argument(
        "--variant", action="append", default=[], metavar="FILE[=ACCURACY]", help="another form of it, repeatable"
    )
    choice.add_argument("--accuracy", type=float, metavar="A", help="of MODEL, in points")
    choice.add_argument(
        "--model", dest="models", action="append", default=[], metavar="NAME=FILE:FPSfps[,MSms]",
        help="several models on one board, repeatable, in place of MODEL",
    )  # fmt: skip
    parser.add_argument(
        "--objective", choices=("fps_per_watt", "fps", "latency", "energy", "accuracy"), default="fps_per_watt"
    )
    parser.add_argument(
        "--margin", choices=("mean", "high", "low"), default="mean", help="edge of the band to judge by (default mean)"
    )
    parser.add_argument("--write", action="store_true", help="store the plan in the bundle: build and run obey it")
    parser.add_argument("--boards", type=Path, metavar="FILE", help="own boards (docs/boards.md)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when a plan meets all limits, 1 when none does."""
    from edgeds.boards.catalogue import load_catalogue
    from edgeds.boards.targets import resolve_target

    if (args.model is None) == (not args.models):
        raise SpecError("give one MODEL, or several as --model NAME=FILE:30fps")
    options = plan_options(args)
    if args.model is not None and not args.batch:
        options = replace(options, batches=usual_batches(args.model, options.batches))
    target = resolve_target(args.target, catalogue=load_catalogue(args.boards))
    if args.models:
        return _run_board(args, target, options)
    from edgeds.boards.planner import plan_model

    candidates = read_candidates(args.model, precisions=args.precision, accuracy=args.accuracy)
    for text in args.variant:
        path, accuracy = parse_variant(text)
        candidates += read_candidates(path, precisions=args.precision, accuracy=accuracy)
    devices = list(dict.fromkeys(args.device or ["gpu"]))
    candidates = [replace(one, device=device, context=args.context) for one in candidates for device in devices]
    result = plan_model(candidates, target=target, options=options)
    if args.write and result.feasible:
        _write(args.model, result, options)
    if args.json:
        from edgeds.boards.plan_file import plan_document

        emit_json(plan_document(result, options=options))
    else:
        emit_text("\n".join(describe(result, options)))
    return 0 if result.feasible else 1


def plan_options(args: argparse.Namespace) -> PlanOptions:
    """The budget and the choices as given. Raises SpecError for impossible numbers."""
    from edgeds.boards.plan_spec import DEFAULT_BATCHES, PlanOptions

    budget = Budget(
        watts=args.watts,
        fps=args.fps,
        latency_ms=args.latency_ms,
        memory_mib=args.memory_mib,
        latency_p99_ms=args.latency_p99_ms,
        energy_mj=args.energy_mj,
        min_accuracy=args.min_accuracy,
        streams=args.streams,
    )
    if args.streams > 1 and args.fps is None:
        raise SpecError("--streams needs --fps: how many frames per second each of them has")
    return PlanOptions(
        budget=budget,
        objective=args.objective,
        modes=tuple(args.mode) if args.mode else None,
        batches=tuple(dict.fromkeys(args.batch)) if args.batch else DEFAULT_BATCHES,
        sizes=tuple(Resolution.parse(text) for text in args.size),
        margin=args.margin,
    )


def describe(result: PlanResult, options: PlanOptions) -> list[str]:
    """The page for people."""
    lines = []
    if result.plan is not None:
        plan = result.plan
        lines += [
            f"{result.target}: {plan.mode}, {plan.precision}, batch {plan.batch}, {plan.size or 'size as it is'}",
            f"  {plan.status}: {plan.fps:.4g} FPS, {_power(plan)}, {plan.latency_ms:.3g} ms"
            f" ({plan.latency_low_ms:.3g} to {plan.latency_high_ms:.3g}), response {plan.response_ms:.3g} ms",
        ]
        if plan.memory_mib is not None:
            lines.append(f"  memory {_memory(plan)}, limited by {plan.limited_by or 'unknown'}")
    else:
        lines.append(f"{result.target}: no way meets all limits; the nearest:")
        for one in result.nearest:
            lines.append(f"  {one}")
            lines += [f"      misses {miss}" for miss in one.misses]
    if result.alternatives:
        lines.append(f"others that no way beats in everything ({len(result.alternatives)}):")
        lines += [f"  {one}" for one in result.alternatives[:_SHOWN]]
    lines += [f"- {reason}" for reason in result.reasons]
    notes = dict.fromkeys(note for one in (result.plan, *result.nearest[:1]) if one for note in one.notes)
    return [*lines, *(f"note: {note}" for note in notes)]


def _memory(plan: PlanChoice) -> str:
    """The total, and where there is a prediction its parts."""
    total, parts = f"{plan.memory_mib:.0f} MiB", plan.memory
    if parts is None:
        return total
    kv = f", KV cache {parts.kv_cache_mib:.0f}" if parts.kv_cache_mib else ""
    return (
        f"{total} (weights {parts.weights_mib:.0f}, activations {parts.activations_mib:.0f}, workspace "
        f"{parts.workspace_mib:.0f}{kv})"
    )


def _power(plan: PlanChoice) -> str:
    if plan.power_w is None or plan.energy_mj is None:
        return "power unknown"
    return f"{plan.power_w:.3g} W ({plan.energy_mj:.3g} mJ per frame)"


def _write(path: Path, result: PlanResult, options: PlanOptions) -> None:
    from edgeds.boards.plan_file import store_plan
    from edgeds.bundle import open_bundle
    from edgeds.bundle.writer import change_manifest
    from edgeds.specs import to_json

    if not path.is_dir():
        raise SpecError(f"--write: {path} is not a bundle folder")
    with open_bundle(path) as bundle:
        stored = store_plan(result, options=options, sizes=[str(size) for size in bundle.manifest.buckets])
        change_manifest(
            bundle,
            plan=to_json(stored),
            budget=to_json(options.budget),
            target={"name": stored.target, "mode": stored.mode},
        )


def _run_board(args: argparse.Namespace, target: Target, options: PlanOptions) -> int:
    from edgeds.boards.board_plan import plan_board
    from edgeds.specs import to_json

    if args.write or args.variant or args.fps is not None:
        raise SpecError("--write, --variant and --fps belong to one MODEL; give each --model its own rate")
    loads: dict[str, Load] = {}
    for text in args.models:
        name, load = _parse_load(text, precisions=args.precision)
        if name in loads:
            raise SpecError(f"--model {name}: given twice")
        loads[name] = load
    plan, left_out = plan_board(loads, target=target, options=options)
    if args.json:
        document = {"feasible": plan.feasible, "plan": to_json(plan), "alternatives": []}
        reasons = [*left_out, *(f"misses {miss}" for miss in plan.misses)]
        emit_json({**document, "target": str(target), "reasons": reasons})
    else:
        emit_text("\n".join([*_describe_board(plan), *left_out]))
    return 0 if plan.feasible else 1


def _parse_load(text: str, *, precisions: list[str] | None) -> tuple[str, Load]:
    from edgeds.boards.board_plan import Load

    match = re.fullmatch(r"([^=]+)=(.+):(\d+(?:\.\d+)?)fps(?:,(\d+(?:\.\d+)?)ms)?", text)
    if match is None:
        raise SpecError(f"--model {text!r}: expected NAME=FILE:30fps, or with a latency NAME=FILE:30fps,50ms")
    name, path, fps, latency = match.groups()
    budget = replace(Budget(), fps=float(fps), latency_ms=float(latency) if latency else None)
    return name, Load(candidates=tuple(read_candidates(Path(path), precisions=precisions)), budget=budget)


def _describe_board(plan: BoardPlan) -> list[str]:
    power = "power unknown" if plan.power_w is None else f"{plan.power_w:.3g} W on average"
    lines = [f"{plan.target}: {plan.mode}, {100 * plan.share:.0f} % of the GPU's time, {power} ({plan.status})"]
    if plan.misses:
        lines.append("does not meet: " + "; ".join(map(str, plan.misses)))
    for share in plan.models:
        lines.append(f"  {share.model}: {100 * share.share:.0f} %, response {share.response_ms:.3g} ms, {share.choice}")
    return lines
