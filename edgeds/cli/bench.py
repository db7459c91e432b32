"""``edgeds bench``: frames per second and latency of a bundle, with synthetic frames at its own resolutions."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeds.cli.llmmeasure import peek_language_bundle, run_language_bench
from edgeds.cli.options import add_trust, given_path
from edgeds.cli.output import emit_json, emit_text
from edgeds.errors import SpecError
from edgeds.specs import Resolution

if TYPE_CHECKING:
    from edgeds.bundle import Bundle
    from edgeds.report.bench import BenchReport, BenchRequest, BenchTrace
    from edgeds.runtime import BatchPolicy

SUMMARY = "Measure frames (texts, tokens) per second and latency of a bundle."

EXAMPLES = """\
examples:
  edgeds bench model.bundle                                   one frame at a time, ten seconds
  edgeds bench model.bundle --batch 8 --seconds 30 --json     batches of up to eight
  edgeds bench model.bundle --precision float                 the float model of the same bundle
  edgeds bench model.bundle --sizes 1080x1920,480x640         frames of these sizes (height x width)
  edgeds bench smollm.bundle --prompt-tokens 128 --output-tokens 64 --concurrency 8
  edgeds bench model.bundle --record run.json                 keep the run, for edgeds report run.json --out page.html
"""

INTERRUPTED = 130
MAX_BATCH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle folder or zip")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the window that counts (default: 10)")
    parser.add_argument("--warmup", type=float, default=2.0, metavar="S", help="seconds before it (default: 2)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="most frames in one run (default: 1)")
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="callers at once (default: 1 for batch 1, else twice the batch for each frame size)",
    )
    parser.add_argument(
        "--precision", choices=("auto", "float", "int8", "int4"), default="auto", help="model of the bundle"
    )
    parser.add_argument("--backend", default="auto", help="auto, onnxruntime (cpu), tensorrt or null (default: auto)")
    parser.add_argument("--sizes", metavar="HxW,HxW", help="frame sizes to send (default: the bundle's resolutions)")
    parser.add_argument("--tokens", metavar="N,N", help="text models: lengths of the texts to send (default 8 to 128)")
    parser.add_argument("--stats", type=given_path, metavar="FILE", help="write FPS and queue there (edgeds monitor)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of one run (default: the physical cores)")
    parser.add_argument("--record", metavar="FILE.json", type=given_path, help="keep the run for edgeds report")
    group = parser.add_argument_group("language models")
    for name, default in (("prompt", 128), ("output", 64)):
        group.add_argument(
            f"--{name}-tokens", type=int, default=default, metavar="N", help="of each request (default %(default)s)"
        )
    group.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N", help="tokens that all prompts begin with (default 0)"
    )
    group.add_argument(
        "--speculate", choices=("off", "lookup"), default="off", help="guess from the text (default off)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    from edgeds.bundle import open_bundle
    from edgeds.power import open_sensor
    from edgeds.report.bench import BenchTrace, run_bench
    from edgeds.runtime.livestats import publish_stats

    trace = BenchTrace()
    if args.record is not None and args.record.is_dir():
        raise SpecError(f"--record {args.record}: is a folder; name a file in it")
    if not 1 <= args.batch <= MAX_BATCH:
        raise SpecError(f"--batch: expected 1 to {MAX_BATCH}, got {args.batch}")
    if peek_language_bundle(args.bundle):
        return run_language_bench(args)
    with open_bundle(args.bundle) as bundle:
        sizes = parse_sizes(args.sizes) if args.sizes is not None else bundle.manifest.buckets
        concurrency = args.concurrency
        if concurrency is None:
            concurrency = 1 if args.batch == 1 else 2 * args.batch * max(1, len(sizes))
        target, requests, close = open_target(bundle, args=args, sizes=sizes, waiting=concurrency)
        with contextlib.ExitStack() as stack:
            stack.callback(close)
            sensor = open_sensor()
            stack.callback(sensor.close)
            stack.enter_context(publish_stats(getattr(target, "session", target), args.stats))
            report = run_bench(
                target,
                requests,
                seconds=args.seconds,
                warmup_seconds=args.warmup,
                concurrency=concurrency,
                quiet=args.quiet,
                sensor=sensor,
                trace=trace,
            )
        if args.record is not None:
            _keep(args, bundle, report=report, trace=trace, sizes=sizes)
    if args.json:
        emit_json(report)
    else:
        emit_text("\n".join(describe(report)))
    return INTERRUPTED if report.interrupted else 0


def _keep(
    args: argparse.Namespace, bundle: Bundle, *, report: BenchReport, trace: BenchTrace, sizes: Sequence[Resolution]
) -> None:
    """Write the run record, with the bundle's budget and the board that this is."""
    from edgeds.boards.probe import probe_machine
    from edgeds.report.benchrecord import record_from_bench
    from edgeds.report.record import write_record
    from edgeds.specs import Budget, from_json

    budget = bundle.manifest.budget
    name = args.bundle.name.removesuffix(".zip").removesuffix(".bundle")
    record = record_from_bench(
        report,
        trace=trace,
        title=f"{name} {report.precision or ''} batch {args.batch}".replace("  ", " "),
        machine=probe_machine(),
        model=name,
        batch=args.batch,
        sizes=tuple(map(str, sizes)),
        budget=None if budget is None else from_json(Budget, budget, where=f"{args.bundle}: budget"),
    )
    write_record(args.record, record)


