"""Who may use which lane: lent one at a time, made when needed, all of them at once for changes and for closing."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from edgeds.engines.trt_lane import Lane
from edgeds.errors import OutOfMemory, SessionClosed

LOGGER = logging.getLogger("edgeds.tensorrt")


class LanePool:
    """Lends lanes, last used first, so that a single caller always meets the same warm one."""

    def __init__(self, make: Callable[[], Lane], *, limit: int, closed_text: str) -> None:
        self._make = make
        self._limit = limit
        self._closed_text = closed_text
        self._changed = threading.Condition(threading.Lock())
        self._idle: list[Lane] = [make()]
        self._count = 1
        self._reserved = False
        self._closed = False

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes that are idle now."""
        with self._changed:
            return tuple(self._idle)

    @property
    def count(self) -> int:
        return self._count

    def borrow(self) -> Lane:
        """A lane for the caller alone; waits while none is free. Raises SessionClosed."""
        while True:
            with self._changed:
                while True:
                    if self._closed:
                        raise SessionClosed(self._closed_text)
                    if not self._reserved:
                        if self._idle:
                            return self._idle.pop()
                        if self._count < self._limit:
                            self._count += 1
                            break
                    self._changed.wait()
            lane = self._make_another()
            if lane is not None:
                return lane

    def give_back(self, lane: Lane) -> None:
        with self._changed:
            self._idle.append(lane)
            self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[tuple[Lane, ...]]:
        """All lanes, once their calls are done; new calls wait. Raises SessionClosed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._reserved)
            if self._closed:
                raise SessionClosed(self._closed_text)
            self._reserved = True
            self._changed.wait_for(lambda: len(self._idle) == self._count)
        try:
            yield tuple(self._idle)
        finally:
            with self._changed:
                self._reserved = False
                self._changed.notify_all()

    def close(self) -> None:
        """Refuse new calls, wait for those under way, free all lanes. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._reserved and len(self._idle) == self._count)
            lanes, self._idle, self._count = self._idle, [], 0
        for lane in lanes:
            lane.close()

    def refuse_new(self) -> None:
        """Let calls fail from now on; those under way go on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _make_another(self) -> Lane | None:
        """One more lane, or None when memory allows no more; the caller waits for one of the others then."""
        made: Lane | None = None
        try:
            made = self._make()
        except OutOfMemory as error:
            LOGGER.warning("no memory for lane %d, going on with %d: %s", self._count, self._count - 1, error)
            self._limit = self._count - 1  # at least 1: the first lane was made before anybody could borrow
        finally:
            if made is None:
                with self._changed:
                    self._count -= 1
                    self._changed.notify_all()
        return made
