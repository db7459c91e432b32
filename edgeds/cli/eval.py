"""``edgeds eval``: accuracy of a detector on images, of a text model on labelled texts, of a language model on text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgeds.cli.detector import add_detector_arguments, open_detector
from edgeds.cli.llmmeasure import peek_language_bundle, run_language_eval
from edgeds.cli.options import add_trust
from edgeds.cli.output import emit_json, emit_text
from edgeds.cli.text import peek_text_bundle
from edgeds.errors import SpecError
from edgeds.report.accuracy import evaluate_detector
from edgeds.report.datasets import open_detection_dataset

SUMMARY = "Measure the accuracy of a bundle: a YOLO (or its plain .onnx) on images, text and language models on texts."

EXAMPLES = """\
examples:
  edgeds eval yolo.bundle --data coco128/                        mAP on the val split
  edgeds eval yolo.bundle --data coco128/ --precision float      the float model of the same bundle
  edgeds eval yolo.bundle --data data.yaml --split test --json
  edgeds eval yolo.bundle --data coco/ --min-map 0.45            exit code 1 when it is below
  edgeds eval minilm.bundle --data sts-test.csv                  Spearman of sentence pairs, in points of 100
  edgeds eval ner.bundle --data test.conll --min-value 90        texts: pairs, labels, CoNLL columns or SQuAD
  edgeds eval smollm.bundle --data wiki.txt --tokens 2048        perplexity of a language model on 2048 tokens
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_detector_arguments(parser)
    parser.add_argument(
        "--data",
        required=True,
        type=Path,
        metavar="PATH",
        help="images/ + labels/, .yaml or COCO json; texts: a file",
    )
    parser.add_argument("--split", metavar="NAME", help="train, val or test (default: val where there are several)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N samples")
    parser.add_argument("--min-map", type=float, metavar="X", help="exit with 1 when mAP50-95 is below X (0 to 1)")
    parser.add_argument("--min-value", type=float, metavar="X", help="text models: exit with 1 below X points (of 100)")
    language = parser.add_argument_group("language models")
    language.add_argument("--task", choices=("perplexity",), help="what is measured (there is one thing)")
    language.add_argument("--tokens", type=int, metavar="N", help="only the first N tokens of the text")
    language.add_argument(
        "--window", type=int, default=512, metavar="N", help="tokens of context (default %(default)s)"
    )
    language.add_argument("--kv-budget", type=int, metavar="N", help="tokens kept cached, others are evicted")
    language.add_argument("--max-value", type=float, metavar="X", help="exit with 1 when the perplexity is above X")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when a limit that was given is not met."""
    if args.min_map is not None and not 0 <= args.min_map <= 1:
        raise SpecError(f"--min-map {args.min_map}: must be from 0 to 1 (0.45, not 45)")
    if peek_language_bundle(args.bundle):
        return run_language_eval(args)
    for flag in ("task", "tokens", "kv_budget", "max_value"):
        if getattr(args, flag) is not None:
            raise SpecError(f"--{flag.replace('_', '-')} is for language models; {args.bundle} is none")
    if peek_text_bundle(args.bundle):
        from edgeds.cli.textmeasure import run_text_eval

        return run_text_eval(args)
    if args.min_value is not None:
        raise SpecError("--min-value is for text models; the limit of a detector is --min-map")
    with open_detector(args) as pipeline:
        dataset = open_detection_dataset(args.data, split=args.split, names=pipeline.names or None, limit=args.limit)
        report = evaluate_detector(pipeline, dataset, quiet=args.quiet)
        engine = pipeline.session.engine
        report |= {
            "data": str(args.data),
            "split": dataset.split,
            "sizes": [str(bucket) for bucket in pipeline.setup.buckets],
            "precision": engine.precision,
            "backend": engine.backend,
            "fallback_reason": engine.fallback_reason,
        }
    if args.json:
        emit_json(report)
    else:
        emit_text(table(report))
    if args.min_map is not None and report["value"] < args.min_map:
        print(f"edgeds eval: mAP50-95 {report['value']:.4f} is below --min-map {args.min_map}", file=sys.stderr)
        return 1
    return 0


def table(report: dict[str, object]) -> str:
    """Figures for people, the weakest classes last."""
    per_class = report["per_class"]
    rows = sorted(per_class.items(), key=lambda row: -row[1]) if isinstance(per_class, dict) else []
    width = max([len(name) for name, _ in rows] + [10])
    lines = [f"{key:<{width}}  {report[key]:.4f}" for key in ("map50_95", "map50", "map75")]
    lines += [f"{key:<{width}}  {report[key]}" for key in ("images", "objects", "seconds")]
    lines += ["", f"{'class':<{width}}  map50_95", *(f"{name:<{width}}  {value:.4f}" for name, value in rows)]
    return "\n".join(lines)
