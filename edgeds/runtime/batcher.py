"""Which requests run together, and when: a pure state machine without threads, time passed in.

One queue per key (input shape), so a batch never mixes shapes. A queue is due when it fills a batch, when its oldest
request has waited ``max_delay_ms``, or when waiting longer would miss a deadline by the latency table. Priorities age:
a request counts as having arrived ``aging_ms`` earlier per priority level. So a request can only be overtaken by one
of d levels more if that one arrives within d x aging_ms of it: nothing starves, and equal priorities stay first in,
first out. Between keys the one that has waited longest since its arrival or its last turn goes first, so a backlog of
one shape cannot hold back a rare one.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from edgeds.errors import QueueFull, SpecError
from edgeds.runtime.latency import LatencyTable

OnFull = Literal["reject", "drop_oldest", "block"]
ON_FULL = ("reject", "drop_oldest", "block")
MAX_PRIORITY = 1000


@dataclass(frozen=True, kw_only=True)
class BatchPolicy:
    """How requests are grouped and what happens under overload.

    ``max_batch``: rows in one run. ``max_delay_ms``: longest wait for company. ``max_queue``: requests waiting (a
    split request counts once per piece). ``aging_ms``: how much earlier one priority level makes a request.
    ``preferred_batch``: sizes the engine runs best at, tried before the plain limit. ``min_free_memory_share``: below
    this share of available system memory, batches go down to one row; 0 switches it off.
    """

    max_batch: int = 8
    max_delay_ms: float = 10.0
    max_queue: int = 256
    on_full: OnFull = "reject"
    aging_ms: float = 1000.0
    preferred_batch: tuple[int, ...] = ()
    min_free_memory_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"{name}: expected a whole number >= 1, got {value!r}")
        if not (is_number(self.max_delay_ms) and 0 <= self.max_delay_ms < math.inf):
            raise SpecError(f"max_delay_ms: expected a finite number >= 0, got {self.max_delay_ms!r}")
        if not (is_number(self.aging_ms) and 0 < self.aging_ms < math.inf):
            raise SpecError(f"aging_ms: expected a finite number above 0, got {self.aging_ms!r}")
        if self.on_full not in ON_FULL:
            raise SpecError(f"on_full: expected one of {', '.join(ON_FULL)}, got {self.on_full!r}")
        for size in self.preferred_batch:
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= self.max_batch:
                raise SpecError(f"preferred_batch: expected sizes from 1 to max_batch ({self.max_batch}), got {size!r}")
        if not (is_number(self.min_free_memory_share) and 0 <= self.min_free_memory_share < 1):
            raise SpecError(f"min_free_memory_share: expected 0 up to below 1, got {self.min_free_memory_share!r}")


@dataclass(eq=False, slots=True)
class Entry:
    """One waiting piece of work. ``deadline_s`` is absolute on the batcher's clock; ``payload`` is the owner's."""

    key: str
    rows: int
    arrival_s: float
    priority: int = 0
    deadline_s: float = math.inf
    payload: Any = None
    order: tuple[float, int] = field(default=(0.0, 0), repr=False)


class Batcher:
    """Holds waiting entries; the owner asks ``take`` for the next batch and ``next_wakeup`` for when to ask again.

    Not thread-safe: the owner holds a lock. All times are seconds of one monotonic clock.
    """

    def __init__(self, policy: BatchPolicy, *, latency: LatencyTable | None = None) -> None:
        self.policy = policy
        self.latency = latency if latency is not None else LatencyTable()
        self._queues: dict[str, list[Entry]] = {}
        # When the last turn of a waiting key ended, which shows at the next call of take.
        self._turns: dict[str, float] = {}
        self._running: str | None = None
        self._count = 0
        self._sequence = 0
        self._deadlines = 0

    def __len__(self) -> int:
        return self._count

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys with waiting entries."""
        return tuple(self._queues)

    def waiting(self, key: str) -> tuple[Entry, ...]:
        """Entries of one key in order of service."""
        return tuple(self._queues.get(key, ()))

    def has_room(self, count: int = 1) -> bool:
        return self._count + count <= self.policy.max_queue

    def count_up_to(self, priority: int) -> int:
        """How many waiting entries have this priority or a lower one."""
        return sum(entry.priority <= priority for entry in self._all())

    def add(self, entry: Entry) -> None:
        """Queue an entry. Raises QueueFull when there is no room (``make_room`` first to drop others)."""
        if not 1 <= entry.rows <= self.policy.max_batch:
            raise SpecError(f"entry of {entry.rows} rows: expected 1 to max_batch ({self.policy.max_batch})")
        if not self.has_room():
            raise QueueFull(self._full_text())
        self._sequence += 1
        entry.order = (entry.arrival_s - entry.priority * self.policy.aging_ms / 1000, self._sequence)
        bisect.insort(self._queues.setdefault(entry.key, []), entry, key=_order)
        self._count += 1
        self._deadlines += entry.deadline_s != math.inf

    def make_room(self, *, priority: int) -> Entry:
        """Remove and return the entry to drop for a new one: lowest priority first, then the oldest.

        Raises QueueFull when every waiting entry has a higher priority than the new one.
        """
        victim = min(self._all(), key=lambda entry: (entry.priority, entry.arrival_s, entry.order[1]), default=None)
        if victim is None or victim.priority > priority:
            raise QueueFull(f"{self._full_text()}; all of them have a priority above {priority}")
        self.remove(victim)
        return victim

    def remove(self, entry: Entry) -> bool:
        """Take one entry out (cancelled, or its request failed); False when it is not waiting any more."""
        queue = self._queues.get(entry.key, [])
        at = bisect.bisect_left(queue, entry.order, key=_order)
        if at >= len(queue) or queue[at] is not entry:
            return False
        del queue[at]
        self._forget(entry.key, [entry])
        return True

    def expire(self, now: float) -> list[Entry]:
        """Remove and return the entries whose deadline has passed; they are never computed."""
        if not self._deadlines:
            return []
        expired = [entry for entry in self._all() if entry.deadline_s <= now]
        for entry in expired:
            self.remove(entry)
        return expired

    def drain(self) -> list[Entry]:
        """Remove and return everything, in order of service."""
        entries = sorted(self._all(), key=_order)
        self._queues.clear()
        self._turns.clear()
        self._count = self._deadlines = 0
        return entries

    def take(self, now: float, *, flush: bool = False, limit: int | None = None) -> list[Entry]:
        """Remove and return the next batch (one key, in order), or an empty list when nothing is due yet.

        ``flush`` makes every queue due. ``limit`` lowers the rows of this batch; the first entry always goes, whole.
        """
        most = min(limit or self.policy.max_batch, self.policy.max_batch)
        if self._running in self._queues:
            self._turns[self._running] = now
        self._running = None
        due = [key for key in self._queues if flush or self._due_at(key, most) <= now]
        if not due:
            return []
        key = self._most_urgent(due, now, most)
        queue = self._queues[key]
        count = self._cut(queue, now, most, flush=flush)
        batch = queue[:count]
        del queue[:count]
        self._running = key
        self._forget(key, batch)
        return batch

    def next_wakeup(self, now: float, *, limit: int | None = None) -> float | None:
        """When ``take`` or ``expire`` will next have something (at least ``now``); None while nothing waits."""
        if not self._queues:
            return None
        most = min(limit or self.policy.max_batch, self.policy.max_batch)
        due = min(self._due_at(key, most) for key in self._queues)
        if self._deadlines:
            due = min(due, min(entry.deadline_s for entry in self._all()))
        return max(now, due)

    def _all(self) -> Iterator[Entry]:
        for queue in self._queues.values():
            yield from queue

    def _forget(self, key: str, gone: list[Entry]) -> None:
        self._count -= len(gone)
        self._deadlines -= sum(entry.deadline_s != math.inf for entry in gone)
        if not self._queues[key]:
            del self._queues[key]
            self._turns.pop(key, None)

    def _target(self, most: int) -> int:
        return max((size for size in self.policy.preferred_batch if size <= most), default=most)

    def _due_at(self, key: str, most: int) -> float:
        """When this queue should be sent; minus infinity when it already fills a batch."""
        queue = self._queues[key]
        count, rows = _prefix(queue, most)
        if rows >= self._target(most) or count < len(queue):
            return -math.inf
        oldest = min(entry.arrival_s for entry in queue) + self.policy.max_delay_ms / 1000
        return min(oldest, self._latest_start(queue, most))

    def _latest_start(self, queue: list[Entry], most: int) -> float:
        """Latest time at which the queue's next batch can start and still meet its deadlines.

        A shape never measured starts at once when it has a deadline: no time can be spared on a guess.
        """
        deadline = min(entry.deadline_s for entry in queue) if self._deadlines else math.inf
        if deadline == math.inf:
            return math.inf
        expected_ms = self.latency.estimate(queue[0].key, _prefix(queue, most)[1])
        return -math.inf if expected_ms is None else deadline - expected_ms / 1000

    def _most_urgent(self, due: list[str], now: float, most: int) -> str:
        """The due queue whose turn it is, unless running it first makes another one late.

        A deadline overtakes only at the same or a higher priority, and only a head that has not aged yet.
        """
        best = min(due, key=self._turn)
        head = self._queues[best][0]
        patience_s = (self.policy.max_delay_ms + self.policy.aging_ms) / 1000
        if len(due) == 1 or now - head.arrival_s > patience_s or self._latest_start([head], most) != math.inf:
            return best
        cost_s = (self.latency.estimate(best, _prefix(self._queues[best], most)[1]) or 0.0) / 1000
        late = [
            (self._latest_start(self._queues[key], most), key)
            for key in due
            if key != best and self._queues[key][0].priority >= head.priority
        ]
        late = [item for item in late if item[0] < now + cost_s]
        return min(late)[1] if late else best

    def _turn(self, key: str) -> tuple[float, int]:
        """Since when the key waits for a turn, earlier by its head's priority."""
        head = self._queues[key][0]
        since_s = max(head.arrival_s, self._turns.get(key, -math.inf))
        return since_s - head.priority * self.policy.aging_ms / 1000, head.order[1]

    def _cut(self, queue: list[Entry], now: float, most: int, *, flush: bool) -> int:
        """How many entries go: up to the preferred size, or all that fit when the rest has waited long enough."""
        count, rows = _prefix(queue, most)
        sizes = [size for size in self.policy.preferred_batch if size <= min(rows, most)]
        if not sizes or flush:
            return count
        fewer, _ = _prefix(queue, max(sizes))
        limit_s = self.policy.max_delay_ms / 1000
        waits = any(now - entry.arrival_s >= limit_s or entry.deadline_s < math.inf for entry in queue[fewer:count])
        return count if waits else fewer

    def _full_text(self) -> str:
        return f"the queue is full: {self._count} requests wait and max_queue is {self.policy.max_queue}"


def _order(entry: Entry) -> tuple[float, int]:
    return entry.order


def _prefix(queue: list[Entry], most: int) -> tuple[int, int]:
    """Entries and rows of the next batch: as many from the front as fit, at least one. Nobody is skipped."""
    count, rows = 0, 0
    for entry in queue:
        if count and rows + entry.rows > most:
            break
        count += 1
        rows += entry.rows
    return count, rows


def is_number(value: object) -> bool:
    """A real number, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
