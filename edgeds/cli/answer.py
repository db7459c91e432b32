"""``edgeds answer``: answers to questions from a context, as JSON lines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from edgeds.cli.options import given_path
from edgeds.cli.output import emit_line
from edgeds.cli.text import add_text_arguments, check_source, open_text, read_items
from edgeds.errors import InputError, SpecError
from edgeds.files import read_regular
from edgeds.pipelines.bert.encode import check_text
from edgeds.progress import track

SUMMARY = "Answer questions with a part of their context: one JSON line per question, in their order."

EXAMPLES = """\
examples:
  edgeds answer qa.bundle "Where is Acme?" --context "Acme Corp has its seat in Paris."
  edgeds answer qa.bundle "Who wrote it?" "When?" --context-file book.txt --n-best 3
  edgeds answer qa.bundle --input questions.jsonl             {"question": ..., "context": ...} per line
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser, what='{"question": ..., "context": ...}')
    parser.add_argument("--context", metavar="TEXT", help="text that holds the answers, of any length")
    parser.add_argument("--context-file", type=given_path, metavar="FILE", help="the same from a file")
    parser.add_argument("--n-best", type=int, default=1, metavar="N", help="answers per question (default 1)")
    parser.add_argument("--must-answer", action="store_true", help="never say that the context holds no answer")
    parser.add_argument(
        "--max-answer-tokens", type=int, default=30, metavar="N", help="longest answer (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0."""
    check_source(args)
    given = [value for value in (args.context, args.context_file) if value is not None]
    if args.input is None and len(given) != 1:
        raise SpecError("questions need one context: give --context TEXT or --context-file FILE")
    if args.input is not None and given:
        raise SpecError("--input holds the contexts; leave --context and --context-file out")
    for name, value in (("--n-best", args.n_best), ("--max-answer-tokens", args.max_answer_tokens)):
        if value < 1:
            raise SpecError(f"{name} {value}: need at least 1")
    pairs = _pairs(args)
    with open_text(args, task="answer") as pipeline:
        found = pipeline.answer_each(
            pairs, n_best=args.n_best, no_answer=not args.must_answer, max_answer_tokens=args.max_answer_tokens
        )
        total = len(args.texts) or None
        for index, answers in enumerate(track(found, what="answering", total=total, unit="text", quiet=args.quiet)):
            best = answers[0]
            emit_line({"index": index, "answer": best.text or None, "score": best.score, "answers": answers})
    return 0


def _pairs(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if args.input is not None:
        return read_items(args, keys=("question", "context"))
    context = args.context if args.context_file is None else _read(args)
    return iter([(question, context) for question in args.texts])


def _read(args: argparse.Namespace) -> str:
    try:
        data = read_regular(args.context_file)
    except OSError as error:
        raise InputError(f"{args.context_file}: cannot be read: {error.strerror or error}") from error
    if args.replace_invalid:
        return data.decode("utf-8", errors="replace")
    return check_text(data, where=str(args.context_file))
