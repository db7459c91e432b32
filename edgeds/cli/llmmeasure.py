"""``edgeds eval`` and ``edgeds bench`` for language-model bundles."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.cli.llm import TASK
from edgeds.cli.output import emit_json, emit_text
from edgeds.cli.text import peek
from edgeds.errors import SpecError
from edgeds.specs import to_json

if TYPE_CHECKING:
    from edgeds.report.llmbench import LlmBenchReport, Spread

INTERRUPTED = 130


def peek_language_bundle(path: Path) -> bool:
    """Whether a folder or zip is a bundle of task ``generate``, without checking its files."""
    manifest = peek(path)
    return manifest is not None and manifest.task == TASK


def run_language_eval(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when the perplexity is above ``--max-value``."""
    from edgeds.report.perplexity import evaluate_language_model

    for flag in ("size", "head", "split", "limit", "min_map", "min_value"):
        if getattr(args, flag):
            name = flag.replace("_", "-")
            raise SpecError(f"--{name} is for detectors and text models; {args.bundle} is a language model")
    report = evaluate_language_model(
        args.bundle,
        args.data,
        limit=args.tokens,
        window=args.window,
        kv_budget=args.kv_budget,
        backend=args.backend,
        precision=args.precision,
        threads=args.threads,
        quiet=args.quiet,
    )
    if args.json:
        emit_json(report)
    else:
        emit_text(f"perplexity   {report['perplexity']:.3f}")
        emit_text(
            f"{report['samples']} tokens of {args.data} in windows of {report['window_tokens']}, "
            f"{report['precision']} on {report['backend']}, KV in {report['kv_dtype']}"
        )
    if args.max_value is not None and report["perplexity"] > args.max_value:
        print(
            f"edgeds eval: perplexity {report['perplexity']:.3f} is above --max-value {args.max_value:g}",
            file=sys.stderr,
        )
        return 1
    return 0


def run_language_bench(args: argparse.Namespace) -> int:
    """Exit code 0, or 130 after Ctrl-C."""
    from edgeds.pipelines.llm.pipeline import LlmPipeline
    from edgeds.pipelines.llm.scheduler import SchedulerPolicy
    from edgeds.pipelines.llm.settings import LlmSettings
    from edgeds.power import open_sensor
    from edgeds.report.llmbench import LlmLoad, run_llm_bench

    for flag in ("sizes", "tokens", "record", "stats"):
        if getattr(args, flag) is not None:
            raise SpecError(f"--{flag} is for detectors and text models; {args.bundle} is a language model")
    concurrency = args.concurrency if args.concurrency is not None else args.batch
    load = LlmLoad(
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        shared_prefix=args.shared_prefix,
        concurrency=concurrency,
        seconds=args.seconds,
        warmup_s=args.warmup,
    )
    policy = SchedulerPolicy(max_batch=args.batch if args.batch > 1 else max(8, concurrency), max_waiting=1024)
    options = {"backend": args.backend, "precision": args.precision, "threads": args.threads}
    with contextlib.ExitStack() as stack:
        sensor = open_sensor()
        stack.callback(sensor.close)
        pipeline = stack.enter_context(
            LlmPipeline.from_bundle(
                args.bundle, settings=LlmSettings(policy=policy, speculate=args.speculate), **options
            )
        )
        report = run_llm_bench(pipeline, load, quiet=args.quiet, sensor=sensor)
    if args.json:
        emit_json({**to_json(report), **_common_figures(report)})
    else:
        emit_text("\n".join(describe(report)))
    return INTERRUPTED if report.interrupted else 0


def _common_figures(report: LlmBenchReport) -> dict[str, float | None]:
    """The keys that a bench has for every kind of bundle: requests per second and their latency."""
    total = report.total_ms
    latency = {f"latency_{name}_ms": getattr(total, name, None) for name in ("mean", "p50", "p95", "p99")}
    return {"fps": report.requests_per_s, **latency}


def describe(report: LlmBenchReport) -> list[str]:
    """The report for people, line by line."""
    load = report.load
    lines = [f"{report.device}, {report.backend}, {report.threads} threads, {report.precision or 'as exported'}"]
    if report.fallback_reason:
        lines.append(f"note: {report.fallback_reason}")
    if report.interrupted:
        lines.append("interrupted: the figures cover the time until then")
    if not report.requests:
        return [*lines, "nothing was measured"]
    lines += [
        f"{report.requests} requests of {load.prompt_tokens} + {load.output_tokens} tokens over {report.wall_s:.1f} s, "
        f"{load.concurrency} at once",
        f"output {report.tokens_per_s:.1f} tokens/s, prompts {report.prompt_tokens_per_s:.1f} tokens/s, "
        f"{report.requests_per_s:.2f} requests/s",
        f"first token ms: {_spread(report.ttft_ms)}",
        f"between tokens ms: {_spread(report.itl_ms)}",
        f"request ms: {_spread(report.total_ms)}",
        f"KV cache: {report.kv_mean_share or 0:.1%} of {report.kv_tokens} tokens used on average, "
        f"{report.kv_peak_share or 0:.1%} at most; {report.kv_mib:.0f} MiB in {report.kv_dtype}",
        f"prompt tokens found in the cache: {report.cached_tokens}; preemptions: {report.preemptions}",
    ]
    if report.drafted:
        share = report.accepted / report.drafted
        lines.append(f"guesses: {report.accepted} of {report.drafted} accepted ({share:.0%})")
    energy = f", {report.energy_mj_per_token:.1f} mJ per token" if report.energy_mj_per_token is not None else ""
    power = report.power_source if report.power_w is None else f"{report.power_w:.2f} W{energy} ({report.power_source})"
    return [*lines, f"power: {power}"]


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"mean {spread.mean:.1f}, p50 {spread.p50:.1f}, p90 {spread.p90:.1f}, p99 {spread.p99:.1f}"
