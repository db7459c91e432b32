"""Progress on stderr for everything that takes longer than about two seconds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def track(
    items: Iterable[T], *, what: str, total: int | None = None, unit: str = "it", quiet: bool = False
) -> Iterator[T]:
    """Iterate with a progress bar that appears after one second. Off a terminal it is redrawn every ten seconds."""
    from tqdm import tqdm

    return iter(tqdm(items, desc=what, total=total, unit=unit, disable=quiet, **_style()))


@contextlib.contextmanager
def byte_bar(*, what: str, total: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar over bytes: yields a function to call with the number of bytes done since the last call."""
    from tqdm import tqdm

    with tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=quiet, **_style()) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance


def _style() -> dict[str, Any]:
    terminal = sys.stderr.isatty()
    return {
        "delay": 1.0,
        "leave": False,
        "dynamic_ncols": terminal,
        "mininterval": 0.2 if terminal else 10.0,
        "file": sys.stderr,
    }
