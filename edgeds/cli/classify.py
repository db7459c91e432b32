"""``edgeds classify``: labels of texts, as JSON lines."""

from __future__ import annotations

import argparse

from edgeds.cli.output import emit_line
from edgeds.cli.text import add_text_arguments, check_source, open_text, read_items
from edgeds.errors import SpecError
from edgeds.progress import track

SUMMARY = "Classify texts, or pairs of texts: one JSON line each, in their order."

EXAMPLES = """\
examples:
  edgeds classify sentiment.bundle "a charming and often affecting journey"
  edgeds classify sentiment.bundle --input reviews.txt --top-k 3
  edgeds classify nli.bundle --input pairs.jsonl --pairs      {"text": ..., "text_pair": ...} per line
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser, what='{"text": ...}')
    parser.add_argument("--top-k", type=int, default=1, metavar="K", help="labels per text, 0 for all (default 1)")
    parser.add_argument("--pairs", action="store_true", help="the lines of --input.jsonl hold text and text_pair")


def run(args: argparse.Namespace) -> int:
    """Exit code 0."""
    check_source(args)
    if args.top_k < 0:
        raise SpecError(f"--top-k {args.top_k}: give 1 or more, or 0 for all labels")
    if args.pairs and args.input is None:
        raise SpecError("--pairs needs --input FILE.jsonl")
    keys = ("text", "text_pair") if args.pairs else ("text",)
    with open_text(args, task="classify") as pipeline:
        found = pipeline.classify_each(read_items(args, keys=keys), top_k=args.top_k or None)
        total = len(args.texts) or None
        for index, labels in enumerate(track(found, what="classifying", total=total, unit="text", quiet=args.quiet)):
            emit_line({"index": index, "label": labels[0].label, "score": labels[0].score, "labels": labels})
    return 0
