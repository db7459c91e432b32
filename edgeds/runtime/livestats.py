"""The counters of a running session in a small file, for ``edgeds monitor`` in another process."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeds.errors import SpecError
from edgeds.files import read_json, write_json
from edgeds.runtime.session import Session
from edgeds.specs import from_json, to_json

INTERVAL_S = 1.0
STALE_S = 5.0
MAX_STATS_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class LiveStats:
    """One reading: rows per second and mean rows per run since the reading before, requests waiting, totals since the
    start. ``time_s`` is the writer's wall clock."""

    pid: int
    time_s: float
    fps: float
    waiting: int
    mean_batch: float | None
    completed: int
    failed: int
    rejected: int
    expired: int
    backend: str


@contextlib.contextmanager
def publish_stats(session: Session, path: Path | None, *, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Write ``LiveStats`` to ``path`` every second (atomically) while the block runs, then remove the file.

    ``path`` None publishes nothing. Raises SpecError when the file cannot be written at the beginning; later failures
    (a full disk) do not disturb the work.
    """
    if path is None:
        yield
        return
    before, begin = session.stats(), time.monotonic()
    _write(path, session, fps=0.0, mean_batch=None)
    stop = threading.Event()

    def publish() -> None:
        rows, batches, last = before.rows, before.batches, begin
        while not stop.wait(interval_s):
            now, stats = time.monotonic(), session.stats()
            new_rows, new_batches = stats.rows - rows, stats.batches - batches
            mean = new_rows / new_batches if new_batches else None
            with contextlib.suppress(SpecError):
                _write(path, session, fps=new_rows / max(now - last, 1e-9), mean_batch=mean)
            rows, batches, last = stats.rows, stats.batches, now

    thread = threading.Thread(target=publish, name="edgeds-live-stats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(OSError):
            path.unlink()


def read_stats(path: Path) -> LiveStats | None:
    """The newest reading; None when there is none or it is older than five seconds (its writer died).

    Raises SpecError for a file that is something else.
    """
    if not path.exists():
        return None
    stats = from_json(LiveStats, read_json(path, max_bytes=MAX_STATS_BYTES), where=str(path))
    return stats if abs(time.time() - stats.time_s) <= STALE_S else None


def _write(path: Path, session: Session, *, fps: float, mean_batch: float | None) -> None:
    stats = session.stats()
    live = LiveStats(
        pid=os.getpid(),
        time_s=time.time(),
        fps=fps,
        waiting=stats.waiting,
        mean_batch=mean_batch,
        completed=stats.completed,
        failed=stats.failed,
        rejected=stats.rejected,
        expired=stats.expired,
        backend=stats.backend,
    )
    try:
        write_json(path, to_json(live))
    except OSError as error:
        raise SpecError(f"--stats {path}: cannot be written to: {error.strerror or error}") from error
