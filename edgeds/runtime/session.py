"""Share one engine among many callers: requests of any thread or coroutine, batched by shape.

with open_engine("model.onnx") as engine, Session(engine) as session:
    future = session.submit({"images": frame})      # (rows, channels, height, width)
    boxes = future.result().outputs["output0"]
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from edgeds.engines import Engine
from edgeds.engines.base import Array
from edgeds.errors import SpecError
from edgeds.progress import track
from edgeds.runtime.batcher import MAX_PRIORITY, BatchPolicy, is_number
from edgeds.runtime.clock import steady
from edgeds.runtime.jobs import Answer, Job, Piece, SessionStats
from edgeds.runtime.latency import LatencyTable
from edgeds.runtime.rows import BatchAxis, check_request, no_batch_axis, request_key, row_zeros
from edgeds.runtime.worker import Worker
from edgeds.specs import Resolution

EXIT_WAIT_S = 5.0


class Session:
    """Batches requests of equal shape onto one engine, which only the session's own thread touches.

    ``buckets`` restricts image inputs to these resolutions, so that no new shape ever reaches the engine in serving.
    ``latency`` is a table to start from and to learn into. The engine stays the caller's to close, unless
    ``close_engine``. Feeds are read until their future is done and must not be changed before; outputs are the
    caller's own copies.

    Raises SpecError for a model that cannot be batched along axis 0.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        policy: BatchPolicy | None = None,
        buckets: Sequence[Resolution] | None = None,
        latency: LatencyTable | None = None,
        clock: Callable[[], float] = time.monotonic,
        close_engine: bool = False,
        meminfo: Path = Path("/proc/meminfo"),
    ) -> None:
        axis = BatchAxis.of(engine)
        self.engine = engine
        # An engine may be built for fewer rows than the policy wants; larger requests are split then.
        self.policy = _fit_policy(policy or BatchPolicy(), axis.fixed or getattr(engine, "max_batch", None))
        self.buckets = tuple(buckets) if buckets else None
        self.latency = latency if latency is not None else LatencyTable()
        self._axis = axis
        self._clock = steady(clock)
        self._close_engine = close_engine
        self._worker = Worker(
            engine, axis=axis, policy=self.policy, latency=self.latency, clock=self._clock, meminfo=meminfo
        )
        # Runs when the session is garbage or the interpreter exits, whichever is first.
        self._finalizer = weakref.finalize(self, self._worker.close, drain=False, timeout_s=EXIT_WAIT_S)

    def submit(
        self, feeds: Mapping[str, Array], *, priority: int = 0, deadline_ms: float | None = None
    ) -> Future[Answer]:
        """Queue one request and return its future. Rows are axis 0; more rows than a batch holds are split.

        Higher ``priority`` goes first; ``deadline_ms`` counts from now. Raises InputError for feeds that do not fit
        (other requests are not touched), QueueFull, SessionClosed. The future gives an Answer, or DeadlineExceeded,
        QueueFull when dropped, SessionClosed, or the engine's error. ``future.cancel()`` works until it starts.
        """
        now = self._clock()
        checked, rows = check_request(self._axis, feeds, buckets=self.buckets)
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
            raise SpecError(
                f"priority: expected a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {priority!r}"
            )
        if deadline_ms is not None and not (is_number(deadline_ms) and 0 < deadline_ms < math.inf):
            raise SpecError(f"deadline_ms: expected a finite number above 0, got {deadline_ms!r}")
        limit = self._piece_rows(rows)
        starts = range(0, rows, limit)
        job = Job(
            key=request_key(checked, self._axis.inputs),
            pieces=len(starts),
            submitted_s=now,
            priority=priority,
            deadline_s=math.inf if deadline_ms is None else now + deadline_ms / 1000,
            owner=self,
        )
        pieces = [
            (
                Piece(job=job, index=index, feeds={name: array[at : at + limit] for name, array in checked.items()}),
                min(limit, rows - at),
            )
            for index, at in enumerate(starts)
        ]
        worker = self._worker
        # Weakly: a finished future must not hold its answer in a cycle until the garbage collector comes by.
        waiting = weakref.ref(job)
        job.future.add_done_callback(
            lambda future: _forget_cancelled(worker, waiting()) if future.cancelled() else None
        )
        worker.enqueue(job, pieces)
        return job.future

    def infer(
        self,
        feeds: Mapping[str, Array],
        *,
        priority: int = 0,
        deadline_ms: float | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Submit and wait. ``timeout_s`` raises TimeoutError and leaves the request running."""
        self._refuse_own_thread("infer")
        return self.submit(feeds, priority=priority, deadline_ms=deadline_ms).result(timeout_s)

    async def infer_async(
        self, feeds: Mapping[str, Array], *, priority: int = 0, deadline_ms: float | None = None
    ) -> Answer:
        """``infer`` for asyncio. Cancelling the task cancels the request if it has not started."""
        if self.policy.on_full == "block":
            # Waiting for room would block the event loop.
            future = await asyncio.to_thread(self.submit, feeds, priority=priority, deadline_ms=deadline_ms)
        else:
            future = self.submit(feeds, priority=priority, deadline_ms=deadline_ms)
        return await asyncio.wrap_future(future)

    def warm_up(
        self, shapes: Sequence[Resolution | Mapping[str, tuple[int, ...]]] | None = None, *, quiet: bool = False
    ) -> dict[str, dict[int, float]]:
        """Run every shape at batch 1, 2, 4, ... up to the limit and fill the latency table, in milliseconds.

        ``shapes`` are resolutions, or per input name the shape of one row; the default is the session's buckets, or
        the model's own shape when it is fixed. Raises SpecError when a dynamic dim is left open.
        """
        self._refuse_own_thread("warm_up")
        wanted = list(shapes if shapes is not None else self.buckets or [{}])
        plans = [(shape, rows) for shape in wanted for rows in self._batch_sizes()]
        for shape, rows in track(plans, what="warming up", unit="shape", quiet=quiet):
            feeds = {spec.name: row_zeros(spec, shape, rows=rows) for spec in self._axis.inputs}
            self._worker.call(lambda feeds=feeds, rows=rows: self._measure(feeds, rows)).result()  # type: ignore[misc]
        return self.latency.snapshot()

    def stats(self) -> SessionStats:
        """A consistent snapshot of the counters."""
        worker = self._worker
        with worker.lock:
            count = worker.counters
            return SessionStats(
                submitted=count.submitted,
                completed=count.completed,
                failed=count.failed,
                rejected=count.rejected,
                dropped=count.dropped,
                expired=count.expired,
                cancelled=count.cancelled,
                waiting=len(worker.batcher),
                rows=count.rows,
                batches=count.batches,
                batch_size_histogram=dict(sorted(count.histogram.items())),
                compute_ms=count.compute_ms,
                backend=self.engine.backend,
                fallback_reason=self.engine.fallback_reason,
            )

    def close(self, drain: bool = True, *, timeout_s: float | None = None) -> None:
        """Stop taking requests; ``drain`` computes what waits, else it fails with SessionClosed. Safe to call twice.

        Where a run goes on after ``timeout_s``, or from a future's callback, an engine that is the session's to close
        is closed when the run has ended.
        """
        self._worker.close(drain=drain, timeout_s=timeout_s, then=self.engine.close if self._close_engine else None)
        self._finalizer.detach()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error nobody waits for the answers any more.
        self.close(drain=kind is None)

    def _refuse_own_thread(self, name: str) -> None:
        if self._worker.is_current_thread:
            raise SpecError(
                f"{name}() was called from a future's callback and would wait for itself; use submit() there"
            )

    def _piece_rows(self, rows: int) -> int:
        whole = self._worker.whole_outputs
        if whole:
            if rows > self.policy.max_batch or (self._axis.fixed is not None and rows != self._axis.fixed):
                raise no_batch_axis(whole[0])
            return rows
        return self._worker.row_limit()

    def _batch_sizes(self) -> list[int]:
        if self._axis.fixed is not None:
            return [self._axis.fixed]
        sizes = {
            1 << power for power in range(self.policy.max_batch.bit_length()) if 1 << power <= self.policy.max_batch
        }
        return sorted({*sizes, self.policy.max_batch, *self.policy.preferred_batch})

    def _measure(self, feeds: Mapping[str, Array], rows: int) -> None:
        key = request_key(feeds, self._axis.inputs)
        for _ in range(2):
            begin = time.perf_counter()
            self.engine.infer(feeds)
            self.latency.update(key, rows=rows, latency_ms=(time.perf_counter() - begin) * 1000)


def _forget_cancelled(worker: Worker, job: Job | None) -> None:
    worker.count_cancelled()
    if job is not None:
        worker.discard(job)
        job.owner = None


def _fit_policy(policy: BatchPolicy, fixed: int | None) -> BatchPolicy:
    """The policy with batches no larger than the model takes."""
    if fixed is None or policy.max_batch <= fixed:
        return policy
    preferred = tuple(size for size in policy.preferred_batch if size <= fixed)
    return replace(policy, max_batch=fixed, preferred_batch=preferred)
