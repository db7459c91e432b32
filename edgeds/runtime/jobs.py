"""What travels through a session: jobs (one per request), their answers, and the counters."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeVar

from edgeds.engines.base import Array
from edgeds.errors import DeviceError
from edgeds.runtime.rows import join_outputs

T = TypeVar("T")
LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of one request. ``outputs`` belong to the caller: one array per output, rows as submitted.

    ``queue_ms``: submitted until its (first) batch was taken. ``batch_form_ms``: joining and cutting rows.
    ``compute_ms``: the engine. ``total_ms``: submitted until done. ``batch_rows``: rows that ran together (the most,
    for a split request). ``batches``: runs it took. ``retried``: its batch failed and it then ran alone.
    """

    outputs: dict[str, Array]
    queue_ms: float
    batch_form_ms: float
    compute_ms: float
    total_ms: float
    batch_rows: int
    batches: int
    retried: bool


@dataclass(frozen=True, kw_only=True)
class SessionStats:
    """Counters since the session began. Requests, except ``rows``, ``batches`` and the histogram (rows: batches)."""

    submitted: int
    completed: int
    failed: int
    rejected: int
    dropped: int
    expired: int
    cancelled: int
    waiting: int
    rows: int
    batches: int
    batch_size_histogram: Mapping[int, int]
    compute_ms: float
    backend: str
    fallback_reason: str | None

    @property
    def mean_batch_rows(self) -> float:
        return self.rows / self.batches if self.batches else 0.0


@dataclass(kw_only=True)
class Counters:
    """Mutable counts behind SessionStats; guarded by the worker's lock."""

    submitted: int = 0
    completed: int = 0
    failed: int = 0
    rejected: int = 0
    dropped: int = 0
    expired: int = 0
    cancelled: int = 0
    rows: int = 0
    batches: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    compute_ms: float = 0.0


@dataclass(eq=False, kw_only=True)
class Job:
    """One request from submit to answer. ``owner`` keeps the session alive while the request is under way."""

    key: str
    pieces: int
    submitted_s: float
    priority: int = 0
    deadline_s: float = math.inf
    owner: object = None
    future: Future[Answer] = field(default_factory=Future)
    results: dict[int, dict[str, Array]] = field(default_factory=dict)
    started_s: float | None = None
    batch_form_ms: float = 0.0
    compute_ms: float = 0.0
    batch_rows: int = 0
    batches: int = 0
    retried: bool = False

    def start(self, now: float) -> bool:
        """Whether the job is to be computed; the first call makes its future uncancellable."""
        if self.started_s is None:
            if self.future.done() or not self.future.set_running_or_notify_cancel():
                return False
            self.started_s = now
        return not self.future.done()

    def add_result(self, index: int, outputs: dict[str, Array], *, now: float) -> bool:
        """Store one piece; True when that completed the job and its answer was set."""
        self.results[index] = outputs
        if len(self.results) < self.pieces:
            return False
        answer = Answer(
            outputs=join_outputs([self.results[i] for i in range(self.pieces)]),
            queue_ms=((self.started_s or now) - self.submitted_s) * 1000,
            batch_form_ms=self.batch_form_ms,
            compute_ms=self.compute_ms,
            total_ms=(now - self.submitted_s) * 1000,
            batch_rows=self.batch_rows,
            batches=self.batches,
            retried=self.retried,
        )
        return self._settle(lambda: self.future.set_result(answer))

    def fail(self, error: Exception) -> bool:
        """Set the error; False when the job had already ended."""
        return self._settle(lambda: self.future.set_exception(error))

    def _settle(self, set_value: Callable[[], None]) -> bool:
        try:
            set_value()
        except InvalidStateError:
            # Cancelled, or another piece ended it first.
            return False
        except BaseException as error:
            # concurrent.futures lets only SystemExit and its like out of a callback. The value is set; on the owner
            # thread the error would take every other caller's request with it.
            if threading.current_thread() is threading.main_thread():
                raise
            LOGGER.error("a callback of a request raised %r; it cannot end the program from there", error)
        finally:
            self.results = {}
            self.owner = None
        return True


@dataclass(eq=False, slots=True, frozen=True, kw_only=True)
class Piece:
    """Rows of a job that run together; ``index`` is its place in the job."""

    job: Job
    index: int
    feeds: dict[str, Array]


def attempt(function: Callable[[], T]) -> T | Exception:
    """The function's value, or the exception it raised as a value.

    An engine may raise anything; as in concurrent.futures the error belongs to the requests that caused it and must
    not end the thread that serves all others. It is handed on, never dropped. SystemExit and its like (a panic of
    native code) come back as a DeviceError, since they would end the caller's thread instead of failing its request.
    """
    try:
        return function()
    except Exception as error:
        return error
    except BaseException as error:
        failure = DeviceError(f"the engine stopped with {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
