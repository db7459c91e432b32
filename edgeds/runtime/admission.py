"""Who may enter the queue: back-pressure by policy, waiting callers served in turn. Called under the worker's lock."""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Callable

from edgeds.errors import DeadlineExceeded, InputError, QueueFull, SessionClosed
from edgeds.runtime.batcher import Batcher
from edgeds.runtime.jobs import Counters, Job

LONGEST_WAIT_S = 3600.0
CLOSED_TEXT = "the session is closed; open a new one"


class Admission:
    """Finds room in the batcher for all pieces of a job at once, or says why there is none.

    Callers that wait (``on_full='block'``) enter in order of arrival, a priority level counting as in the batcher, so
    that a request of many pieces is not passed by single ones for ever.
    """

    def __init__(
        self, batcher: Batcher, *, counters: Counters, lock: threading.RLock, clock: Callable[[], float]
    ) -> None:
        self._batcher = batcher
        self._policy = batcher.policy
        self._counters = counters
        self._clock = clock
        self._space = threading.Condition(lock)
        self._tickets: list[tuple[float, int]] = []
        self._sequence = itertools.count()

    def wake(self) -> None:
        """Entries have left the queue, or the session closes: let waiting callers look again."""
        if self._tickets:
            self._space.notify_all()

    def admit(self, job: Job, count: int, *, closing: Callable[[], bool], may_wait: bool) -> list[Job]:
        """Return once ``count`` entries fit; the jobs dropped for it are the caller's to fail.

        ``may_wait`` is False on the owner thread, which would wait for itself. Raises SessionClosed, QueueFull,
        DeadlineExceeded, and InputError for more pieces than the queue can ever hold.
        """
        limit = self._policy.max_queue
        if count > limit:
            raise InputError(f"the request is split in {count} batches, more than max_queue ({limit}) holds")
        if closing():
            raise SessionClosed(CLOSED_TEXT)
        if self._batcher.has_room(count) and not (self._tickets and may_wait):
            return []
        if self._policy.on_full == "drop_oldest":
            return self._drop(job, count)
        if self._policy.on_full == "block" and may_wait:
            self._wait(job, count, closing)
            return []
        self._counters.rejected += 1
        where = "; a future's callback cannot wait for room" if self._policy.on_full == "block" else ""
        raise QueueFull(
            f"the queue is full: {len(self._batcher)} requests wait and max_queue is {limit}{where}; "
            "send fewer, or set on_full to 'block' or 'drop_oldest'"
        )

    def remove(self, job: Job) -> None:
        """Take the waiting pieces of a job out of the queue."""
        for entry in self._batcher.waiting(job.key):
            if entry.payload.job is job:
                self._batcher.remove(entry)

    def _drop(self, job: Job, count: int) -> list[Job]:
        missing = count - (self._policy.max_queue - len(self._batcher))
        if self._batcher.count_up_to(job.priority) < missing:  # looked at first: nobody is dropped in vain
            self._counters.rejected += 1
            raise QueueFull(
                f"the queue is full: {len(self._batcher)} requests wait, max_queue is {self._policy.max_queue}, and "
                f"too few of them have a priority of {job.priority} or lower to make room for {count}"
            )
        dropped: list[Job] = []
        while not self._batcher.has_room(count):
            victim = self._batcher.make_room(priority=job.priority).payload.job
            self.remove(victim)
            self._counters.dropped += 1
            dropped.append(victim)
        return dropped

    def _wait(self, job: Job, count: int, closing: Callable[[], bool]) -> None:
        ticket = (job.submitted_s - job.priority * self._policy.aging_ms / 1000, next(self._sequence))
        bisect.insort(self._tickets, ticket)
        try:
            while self._tickets[0] != ticket or not self._batcher.has_room(count):
                left_s = job.deadline_s - self._clock()
                if left_s <= 0:
                    self._counters.expired += 1
                    raise DeadlineExceeded("the request's deadline passed while the queue was full")
                self._space.wait(min(left_s, LONGEST_WAIT_S) if left_s < math.inf else LONGEST_WAIT_S)
                if closing():
                    raise SessionClosed(CLOSED_TEXT)
        finally:
            self._tickets.remove(ticket)
            self._space.notify_all()  # the next in turn may fit
