"""Progress on stderr for everything that takes longer than about two seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

FALLBACK_COLUMNS, FALLBACK_ROWS = 80, 24


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


@contextlib.contextmanager
def stage(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show that one step without countable parts is at work: its name and the time so far, as often as a bar would."""
    done = threading.Event()

    def show() -> None:
        from tqdm import tqdm

        style = _style()
        first_s, every_s = style.pop("delay"), style["mininterval"]
        if not sys.stderr.isatty():
            first_s = every_s  # a log should hold lines about what is slow, not about everything
        if done.wait(first_s):
            return
        with tqdm(desc=what, bar_format="{desc} {elapsed}", **style) as line:
            line.start_t -= first_s
            line.refresh()
            while not done.wait(max(every_s, 0.5)):
                line.refresh()

    if quiet:
        yield
        return
    ticker = threading.Thread(target=show, name="edgeds-progress", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


def _style() -> dict[str, Any]:
    terminal = sys.stderr.isatty()
    has_size = terminal and _columns() > 0
    return {
        "delay": 1.0,
        "leave": False,
        "dynamic_ncols": has_size,
        # A terminal without a size (under expect, in some containers) says 0 x 0; tqdm would then show nothing.
        "ncols": FALLBACK_COLUMNS if terminal and not has_size else None,
        "nrows": FALLBACK_ROWS if terminal and not has_size else None,
        "mininterval": 0.2 if terminal else 10.0,
        "file": sys.stderr,
    }


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0
