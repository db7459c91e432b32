"""Progress on stderr for everything that takes longer than about two seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(
    items: Iterable[T], *, what: str, total: int | None = None, unit: str = "it", quiet: bool = False
) -> Iterator[T]:
    """Iterate with a progress bar that appears after one second. Off a terminal it prints a line every ten seconds."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    return iter(
        tqdm(
            items,
            desc=what,
            total=total,
            unit=unit,
            disable=quiet,
            delay=1.0,
            leave=False,
            dynamic_ncols=terminal,
            mininterval=0.2 if terminal else 10.0,
            file=sys.stderr,
        )
    )
