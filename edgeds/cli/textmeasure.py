"""``edgeds eval`` and ``edgeds bench`` for text bundles."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeds.cli.output import emit_json, emit_text
from edgeds.errors import SpecError

if TYPE_CHECKING:
    from edgeds.bundle import Bundle
    from edgeds.pipelines.bert import BertPipeline
    from edgeds.report.bench import BenchRequest
    from edgeds.runtime import BatchPolicy

BENCH_TOKENS = (8, 16, 32, 64, 128)


def run_text_eval(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when the value is below ``--min-value``."""
    from edgeds.pipelines.bert import BertPipeline
    from edgeds.report.textaccuracy import evaluate_text

    for flag in ("size", "head", "split", "min_map"):
        if getattr(args, flag):
            raise SpecError(f"--{flag.replace('_', '-')} is for detectors; {args.bundle} is a text model")
    with BertPipeline.from_bundle(
        args.bundle, backend=args.backend, precision=args.precision, threads=args.threads
    ) as pipeline:
        report = evaluate_text(pipeline, args.data, limit=args.limit, quiet=args.quiet)
        engine = pipeline.session.engine
        report |= {
            "data": str(args.data),
            "truncated": pipeline.truncated,
            "precision": engine.precision,
            "backend": engine.backend,
            "fallback_reason": engine.fallback_reason,
        }
    if args.json:
        emit_json(report)
    else:
        shown = [key for key in report if isinstance(report[key], float) and key != "value"]
        emit_text("\n".join(f"{key:<12} {report[key]:.2f}" for key in shown))
        emit_text(f"{report['samples']} samples of {args.data}, {report['precision']} on {report['backend']}")
    if args.min_value is not None and report["value"] < args.min_value:
        print(
            f"edgeds eval: {report['metric']} {report['value']:.2f} is below --min-value {args.min_value:g}",
            file=sys.stderr,
        )
        return 1
    return 0


class _ByFuture:
    """Sends each text as a request of its own, so that concurrent callers share batches."""

    def __init__(self, pipeline: BertPipeline) -> None:
        self.session = pipeline.session
        self._submit = pipeline.submit

    def predict(self, item: Any) -> list[Any]:
        return [self._submit(item).result()]


def open_text_target(
    bundle: Bundle, *, args: argparse.Namespace, policy: BatchPolicy
) -> tuple[Any, list[BenchRequest], Callable[[], None]]:
    """The pipeline, texts of the lengths asked for, and how to close it."""
    from edgeds.pipelines.bert import BertPipeline
    from edgeds.pipelines.bert.lengths import padding_share
    from edgeds.report.bench import BenchRequest

    if args.sizes is not None:
        raise SpecError(f"--sizes is for images; {args.bundle} is a text model, give --tokens 16,64")
    wanted = parse_tokens(args.tokens) if args.tokens is not None else BENCH_TOKENS
    options = {"backend": args.backend, "precision": args.precision, "threads": args.threads}
    pipeline = BertPipeline.from_bundle(bundle, policy=policy, **options)
    alone = policy.max_batch == 1
    longest = pipeline.encoder.max_length
    requests = []
    for tokens in sorted({min(tokens, longest) for tokens in wanted}):
        item = make_text(pipeline, tokens=tokens)
        share = 0.0 if alone else padding_share([tokens], pipeline.lengths)
        requests.append(BenchRequest(payload=item, padding_share=share))
    return (pipeline if alone else _ByFuture(pipeline)), requests, pipeline.close


def parse_tokens(text: str) -> tuple[int, ...]:
    """``8,32,128`` as lengths. Raises SpecError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or any(not part.isdecimal() or int(part) < 1 for part in parts):
        raise SpecError(f"--tokens {text!r}: expected whole numbers above 0, as in 16,64,128")
    return tuple(int(part) for part in parts)


def make_text(pipeline: BertPipeline, *, tokens: int) -> Any:
    """A text of about ``tokens`` tokens in words of the model's own vocabulary (for questions: with its context)."""
    words = _plain_words(pipeline)
    rng = np.random.default_rng(tokens)
    special = len(pipeline.encoder.encode([words[0]])[0].rows[0]) - 1
    count = max(1, tokens - max(special, 0))
    text = " ".join(words[int(at)] for at in rng.integers(0, len(words), count))
    return ("where", text) if pipeline.task == "answer" else text


def _plain_words(pipeline: BertPipeline) -> Sequence[str]:
    """Words that are one token each, as far as the vocabulary shows it."""
    vocabulary = pipeline.encoder.vocabulary()
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha() and word.islower())
    return words or ["a"]
