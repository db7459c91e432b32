"""``edgeds chat``: a conversation in the terminal, or with a program over lines."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from edgeds.cli.llm import (
    add_model_arguments,
    add_sampling_arguments,
    completion_json,
    open_pipeline,
    sampling_options,
    start,
)
from edgeds.cli.options import add_trust
from edgeds.cli.output import emit_line, emit_text
from edgeds.errors import InputError, SpecError

if TYPE_CHECKING:
    from edgeds.pipelines.llm.options import SamplingOptions
    from edgeds.pipelines.llm.pipeline import LlmPipeline
    from edgeds.pipelines.llm.stream import Completion

SUMMARY = "Talk to a language-model bundle: one line a message, answers as they come."

EXAMPLES = """\
examples:
  edgeds chat smollm.bundle
  edgeds chat smollm.bundle --system "Answer in one sentence." --temperature 0.7
  echo "Name three rivers." | edgeds chat smollm.bundle          one answer per line of standard input
  cat questions.txt | edgeds chat smollm.bundle --json           one JSON line per answer

in the conversation: /reset forgets it, /undo takes the last message back, /exit ends (as does Ctrl-D)
Ctrl-C stops the answer, and at the prompt it ends.
"""

COMMANDS = ("/exit", "/quit", "/reset", "/undo", "/help")

Messages = list[dict[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--json", action="store_true", help="print one JSON line per answer")
    add_sampling_arguments(parser)
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 at the end of input."""
    options = sampling_options(args)
    talks = sys.stdin is not None and sys.stdin.isatty() and not args.json
    with open_pipeline(args) as pipeline:
        if not pipeline.text.has_chat_template:
            raise SpecError(f"{args.bundle}: the model has no chat template; use edgeds generate")
        begin: Messages = [{"role": "system", "content": args.system}] if args.system is not None else []
        messages = list(begin)
        if talks:
            emit_text("/reset /undo /exit; Ctrl-C stops an answer")
        for line in _Terminal("> " if talks else ""):
            if line.strip() in COMMANDS:
                if line.strip() in ("/exit", "/quit"):
                    break
                messages = _obey(line.strip(), messages, begin=begin)
                continue
            if line.strip():
                _turn(line, messages, args, pipeline, options=options, goes_on=talks)
    return 0


class _Terminal:
    """Lines of standard input, each after ``prompt``; over at its end."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    def __iter__(self) -> _Terminal:
        return self

    def __next__(self) -> str:
        if self._prompt:
            emit_text(self._prompt, end="")
        try:
            line = sys.stdin.readline() if sys.stdin is not None else ""
            line.encode()  # bytes that are no text come as halves of surrogate pairs
        except UnicodeError as error:
            raise InputError("standard input: the line is not UTF-8 text") from error
        if not line:
            if self._prompt:
                emit_text("")
            raise StopIteration
        return line.rstrip("\r\n")


def _obey(command: str, messages: Messages, *, begin: Messages) -> Messages:
    if command == "/reset":
        return list(begin)
    if command == "/undo":
        return messages[:-2] if len(messages) >= len(begin) + 2 else messages
    emit_text(EXAMPLES.partition("in the conversation: ")[2].rstrip())
    return messages


def _turn(
    line: str,
    messages: Messages,
    args: argparse.Namespace,
    pipeline: LlmPipeline,
    *,
    options: SamplingOptions,
    goes_on: bool,
) -> None:
    """Ask and answer; a mistake in a conversation at a terminal is said, and the conversation goes on."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        found = _answer(asked, args, pipeline, options=options, goes_on=goes_on)
    except (InputError, SpecError) as error:
        if not goes_on:
            raise
        emit_text(f"{error}; /reset starts over" if len(messages) > 1 else str(error))
        return
    messages[:] = [*asked, {"role": "assistant", "content": found.text}]


def _answer(
    asked: Messages, args: argparse.Namespace, pipeline: LlmPipeline, *, options: SamplingOptions, goes_on: bool
) -> Completion:
    stream = start(pipeline, asked, options, args)
    try:
        if not args.json:
            for delta in stream:
                emit_text(delta.text, end="")
            emit_text("")
        found = stream.result()
    except KeyboardInterrupt:
        stream.cancel()
        if not goes_on:
            raise
        found = stream.result()
        emit_text(" [stopped]")
    if args.json:
        emit_line(completion_json(found, pipeline))
    return found
