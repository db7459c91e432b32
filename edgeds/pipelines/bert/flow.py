"""How items move through a text pipeline: windows of bounded size, and futures of several parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from edgeds.errors import InputError
from edgeds.pipelines.bert.tasks import Item
from edgeds.runtime.jobs import attempt

LOOKAHEAD = 512
"""Texts that are tokenized and sorted together; two such windows are held at a time."""
LOOKAHEAD_CHARS = 1 << 20
"""A window also ends at this many characters, so that very long texts do not pile up."""


def list_items(items: Any) -> Iterable[Any]:
    """A single text or pair as a list of one."""
    if isinstance(items, str | bytes | tuple):
        return [items]
    if not isinstance(items, Iterable):
        raise InputError(f"texts: expected a text or several of them, got {type(items).__name__}")
    return items


def cut_windows(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Runs of items, each of at most ``LOOKAHEAD``, and of one item more than fit in ``LOOKAHEAD_CHARS``."""
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += sum(map(len, item)) if isinstance(item, tuple) else len(item) if isinstance(item, str | bytes) else 0
        if len(chunk) >= LOOKAHEAD or size >= LOOKAHEAD_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def when_all(parts: Sequence[Future[Any]], join: Callable[[], Any]) -> Future[Any]:
    """A future of ``join()`` once every part is done, or of what failed; cancelling it cancels the parts."""
    future: Future[Any] = Future()
    left = [len(parts)]
    lock = threading.Lock()

    def on_done(_: Future[Any]) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        if not future.set_running_or_notify_cancel():
            return
        value = attempt(join)
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    future.add_done_callback(lambda done: [part.cancel() for part in parts] if done.cancelled() else None)
    for part in parts:
        part.add_done_callback(on_done)
    return future
