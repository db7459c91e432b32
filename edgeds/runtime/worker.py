"""The owner thread: takes batches from the batcher, runs them on the engine, delivers the answers.

Only this thread touches the engine. Futures are settled outside the lock, since their callbacks run user code.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgeds.engines import Engine
from edgeds.engines.base import Array
from edgeds.errors import DeadlineExceeded, QueueFull, SessionClosed
from edgeds.runtime.admission import CLOSED_TEXT, LONGEST_WAIT_S, Admission
from edgeds.runtime.batcher import Batcher, BatchPolicy, Entry
from edgeds.runtime.jobs import Counters, Job, Piece, attempt
from edgeds.runtime.latency import LatencyTable
from edgeds.runtime.memory import available_memory_share
from edgeds.runtime.rows import BatchAxis, RowJoiner, no_batch_axis, prove_rows, split_rows

T = TypeVar("T")
Task = Callable[[bool], None]
"""Work for the owner thread between batches; the argument says that the session closed before it could be done."""

MEMORY_CHECK_S = 0.25
FORKED_TEXT = (
    "the session was opened by another process, and its thread did not come along in the fork; "
    "open engine and session in the process that uses them"
)


@dataclass(frozen=True, kw_only=True)
class _Work:
    task: Task | None
    expired: Sequence[Entry]
    batch: Sequence[Entry]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One engine run: outputs per entry and times in milliseconds."""

    outputs: list[dict[str, Array]]
    form_ms: float
    compute_ms: float


