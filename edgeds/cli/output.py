"""What goes to stdout. With ``--json`` that is JSON and nothing else, whatever a library prints."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from edgeds.errors import EdgedsError

_reserved: TextIO | None = None


def emit_json(data: Any) -> None:
    """Print one JSON document, indented. Raises ValueError for NaN and infinity, which JSON does not have."""
    _emit(json.dumps(_plain(data), indent=2, allow_nan=False))


def emit_line(data: Any) -> None:
    """Print one line of JSON and flush, so that a pipe sees it at once."""
    _emit(json.dumps(_plain(data), allow_nan=False))


def emit_text(text: str, *, end: str = "\n") -> None:
    """Print text for people (or a path alone) to stdout."""
    _emit(text, end=end)


def _plain(data: Any) -> Any:
    from edgeds.specs import to_json  # brings numpy, during whose import Ctrl-C could not be caught by main

    return to_json(data)


class StdoutError(EdgedsError):
    """What was printed cannot be written: the disk behind a redirection is full, for one."""


def flush_stdout() -> None:
    """Write what is buffered. Raises StdoutError, or BrokenPipeError when the reader went away."""
    with _stdout_errors():
        sys.stdout.flush()


def _emit(text: str, *, end: str = "\n") -> None:
    with _stdout_errors():
        print(text, end=end, file=_reserved or sys.stdout, flush=True)


@contextlib.contextmanager
def _stdout_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutError(f"stdout cannot be written: {error.strerror or error}; the output is incomplete") from error


@contextlib.contextmanager
def reserve_stdout() -> Iterator[None]:
    """While active only the functions above reach stdout; every other print goes to stderr."""
    global _reserved
    _reserved = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _reserved = None
