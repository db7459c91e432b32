"""``edgeds embed``: vectors of texts, as JSON lines or one .npy file."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.cli.options import given_path
from edgeds.cli.output import emit_line
from edgeds.cli.text import add_text_arguments, check_source, open_text, read_items
from edgeds.errors import SpecError
from edgeds.files import atomic_path
from edgeds.progress import track

SUMMARY = "Turn texts into vectors: one JSON line per text, in their order, or one .npy file."

EXAMPLES = """\
examples:
  edgeds embed minilm.bundle "a man is riding a horse"
  edgeds embed minilm.bundle --input sentences.txt > vectors.jsonl     one text per line
  edgeds embed minilm.bundle --input sentences.txt --out vectors.npy   float32 [texts, hidden]
  edgeds embed minilm.bundle --input books.jsonl --on-long window      whole texts: the mean of their windows
"""

HEADER_BYTES = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser, what='{"text": ...}')
    parser.add_argument("--out", type=given_path, metavar="FILE.npy", help="write float32 [texts, hidden] instead")


def run(args: argparse.Namespace) -> int:
    """Exit code 0."""
    check_source(args)
    if args.out is not None and (args.out.suffix.lower() != ".npy" or args.out.is_dir()):
        raise SpecError(f"--out {args.out}: name a .npy file")
    with open_text(args, task="embed") as pipeline:
        total = len(args.texts) or None
        found = pipeline.embed_each(read_items(args, keys=("text",)))
        rows = track(found, what="embedding", total=total, unit="text", quiet=args.quiet)
        if args.out is None:
            for index, vector in enumerate(rows):
                emit_line({"index": index, "embedding": [float(value) for value in vector]})
            return 0
        texts = write_rows(args.out, rows, width=pipeline.width)
        counts = pipeline.counts
    facts = {"tokens": counts.tokens, "truncated": counts.truncated}
    emit_line({"out": args.out, "texts": texts, "hidden": pipeline.width, **facts})
    return 0


def write_rows(path: Path, rows: Iterable[Any], *, width: int) -> int:
    """Write float32 rows of ``width`` values as .npy, atomically and without holding them; returns their number.

    The header is written last: format 1.0 of numpy.lib.format, padded to a fixed size.
    """
    count = 0
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        stream.seek(HEADER_BYTES)
        for row in rows:
            stream.write(np.ascontiguousarray(row, "<f4").tobytes())
            count += 1
        facts = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({count}, {width}), }}"
        text = facts.encode().ljust(HEADER_BYTES - 11) + b"\n"
        stream.seek(0)
        stream.write(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    return count