def parse_sizes(text: str) -> tuple[Resolution, ...]:
    """``320x320,480x640`` as resolutions. Raises SpecError."""
    sizes = tuple(dict.fromkeys(Resolution.parse(part) for part in text.split(",") if part.strip()))
    if not sizes:
        raise SpecError(f"--sizes {text!r}: expected at least one size, as in 320x320,480x640")
    return sizes


def open_target(
    bundle: Bundle, *, args: argparse.Namespace, sizes: Sequence[Resolution], waiting: int
) -> tuple[Any, list[BenchRequest], Callable[[], None]]:
    """What to measure (the whole pipeline for YOLO bundles, else the session), its requests, and how to close it."""
    from edgeds.cli.text import is_text_bundle
    from edgeds.cli.textmeasure import open_text_target
    from edgeds.pipelines.yolo.metadata import TASKS
    from edgeds.runtime import BatchPolicy

    policy = BatchPolicy(max_batch=args.batch, max_delay_ms=5, max_queue=max(256, waiting), on_full="block")
    options = {"backend": args.backend, "precision": args.precision, "threads": args.threads}
    if is_text_bundle(bundle.manifest):
        return open_text_target(bundle, args=args, policy=policy)
    if args.tokens is not None:
        raise SpecError(f"--tokens is for text models; {args.bundle} is none")
    if bundle.manifest.task in TASKS:
        return _open_pipeline(bundle, options=options, policy=policy, sizes=sizes)
    return _open_session(bundle, options=options, policy=policy, sizes=sizes)


def _open_pipeline(
    bundle: Bundle, *, options: dict[str, Any], policy: BatchPolicy, sizes: Sequence[Resolution]
) -> tuple[Any, list[BenchRequest], Callable[[], None]]:
    from edgeds.buckets import padding_share, pick_bucket
    from edgeds.pipelines.yolo.pipeline import YoloPipeline
    from edgeds.report.bench import BenchRequest

    pipeline = YoloPipeline.from_bundle(bundle, policy=policy, **options)
    buckets = pipeline.setup.buckets
    rng = np.random.default_rng(0)
    requests = [
        BenchRequest(
            payload=rng.integers(0, 256, (size.height_px, size.width_px, 3), dtype=np.uint8),
            padding_share=padding_share(size, pick_bucket(size, buckets)),
        )
        for size in sizes or buckets
    ]
    return pipeline, requests, pipeline.close


def _open_session(
    bundle: Bundle, *, options: dict[str, Any], policy: BatchPolicy, sizes: Sequence[Resolution]
) -> tuple[Any, list[BenchRequest], Callable[[], None]]:
    from edgeds.engines import open_engine
    from edgeds.report.bench import BenchRequest
    from edgeds.runtime import Session
    from edgeds.runtime.rows import row_zeros

    engine = open_engine(bundle, **options)
    try:
        rows = engine.inputs[0].shape[0] if engine.inputs[0].shape else 1
        count = rows if isinstance(rows, int) else 1
        shapes: Sequence[Resolution | dict[str, tuple[int, ...]]] = sizes or ({},)
        requests = [
            BenchRequest(
                payload=_fill({spec.name: row_zeros(spec, size, rows=count) for spec in engine.inputs}), frames=count
            )
            for size in shapes
        ]
        session = Session(engine, policy=policy, close_engine=True)
    except BaseException:
        engine.close()
        raise
    return session, requests, session.close


def _fill(feeds: dict[str, Any]) -> dict[str, Any]:
    """Noise in the float inputs; integer inputs stay zero, which every vocabulary and index range has."""
    rng = np.random.default_rng(0)
    return {
        name: rng.random(array.shape).astype(array.dtype) if array.dtype.kind == "f" else array
        for name, array in feeds.items()
    }


def describe(report: BenchReport) -> list[str]:
    """The report for people, line by line."""
    lines = [
        f"{report.device}, {report.backend}, {report.threads} threads, {report.precision or 'precision as exported'}"
    ]
    if report.fallback_reason:
        lines.append(f"note: {report.fallback_reason}")
    if report.interrupted:
        lines.append("interrupted: the figures cover the time until then")
    if report.latency_p50_ms is None:
        return [*lines, "nothing was measured"]
    lines += [
        f"{report.fps:.2f} frames/s over {report.wall_s:.1f} s ({report.frames} frames, {report.concurrency} callers)",
        f"latency ms: mean {report.latency_mean_ms:.2f}, p50 {report.latency_p50_ms:.2f}, "
        f"p95 {report.latency_p95_ms:.2f}, p99 {report.latency_p99_ms:.2f}, max {report.latency_max_ms:.2f}",
    ]
    if report.stages_ms:
        lines.append("stages ms: " + ", ".join(f"{name} {value:.2f}" for name, value in report.stages_ms.items()))
    if report.batch_size_histogram:
        sizes = ", ".join(f"{rows} rows x {count}" for rows, count in report.batch_size_histogram.items())
        lines.append(f"runs: {sizes} (mean {report.mean_batch_rows:.2f} rows)")
    lines.append(f"padding: {report.padding_share:.1%} of the pixels")
    lines.append(f"power: {_power(report)}")
    return lines


def _power(report: BenchReport) -> str:
    if report.power_w is None:
        return report.power_source
    energy = f", {report.energy_mj:.1f} mJ per frame" if report.energy_mj is not None else ""
    return f"{report.power_w:.2f} W{energy} ({report.power_source})"
