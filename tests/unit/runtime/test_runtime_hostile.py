"""Sessions under misuse: callbacks that block, exit or close, clocks that go back, forks, starving big requests."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from edgeds.engines.null import NullEngine
from edgeds.errors import DeviceError, QueueFull, SessionClosed
from edgeds.runtime import BatchPolicy, Session
from edgeds.specs import TensorSpec

IMAGE = TensorSpec(name="images", dtype="float32", shape=("n", 3, "h", "w"))
OUT = TensorSpec(name="out", dtype="float32", shape=("n", 4))


def frame(mark=0.0, *, rows=1):
    return {"images": np.full((rows, 3, 4, 4), mark, np.float32)}


class HeldEngine(NullEngine):
    """Every run waits for ``gate``; ``closed_in_run`` says whether it was closed under a run."""

    def __init__(self, *, error: BaseException | None = None):
        super().__init__((IMAGE,), (OUT,))
        self.gate = threading.Event()
        self.began = threading.Event()
        self.error = error
        self.running = self.closed_in_run = self.closed = False

    def infer(self, feeds):
        self.running = True
        self.began.set()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        answer = super().infer(feeds)
        self.running = False
        return answer

    def close(self):
        self.closed = True
        self.closed_in_run |= self.running
        super().close()


@pytest.fixture
def busy():
    """A session that computes one request until the gate opens."""
    made = []

    def make(*, error=None, close_engine=False, **policy):
        engine = HeldEngine(error=error)
        session = Session(engine, policy=BatchPolicy(**{"max_delay_ms": 0, **policy}), close_engine=close_engine)
        first = session.submit(frame())
        assert engine.began.wait(10)
        made.append((engine, session))
        return session, engine, first

    yield make
    for engine, session in made:
        engine.gate.set()
        session.close(drain=False, timeout_s=10)


def test_answers_are_freed_without_the_garbage_collector():
    """A server at full load must not pile up answers in reference cycles."""
    engine = HeldEngine()
    engine.gate.set()
    gc.disable()
    try:
        with Session(engine, policy=BatchPolicy(max_delay_ms=0)) as session:
            future = session.submit(frame())
            output = weakref.ref(future.result(10).outputs["out"])
            del future
            deadline = time.monotonic() + 5
            while output() is not None and time.monotonic() < deadline:
                time.sleep(0.01)  # the owner thread lets go a moment after it settles the future
            assert output() is None
    finally:
        gc.enable()


def test_callback_that_submits_to_a_full_blocking_queue_is_told(busy):
    """It runs on the owner thread: waiting for room there would wait for itself."""
    session, engine, first = busy(max_batch=1, max_queue=2, on_full="block")
    seen = []

    def callback(_):
        try:
            session.submit(frame(9))
        except QueueFull as error:
            seen.append(str(error))

    first.add_done_callback(callback)
    waiting = [session.submit(frame(1)) for _ in range(2)]
    engine.gate.set()
    for future in waiting:
        future.result(10)
    assert len(seen) == 1
    assert "callback cannot wait" in seen[0]


def test_callback_that_exits_takes_nobody_with_it(busy):
    session, engine, first = busy(max_batch=4)
    rest = [session.submit(frame(mark)) for mark in range(4)]
    rest[0].add_done_callback(lambda _: sys.exit(3))
    engine.gate.set()
    for future in (first, *rest):
        future.result(10)
    session.infer(frame(), timeout_s=10)


def test_engine_that_raises_systemexit_fails_its_request_only(busy):
    """Panics of native code derive from BaseException; the caller gets a DeviceError, the session goes on."""
    session, engine, first = busy(error=SystemExit(3))
    engine.gate.set()
    with pytest.raises(DeviceError, match="SystemExit: 3"):
        first.result(10)
    engine.error = None
    session.infer(frame(), timeout_s=10)


def test_close_from_a_callback_drains_before_the_engine_is_closed(busy):
    session, engine, first = busy(max_batch=1, close_engine=True)
    rest = [session.submit(frame(mark)) for mark in range(3)]
    first.add_done_callback(lambda _: session.close())
    engine.gate.set()
    for future in rest:
        assert future.result(10).outputs["out"].shape == (1, 4)
    deadline = time.monotonic() + 10
    while not engine.closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.closed
    assert not engine.closed_in_run


def test_close_that_gives_up_waiting_leaves_the_engine_to_its_run(busy):
    session, engine, first = busy(close_engine=True)
    session.close(timeout_s=0.05)
    assert not engine.closed
    engine.gate.set()
    first.result(10)
    session.close()
    assert engine.closed
    assert not engine.closed_in_run


def test_clock_that_goes_back_does_not_hold_requests():
    class WallClock:
        offset_s = 0.0

        def __call__(self):
            return time.time() + self.offset_s

    clock, engine = WallClock(), HeldEngine()
    engine.gate.set()
    with Session(engine, policy=BatchPolicy(max_delay_ms=50), clock=clock) as session:
        future = session.submit(frame())
        clock.offset_s = -3600.0
        answer = future.result(10)
    assert 0 <= answer.compute_ms <= answer.total_ms < 10_000


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_is_told_and_does_not_hang(busy):
    session, engine, first = busy()
    engine.gate.set()
    first.result(10)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            session.infer(frame(), timeout_s=5)
            os.write(write, b"answered")
        except SessionClosed as error:
            session.close()
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        assert b"opened by another process" in stream.read()
    os.waitpid(pid, 0)
    session.infer(frame(), timeout_s=10)


def test_big_request_is_not_passed_by_small_ones_for_ever(busy):
    """on_full='block': callers enter in turn, though a small request would fit long before the big one does."""
    session, engine, _ = busy(max_batch=1, max_queue=4, on_full="block")
    for _ in range(4):
        session.submit(frame())
    order = []
    threads = []

    def send(rows):
        session.submit(frame(rows=rows))
        order.append(rows)

    for rows in (4, 1, 1):
        threads.append(threading.Thread(target=send, args=(rows,)))
        threads[-1].start()
        deadline = time.monotonic() + 10
        while len(session._worker._admission._tickets) < len(threads) and time.monotonic() < deadline:
            time.sleep(0.005)
    engine.gate.set()
    for thread in threads:
        thread.join(10)
    assert order[0] == 4


def test_close_releases_callers_that_wait_for_room(busy):
    session, engine, _ = busy(max_batch=1, max_queue=1, on_full="block")
    session.submit(frame())
    errors = []

    def send():
        try:
            session.submit(frame())
        except SessionClosed as error:
            errors.append(error)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    session.close(drain=False, timeout_s=0)
    for thread in threads:
        thread.join(10)
    assert len(errors) == 8
    engine.gate.set()


def test_nobody_is_dropped_for_a_request_that_cannot_enter_anyway(busy):
    session, engine, first = busy(max_batch=1, max_queue=3, on_full="drop_oldest")
    low = session.submit(frame(), priority=0)
    high = [session.submit(frame(), priority=5) for _ in range(2)]
    with pytest.raises(QueueFull, match="too few of them"):
        session.submit(frame(rows=2), priority=1)
    engine.gate.set()
    for future in (first, low, *high):
        future.result(10)
    assert session.stats().dropped == 0
