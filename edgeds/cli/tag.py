"""``edgeds tag``: entities in texts, as JSON lines."""

from __future__ import annotations

import argparse

from edgeds.cli.output import emit_line
from edgeds.cli.text import add_text_arguments, check_source, open_text, read_items
from edgeds.pipelines.bert.tag import AGGREGATIONS
from edgeds.progress import track

SUMMARY = "Find entities in texts: one JSON line per text, in their order, with characters of the text as given."

EXAMPLES = """\
examples:
  edgeds tag ner.bundle "John Smith works at Acme Corp in Paris"
  edgeds tag ner.bundle --input news.txt --aggregation average --on-long window
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser, what='{"text": ...}')
    parser.add_argument(
        "--aggregation",
        choices=AGGREGATIONS,
        default="first",
        help="which word pieces decide for a word: the first, their average, or the surest (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0."""
    check_source(args)
    with open_text(args, task="tag") as pipeline:
        found = pipeline.tag_each(read_items(args, keys=("text",)), aggregation=args.aggregation)
        total = len(args.texts) or None
        for index, entities in enumerate(track(found, what="tagging", total=total, unit="text", quiet=args.quiet)):
            emit_line({"index": index, "entities": entities})
    return 0
