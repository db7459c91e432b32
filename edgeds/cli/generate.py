"""``edgeds generate``: text after prompts, printed as it comes; several prompts are run together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.cli.llm import (
    add_model_arguments,
    add_sampling_arguments,
    completion_json,
    open_pipeline,
    sampling_options,
    start,
)
from edgeds.cli.options import add_trust, given_path
from edgeds.cli.output import emit_line, emit_text
from edgeds.errors import InputError, SpecError
from edgeds.files import read_regular

if TYPE_CHECKING:
    from edgeds.pipelines.llm.options import SamplingOptions
    from edgeds.pipelines.llm.pipeline import LlmPipeline, Prompt
    from edgeds.pipelines.llm.stream import Stream

SUMMARY = "Write text after prompts with a language-model bundle."

EXAMPLES = """\
examples:
  edgeds generate smollm.bundle --prompt "The capital of France is" --max-tokens 16
  edgeds generate smollm.bundle --chat --prompt "Name three rivers." --temperature 0.7 --seed 1
  edgeds generate smollm.bundle --input prompts.txt --json     one prompt per line, one JSON line per answer
  edgeds generate smollm.bundle --prompt "A person:" --json-schema person.json
  cat article.txt | edgeds generate smollm.bundle --input - --whole --speculate lookup
"""

IN_FLIGHT = 64
"""Prompts of a file that are with the scheduler at a time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="prompt; repeatable")
    parser.add_argument(
        "--input", type=given_path, metavar="FILE", help="file with a prompt per line; - reads standard input"
    )
    parser.add_argument("--whole", action="store_true", help="--input is one prompt, not one per line")
    parser.add_argument("--chat", action="store_true", help="put prompts into the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message (with --chat)")
    parser.add_argument("--json", action="store_true", help="print one JSON line per prompt, in their order")
    add_sampling_arguments(parser)
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; the first error of a request ends the run."""
    if bool(args.prompt) == (args.input is not None):
        raise SpecError("give prompts with --prompt TEXT, or --input FILE (- for standard input), one of them")
    if args.system is not None and not args.chat:
        raise SpecError("--system is a message of a conversation; add --chat")
    options = sampling_options(args)
    with open_pipeline(args) as pipeline:
        prompts = (_prompt(text, args) for text in (args.prompt or read_prompts(args.input, whole=args.whole)))
        many = (args.input is not None and not args.whole) or len(args.prompt) > 1
        for index, stream in enumerate(_started(pipeline, prompts, options, args)):
            if args.json:
                emit_line({"index": index, **completion_json(stream.result(), pipeline)})
                continue
            if many and index:
                emit_text("")
            for delta in stream:
                emit_text(delta.text, end="")
            emit_text("")
    return 0


def _prompt(text: str, args: argparse.Namespace) -> Prompt:
    if not args.chat:
        return text
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return [*system, {"role": "user", "content": text}]


def _started(
    pipeline: LlmPipeline, prompts: Iterator[Prompt], options: SamplingOptions, args: argparse.Namespace
) -> Iterator[Stream]:
    """The streams in order; those that follow are already being computed."""
    streams: list[Stream] = []
    try:
        for prompt in prompts:
            streams.append(start(pipeline, prompt, options, args))
            if len(streams) >= IN_FLIGHT:
                yield streams.pop(0)
        while streams:
            yield streams.pop(0)
    finally:
        for stream in streams:
            stream.cancel()


def read_prompts(path: Path, *, whole: bool) -> list[str]:
    """The lines of a file that are not empty, or all of it. Raises InputError."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else read_regular(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8 text") from error
    prompts = [text] if whole else [line for line in text.splitlines() if line.strip()]
    if not any(prompt.strip() for prompt in prompts):
        raise InputError(f"{path}: holds no prompt")
    return prompts