class Worker:
    """Owns engine, queue and thread; the Session in front of it checks requests."""

    def __init__(
        self,
        engine: Engine,
        *,
        axis: BatchAxis,
        policy: BatchPolicy,
        latency: LatencyTable,
        clock: Callable[[], float],
        meminfo: Path,
    ) -> None:
        self.engine = engine
        self.axis = axis
        self.policy = policy
        self.latency = latency
        self.clock = clock
        self.counters = Counters()
        self.batcher = Batcher(policy, latency=latency)
        self.lock = threading.RLock()
        self._work = threading.Condition(self.lock)
        self._admission = Admission(self.batcher, counters=self.counters, lock=self.lock, clock=clock)
        self._tasks: deque[Task] = deque()
        self._closing = False
        self._ended = False
        self._endings: list[Callable[[], None]] = []
        self._pid = os.getpid()
        self._abort = False
        self._meminfo = meminfo
        self._memory_checked_s: float | None = None
        self._memory_low = False
        self._unproven = axis.unproven
        self._whole = axis.whole
        self._joiner = RowJoiner(fixed=axis.fixed)
        # A daemon thread, so that a forgotten session cannot keep the interpreter from leaving; Session's finalizer
        # stops it in order before the interpreter is torn down.
        self._thread = threading.Thread(target=self._serve, name="edgeds-session", daemon=True)
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the owner thread, as callbacks of futures do; waiting there would never end."""
        return threading.current_thread() is self._thread

    @property
    def whole_outputs(self) -> tuple[str, ...]:
        """Outputs known to have no batch axis."""
        return self._whole

    def row_limit(self) -> int:
        """Most rows of one run right now: 1 while memory is short or rows cannot be told apart."""
        return 1 if self._whole or self._is_memory_low() else self.policy.max_batch

    def enqueue(self, job: Job, pieces: Sequence[tuple[Piece, int]]) -> None:
        """Queue the (piece, rows) of one job, all or none. Raises SessionClosed, QueueFull, DeadlineExceeded."""
        self._refuse_fork()
        dropped: list[Job] = []
        try:
            with self.lock:
                dropped = self._admission.admit(
                    job, len(pieces), closing=lambda: self._closing, may_wait=not self.is_current_thread
                )
                now = self.clock()
                for piece, rows in pieces:
                    self.batcher.add(
                        Entry(
                            key=job.key,
                            rows=rows,
                            arrival_s=now,
                            priority=job.priority,
                            deadline_s=job.deadline_s,
                            payload=piece,
                        )
                    )
                self.counters.submitted += 1
                self._work.notify()
        finally:
            for other in dropped:
                other.fail(QueueFull("dropped for newer requests: the queue was full (on_full='drop_oldest')"))

    def discard(self, job: Job) -> None:
        """Forget the waiting pieces of a job."""
        with self.lock:
            self._admission.remove(job)
            self._admission.wake()

    def count_cancelled(self) -> None:
        with self.lock:
            self.counters.cancelled += 1

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the owner thread, between batches."""
        future: Future[T] = Future()

        def task(closed: bool) -> None:
            if future.set_running_or_notify_cancel():
                value = SessionClosed(CLOSED_TEXT) if closed else attempt(function)
                if isinstance(value, Exception):
                    future.set_exception(value)
                else:
                    future.set_result(value)

        self._refuse_fork()
        with self.lock:
            if self._closing:
                raise SessionClosed(CLOSED_TEXT)
            self._tasks.append(task)
            self._work.notify()
        return future

    def close(self, *, drain: bool, timeout_s: float | None = None, then: Callable[[], None] | None = None) -> None:
        """Stop taking requests; compute what waits (``drain``) or fail it with SessionClosed; end the thread.

        ``then`` runs when the thread has ended, on the thread itself where this call cannot wait for it: an engine
        must not be closed under a run. Does nothing in a forked child, which has no such thread.
        """
        if os.getpid() != self._pid:
            return
        with self.lock:
            self._closing = True
            self._abort = self._abort or not drain
            self._work.notify_all()
            self._admission.wake()
        if not self.is_current_thread:
            self._thread.join(timeout_s)
        if then is None:
            return
        with self.lock:
            if not self._ended:
                self._endings.append(then)
                return
        then()

    def _refuse_fork(self) -> None:
        # Before the lock is touched: another thread may have held it while the process was forked.
        if os.getpid() != self._pid:
            raise SessionClosed(FORKED_TEXT)

    def _is_memory_low(self) -> bool:
        if self.policy.min_free_memory_share <= 0:
            return False
        now = self.clock()
        if self._memory_checked_s is None or now - self._memory_checked_s >= MEMORY_CHECK_S:
            share = available_memory_share(self._meminfo)
            was_low, self._memory_low = (
                self._memory_low,
                share is not None and share < self.policy.min_free_memory_share,
            )
            self._memory_checked_s = now
            trim = getattr(self.engine, "trim", None)
            if self._memory_low and not was_low and trim is not None:
                trim()
        return self._memory_low

    def _serve(self) -> None:
        work: _Work | None = None
        try:
            while (work := self._next()) is not None:
                if work.task is not None:
                    work.task(False)
                for job in {id(entry.payload.job): entry.payload.job for entry in work.expired}.values():
                    self._fail(job, DeadlineExceeded("the request's deadline passed before it was computed"), "expired")
                if work.batch:
                    self._run_batch(work.batch)
                # Not kept while waiting: answers and feeds belong to the callers now.
                work = None
        finally:
            self._abandon(work)
            with self.lock:
                self._ended = True
            for ending in self._endings:
                ending()

    def _next(self) -> _Work | None:
        with self.lock:
            while not self._abort:
                now = self.clock()
                limit = self.row_limit()
                task = self._tasks.popleft() if self._tasks else None
                expired = self.batcher.expire(now)
                batch = [] if task else self.batcher.take(now, flush=self._closing, limit=limit)
                if task or expired or batch:
                    self._admission.wake()
                    return _Work(task=task, expired=expired, batch=batch)
                if self._closing:
                    return None
                wake_s = self.batcher.next_wakeup(now, limit=limit)
                self._work.wait(None if wake_s is None else min(wake_s - now, LONGEST_WAIT_S))
            return None

    def _abandon(self, work: _Work | None) -> None:
        """The thread ends: whatever is left, and what it was at, fails; nothing new is taken."""
        with self.lock:
            self._closing = True
            entries = [*(work.batch if work else ()), *(work.expired if work else ()), *self.batcher.drain()]
            left = {id(entry.payload.job): entry.payload.job for entry in entries}
            tasks = list(self._tasks)
            self._tasks.clear()
            self._admission.wake()
        for job in left.values():
            self._fail(job, SessionClosed("the session was closed before the request was computed"), "failed")
        for task in tasks:
            task(True)

    def _fail(self, job: Job, error: Exception, counter: str) -> None:
        with self.lock:
            self._admission.remove(job)
            self._admission.wake()
        if job.fail(error):
            with self.lock:
                setattr(self.counters, counter, getattr(self.counters, counter) + 1)

    def _run_batch(self, batch: Sequence[Entry]) -> None:
        now = self.clock()
        live = [entry for entry in batch if entry.payload.job.start(now)]
        if self._unproven and any(len(live) > 1 or entry.payload.job.pieces > 1 for entry in live):
            self._prove(live[0].payload)
        if self._whole:
            for entry in live:
                if entry.payload.job.pieces > 1:
                    self._fail(entry.payload.job, no_batch_axis(self._whole[0]), "failed")
                else:
                    self._run([entry], retried=False)
        elif live:
            self._run(live, retried=False)

    def _prove(self, piece: Piece) -> None:
        """Find out once, on real data, whether the undeclared outputs are per row; a failing probe leaves it open."""
        row = {name: array[:1] for name, array in piece.feeds.items()}
        found = attempt(lambda: prove_rows(self.engine.infer, row, names=self._unproven, fixed=self.axis.fixed))
        if not isinstance(found, Exception):
            with self.lock:
                self._whole = (*self._whole, *found)
                self._unproven = ()

    def _run(self, entries: Sequence[Entry], *, retried: bool) -> None:
        run = attempt(lambda: self._compute(entries))
        if isinstance(run, Exception):
            if len(entries) == 1:
                self._fail(entries[0].payload.job, run, "failed")
                return
            # One bad request must not take its neighbours with it.
            for entry in entries:
                self._run([entry], retried=True)
            return
        rows = sum(entry.rows for entry in entries)
        now = self.clock()
        with self.lock:
            self.counters.batches += 1
            self.counters.rows += rows
            self.counters.histogram[rows] = self.counters.histogram.get(rows, 0) + 1
            self.counters.compute_ms += run.compute_ms
        for entry, outputs in zip(entries, run.outputs, strict=True):
            self._deliver(entry.payload, outputs, run=run, rows=rows, retried=retried, now=now)

    def _deliver(
        self, piece: Piece, outputs: dict[str, Array], *, run: _Run, rows: int, retried: bool, now: float
    ) -> None:
        job = piece.job
        job.batch_form_ms += run.form_ms
        job.compute_ms += run.compute_ms
        job.batch_rows = max(job.batch_rows, rows)
        job.batches += 1
        job.retried = job.retried or retried
        finished = attempt(lambda: job.add_result(piece.index, outputs, now=now))
        if isinstance(finished, Exception):
            self._fail(job, finished, "failed")
        elif finished:
            with self.lock:
                self.counters.completed += 1

    def _compute(self, entries: Sequence[Entry]) -> _Run:
        rows = sum(entry.rows for entry in entries)
        begin = self.clock()
        feeds: dict[str, Any] = self._joiner.join([entry.payload.feeds for entry in entries], rows=rows)
        joined = self.clock()
        total = self.axis.fixed or rows
        # Rows that will be cut apart are copied then; a lone request gets the engine's arrays as they are.
        lone = len(entries) == 1 and rows == total
        # Looked up for each run: a monitor may time the engine's calls for a while.
        engine = self.engine
        outputs = (engine.infer if lone else getattr(engine, "infer_borrowed", engine.infer))(feeds)
        done = self.clock()
        self.latency.update(entries[0].key, rows=rows, latency_ms=max(0.0, (done - joined) * 1000))
        split = any(entry.payload.job.pieces > 1 for entry in entries)
        pieces = split_rows(outputs, [entry.rows for entry in entries], total=total, check_whole=split)
        form_ms = (joined - begin + self.clock() - done) * 1000
        return _Run(outputs=pieces, form_ms=form_ms, compute_ms=(done - joined) * 1000)
