"""What ``embed``, ``classify``, ``tag`` and ``answer`` share: options, reading texts, opening the bundle."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from edgeds.cli.options import add_trust, given_path
from edgeds.errors import InputError, SpecError
from edgeds.files import open_regular, parse_json

if TYPE_CHECKING:
    from edgeds.bundle import Manifest
    from edgeds.pipelines.bert import BertPipeline

MAX_LINE_BYTES = 64 << 20
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


def add_text_arguments(parser: argparse.ArgumentParser, *, what: str) -> None:
    """The bundle, the texts, and how to run it. ``what`` names one item of the input file's JSON lines."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle folder or zip of a text model")
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="texts")
    parser.add_argument(
        "--input",
        type=given_path,
        metavar="FILE",
        help=f"one text per line, or .jsonl with {what}; - reads standard input",
    )
    parser.add_argument("--backend", default="auto", help="auto, onnxruntime (cpu) or tensorrt (default %(default)s)")
    parser.add_argument("--precision", choices=("auto", "float", "int8"), default="auto", help="model of the bundle")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the physical cores)")
    parser.add_argument(
        "--on-long",
        choices=("truncate", "window", "error"),
        default="truncate",
        help="texts longer than the model takes: cut, covered by overlapping windows, or refused (default %(default)s)",
    )
    parser.add_argument("--stride", type=int, metavar="N", help="tokens that windows share (default: a quarter)")
    parser.add_argument("--replace-invalid", action="store_true", help="put U+FFFD for bytes that are not UTF-8")
    parser.add_argument("--json", action="store_true", help="JSON lines, which is what is printed anyway")
    add_trust(parser)


def open_text(args: argparse.Namespace, *, task: str) -> BertPipeline:
    """The pipeline of the bundle. Raises SpecError when it is not of ``task``."""
    from edgeds.pipelines.bert import BertPipeline

    pipeline = BertPipeline.from_bundle(
        args.bundle,
        backend=args.backend,
        precision=args.precision,
        threads=args.threads,
        on_long=args.on_long,
        stride=args.stride,
    )
    if pipeline.task != task:
        pipeline.close()
        raise SpecError(f"{args.bundle}: its task is {pipeline.task!r}; run it with: edgeds {pipeline.task}")
    return pipeline


def check_source(args: argparse.Namespace) -> None:
    """Raise SpecError unless there are texts from exactly one place, before a model is loaded."""
    if args.texts and args.input is not None:
        raise SpecError("give texts or --input FILE, not both")
    if not args.texts and args.input is None:
        raise SpecError("no text given; write it after the bundle, or give --input FILE (- for standard input)")
    if args.input is not None and str(args.input) != "-" and not args.input.exists():
        raise SpecError(f"{args.input}: no such file; --input takes one text per line")


def read_items(args: argparse.Namespace, *, keys: tuple[str, ...]) -> Iterator[Any]:
    """The texts in order, read as they are needed; JSON lines give a tuple where ``keys`` are several.

    Raises InputError naming file and line.
    """
    if args.input is None:
        yield from args.texts
        return
    is_json = args.input.suffix.lower() in JSON_SUFFIXES
    for number, line in _lines(args.input):
        where = f"{args.input}: line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise InputError(f"{where}: longer than {MAX_LINE_BYTES >> 20} MiB; is it a text file?")
        if is_json and not line.strip():
            continue
        yield _parse(line, keys, where=where) if is_json else _decode(line, args, where=where)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if str(path) == "-":
        yield from _read_lines(sys.stdin.buffer)
        return
    try:
        stream = open_regular(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    with stream:
        yield from _read_lines(stream)


def _read_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 2):
        number += 1
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _decode(line: bytes, args: argparse.Namespace, *, where: str) -> str:
    try:
        return line.decode("utf-8", errors="replace" if args.replace_invalid else "strict")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: is not UTF-8 (byte {error.start}); convert it, or add --replace-invalid") from error


def _parse(line: bytes, keys: tuple[str, ...], *, where: str) -> Any:
    try:
        data = parse_json(line, where=where)
    except SpecError as error:
        raise InputError(str(error)) from error
    if isinstance(data, str) and len(keys) == 1:
        return data
    values = [data.get(key) if isinstance(data, dict) else None for key in keys]
    if not all(isinstance(value, str) for value in values):
        raise InputError(f"{where}: expected an object with the text{'s' if len(keys) > 1 else ''} {', '.join(keys)}")
    return values[0] if len(values) == 1 else tuple(values)


def is_text_bundle(manifest: Manifest) -> bool:
    """Whether a bundle is run by these verbs: a text task, and a tokenizer (a YOLO also classifies)."""
    from edgeds.pipelines.bert.head import TEXT_TASKS
    from edgeds.pipelines.bert.opening import TOKENIZER_FOLDER

    return manifest.task in TEXT_TASKS and any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in manifest.files)


def peek_text_bundle(path: Path) -> bool:
    """``is_text_bundle`` of a folder or zip without checking its files; False for what is no bundle."""
    manifest = peek(path)
    return manifest is not None and is_text_bundle(manifest)


def peek(path: Path) -> Manifest | None:
    """The manifest of a folder or zip without checking its files; None for what is no bundle."""
    from edgeds.bundle.archive import peek_manifest
    from edgeds.bundle.manifest import MANIFEST_NAME, read_manifest

    if path.is_dir() and (path / MANIFEST_NAME).is_file():
        return read_manifest(path)
    return peek_manifest(path)[0] if path.is_file() and path.suffix.lower() == ".zip" else None
