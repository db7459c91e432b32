"""The session: many callers, one engine. Answers equal single answers, failures stay with their request."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from edgeds.engines.null import NullEngine
from edgeds.errors import (
    DeadlineExceeded,
    DeviceError,
    InputError,
    OutOfMemory,
    QueueFull,
    SessionClosed,
    SpecError,
)
from edgeds.runtime import BatchPolicy, LatencyTable, Session
from edgeds.specs import Resolution, TensorSpec

IMAGE = TensorSpec(name="images", dtype="float32", shape=("n", 3, "h", "w"))
OUT = TensorSpec(name="out", dtype="float32", shape=("n", 4, 2))


def frame(mark=0.0, *, rows=1, height=4, width=4):
    return {"images": np.full((rows, 3, height, width), mark, np.float32)}


def mark_of(answer):
    return float(answer.outputs["out"].flat[0])


class GateEngine(NullEngine):
    """Waits for ``gate`` in every run, records batch sizes, fails for marks in ``poison``."""

    def __init__(self, *, inputs=(IMAGE,), outputs=(OUT,), open_gate=True):
        super().__init__(inputs, outputs)
        self.gate = threading.Event()
        self.began = threading.Event()
        self.sizes: list[int] = []
        self.marks: list[list[float]] = []
        self.threads_seen: set[int] = set()
        self.poison: dict[float, Exception] = {}
        self.batch_error: Exception | None = None
        if open_gate:
            self.gate.set()

    def infer(self, feeds):
        self.began.set()
        assert self.gate.wait(20)
        self.threads_seen.add(threading.get_ident())
        first = feeds[self.inputs[0].name]
        self.sizes.append(first.shape[0])
        self.marks.append([float(row.flat[0]) for row in first])
        for row in first:
            if float(row.flat[0]) in self.poison:
                raise self.poison[float(row.flat[0])]
        if self.batch_error is not None and first.shape[0] > 1:
            raise self.batch_error
        return super().infer(feeds)


@pytest.fixture
def held():
    """A session whose engine is busy with one request (mark -1) until the gate opens."""
    sessions = []

    def make(**policy):
        engine = GateEngine(open_gate=False)
        session = Session(engine, policy=BatchPolicy(**{"max_delay_ms": 0, **policy}))
        sessions.append((session, engine))
        first = session.submit(frame(-1.0))
        assert engine.began.wait(10)
        return session, engine, first

    yield make
    for session, engine in sessions:
        engine.gate.set()
        session.close(drain=False)


def test_ten_requests_on_batch_four(held):
    """B67: 4 + 4 + 2, order kept, each with its own result."""
    session, engine, first = held(max_batch=4)
    futures = [session.submit(frame(float(mark))) for mark in range(10)]
    engine.gate.set()
    assert [mark_of(future.result(10)) for future in futures] == list(range(10))
    first.result(10)
    assert engine.sizes == [1, 4, 4, 2]
    assert engine.marks[1:] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(engine.threads_seen) == 1
    stats = session.stats()
    assert (stats.submitted, stats.completed, stats.batches, stats.rows) == (11, 11, 4, 11)
    assert stats.batch_size_histogram == {1: 1, 2: 1, 4: 2}


def test_one_oversize_request_is_split_and_joined():
    """B67 for one request of ten rows."""
    engine = GateEngine()
    with Session(engine, policy=BatchPolicy(max_batch=4, max_delay_ms=0)) as session:
        feeds = {"images": np.arange(10, dtype=np.float32).repeat(48).reshape(10, 3, 4, 4)}
        answer = session.infer(feeds, timeout_s=10)
    assert answer.outputs["out"].shape == (10, 4, 2)
    assert answer.outputs["out"][:, 0, 0].tolist() == list(range(10))
    assert engine.sizes == [4, 4, 2]
    assert (answer.batches, answer.batch_rows) == (3, 4)


@pytest.mark.parametrize("fixed", [1, 4])
def test_fixed_batch_models(fixed):
    """B67: an engine built for batch 1 or 4 gets exactly that; short batches are padded with the last row."""
    image = TensorSpec(name="images", dtype="float32", shape=(fixed, 3, 4, 4))
    out = TensorSpec(name="out", dtype="float32", shape=(fixed, 4, 2))
    engine = GateEngine(inputs=(image,), outputs=(out,))
    with Session(engine, policy=BatchPolicy(max_batch=8, max_delay_ms=5, preferred_batch=(1, 8))) as session:
        futures = [session.submit(frame(float(mark))) for mark in range(10)]
        assert [mark_of(future.result(10)) for future in futures] == list(range(10))
        answer = session.infer({"images": np.arange(6, dtype=np.float32).repeat(48).reshape(6, 3, 4, 4)})
        assert answer.outputs["out"][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
        assert session.warm_up(quiet=True)["3x4x4"]
    assert set(engine.sizes) == {fixed}
    if fixed == 4:
        assert engine.marks[-3] == [4.0, 5.0, 5.0, 5.0]


def test_marked_images_from_sixteen_threads():
    """B70: every thread gets its own marks back, and result arrays share memory with nothing."""
    engine = NullEngine([IMAGE], [OUT])
    wrong: list[float] = []
    kept: list[np.ndarray] = []
    with Session(engine, policy=BatchPolicy(max_batch=8, max_delay_ms=1)) as session:

        def work(mark: float) -> None:
            for turn in range(63):
                answer = session.infer(frame(mark + turn * 16), timeout_s=20)
                if not (answer.outputs["out"] == mark + turn * 16).all():
                    wrong.append(mark)
                if turn == 62:
                    kept.append(answer.outputs["out"])

        workers = [threading.Thread(target=work, args=(float(mark),)) for mark in range(16)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert session.stats().completed == 16 * 63
        assert session.stats().mean_batch_rows > 1
    assert wrong == []
    for index, one in enumerate(kept):
        assert one.flags.owndata
        assert not any(np.shares_memory(one, other) for other in kept[index + 1 :])


def test_bad_requests_fail_alone_at_submit(held):
    session, engine, _ = held()
    good = session.submit(frame(1.0))
    for feeds, words in (
        ({}, "missing"),
        ({"images": np.zeros((1, 3, 4, 4))}, "float64"),
        ({"images": np.zeros((0, 3, 4, 4), np.float32)}, "empty"),
        ({"images": np.zeros((1, 4, 4, 4), np.float32)}, "expected shape"),
        (None, "mapping"),
    ):
        with pytest.raises(InputError, match=words):
            session.submit(feeds)
    for options in ({"deadline_ms": 0}, {"deadline_ms": float("nan")}, {"deadline_ms": "5"}, {"priority": 1.5}):
        with pytest.raises(SpecError, match=next(iter(options))):
            session.submit(frame(), **options)
    engine.gate.set()
    assert mark_of(good.result(10)) == 1.0


def test_rows_must_agree_between_inputs():
    other = TensorSpec(name="ids", dtype="int64", shape=("m", 2))
    engine = NullEngine([IMAGE, other], [OUT])
    with Session(engine) as session, pytest.raises(InputError, match="images: 2, ids: 3"):
        session.submit({**frame(rows=2), "ids": np.zeros((3, 2), np.int64)})


def test_a_poisoned_request_does_not_fail_its_batch(held):
    session, engine, _ = held(max_batch=8)
    engine.poison[3.0] = DeviceError("bad row")
    futures = [session.submit(frame(float(mark))) for mark in range(6)]
    engine.gate.set()
    for mark, future in enumerate(futures):
        if mark == 3:
            with pytest.raises(DeviceError, match="bad row"):
                future.result(10)
        else:
            answer = future.result(10)
            assert mark_of(answer) == mark
            assert answer.retried
    later = session.infer(frame(7.0), timeout_s=10)
    assert not later.retried
    assert session.stats().failed == 1


@pytest.mark.parametrize("error", [OutOfMemory("full"), KeyError("odd"), ValueError("odd"), MemoryError()])
def test_any_engine_error_reaches_the_future_and_the_session_lives(held, error):
    session, engine, _ = held()
    engine.poison[2.0] = error
    future = session.submit(frame(2.0))
    engine.gate.set()
    with pytest.raises(type(error)):
        future.result(10)
    assert mark_of(session.infer(frame(1.0), timeout_s=10)) == 1.0


def test_a_batch_too_large_for_memory_runs_one_by_one(held):
    session, engine, _ = held()
    engine.batch_error = OutOfMemory("batch of 3 needs more")
    futures = [session.submit(frame(float(mark))) for mark in range(3)]
    engine.gate.set()
    assert [mark_of(future.result(10)) for future in futures] == [0, 1, 2]


def test_deadlines(held):
    session, engine, _ = held()
    late = session.submit(frame(1.0), deadline_ms=5)
    fine = session.submit(frame(2.0), deadline_ms=20_000)
    time.sleep(0.02)
    engine.gate.set()
    with pytest.raises(DeadlineExceeded, match="before it was computed"):
        late.result(10)
    assert mark_of(fine.result(10)) == 2.0
    assert [1.0] not in engine.marks
    assert session.stats().expired == 1


def test_cancel_before_start(held):
    session, engine, first = held(max_queue=1)
    waiting = session.submit(frame(5.0))
    assert not first.cancel(), "it runs already"
    assert waiting.cancel()
    other = session.submit(frame(6.0))
    engine.gate.set()
    assert mark_of(other.result(10)) == 6.0
    with pytest.raises(CancelledError):
        waiting.result(0)
    assert [5.0] not in engine.marks
    assert session.stats().cancelled == 1


def test_reject_and_drop_oldest(held):
    session, engine, _ = held(max_queue=2)
    kept = [session.submit(frame(float(mark))) for mark in (1, 2)]
    with pytest.raises(QueueFull, match="max_queue is 2"):
        session.submit(frame(3.0))
    engine.gate.set()
    assert [mark_of(future.result(10)) for future in kept] == [1, 2]
    assert session.stats().rejected == 1

    session, engine, _ = held(max_queue=2, on_full="drop_oldest", max_batch=2)
    split = session.submit(frame(1.0, rows=4))
    newer = session.submit(frame(2.0), priority=1)
    with pytest.raises(QueueFull, match="dropped for newer"):
        split.result(0)
    session.submit(frame(3.0), priority=1)
    with pytest.raises(QueueFull, match="priority of 0 or lower"):
        session.submit(frame(4.0))
    with pytest.raises(InputError, match="max_queue"):
        session.submit(frame(4.0, rows=6))
    engine.gate.set()
    assert mark_of(newer.result(10)) == 2.0
    assert session.stats().dropped == 1


def test_block_waits_for_room(held):
    session, engine, _ = held(max_queue=1, on_full="block")
    session.submit(frame(1.0))
    with pytest.raises(DeadlineExceeded, match="queue was full"):
        session.submit(frame(2.0), deadline_ms=10)
    got = []
    submitter = threading.Thread(target=lambda: got.append(session.submit(frame(3.0))))
    submitter.start()
    time.sleep(0.02)
    assert got == []
    engine.gate.set()
    submitter.join(10)
    assert mark_of(got[0].result(10)) == 3.0


def test_close_wakes_blocked_submitters_and_fails_what_waits(held):
    session, engine, first = held(max_queue=1, on_full="block")
    waiting = session.submit(frame(1.0))
    errors = []

    def submit():
        try:
            session.submit(frame(2.0))
        except SessionClosed as error:
            errors.append(error)

    submitter = threading.Thread(target=submit)
    submitter.start()
    time.sleep(0.02)
    closer = threading.Thread(target=session.close, kwargs={"drain": False})
    closer.start()
    submitter.join(10)
    assert len(errors) == 1
    engine.gate.set()
    closer.join(10)
    assert mark_of(first.result(10)) == -1.0
    with pytest.raises(SessionClosed, match="before the request was computed"):
        waiting.result(10)
    with pytest.raises(SessionClosed, match="open a new one"):
        session.submit(frame())
    with pytest.raises(SessionClosed):
        session.warm_up([Resolution(4, 4)], quiet=True)


def test_close_drains_at_once():
    """Draining does not wait for the delay to pass."""
    session = Session(GateEngine(), policy=BatchPolicy(max_delay_ms=60_000))
    futures = [session.submit(frame(float(mark))) for mark in range(3)]
    session.close()
    session.close()
    assert [mark_of(future.result(0)) for future in futures] == [0, 1, 2]


def test_leaving_with_an_error_does_not_wait():
    engine = GateEngine()
    futures = []

    def use():
        with Session(engine, policy=BatchPolicy(max_delay_ms=60_000)) as session:
            futures.append(session.submit(frame()))
            raise KeyError("user code")

    with pytest.raises(KeyError):
        use()
    with pytest.raises(SessionClosed):
        futures[0].result(0)


def test_asyncio():
    engine = GateEngine()

    async def main(session):
        answers = await asyncio.gather(*[session.infer_async(frame(float(mark))) for mark in range(5)])
        assert [mark_of(answer) for answer in answers] == list(range(5))
        engine.gate.clear()
        engine.began.clear()
        running = asyncio.create_task(session.infer_async(frame(8.0)))
        while not engine.began.is_set():
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(session.infer_async(frame(9.0)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        engine.gate.set()
        assert mark_of(await running) == 8.0

    for on_full in ("reject", "block"):
        with Session(engine, policy=BatchPolicy(max_delay_ms=1, on_full=on_full)) as session:
            asyncio.run(main(session))
    assert [9.0] not in engine.marks


def test_timings_add_up():
    engine = NullEngine([IMAGE], [OUT], latency_ms=20)
    with Session(engine, policy=BatchPolicy(max_delay_ms=10, max_batch=2)) as session:
        answer = session.infer(frame(), timeout_s=10)
    assert answer.queue_ms >= 9.9
    assert answer.compute_ms >= 19.9
    assert answer.queue_ms + answer.compute_ms + answer.batch_form_ms <= answer.total_ms + 1e-6


def test_queueing_delay_is_bounded():
    """Issue target: p99 of the queueing delay <= max_delay + one batch, on an engine that keeps up."""
    engine = NullEngine([IMAGE], [OUT], latency_ms=4)
    with Session(engine, policy=BatchPolicy(max_delay_ms=10, max_batch=4)) as session:
        futures = []
        for index in range(120):
            futures.append(session.submit(frame(float(index), height=4 + 4 * (index % 2))))
            time.sleep(0.003)
        waits = sorted(future.result(10).queue_ms for future in futures)
    # 10 ms delay + one run of the other shape under way (4 ms), and room for the scheduler of a busy machine.
    assert waits[int(0.9 * len(waits))] <= 10 + 4 + 20


def test_buckets_bound_the_shapes():
    """B74, B75: an unseen size is refused at submit, before it can reach the engine."""
    engine = GateEngine()
    with Session(engine, buckets=[Resolution(4, 4), Resolution(4, 8)]) as session:
        assert mark_of(session.infer(frame(1.0, width=8), timeout_s=10)) == 1.0
        with pytest.raises(InputError, match=r"4x12 is not one of.*4x4, 4x8"):
            session.submit(frame(width=12))


def test_warm_up_fills_the_latency_table(tmp_path):
    engine = NullEngine([IMAGE], [OUT], latency_ms=lambda shape: 2.0 * shape[0])
    table = LatencyTable()
    with Session(engine, policy=BatchPolicy(max_batch=6), buckets=[Resolution(4, 4)], latency=table) as session:
        measured = session.warm_up(quiet=True)
        assert sorted(measured["3x4x4"]) == [1, 2, 4, 6]
        assert 12 <= measured["3x4x4"][6] < 60
        session.warm_up([{"images": (3, 8, 8)}], quiet=True)
    assert table.estimate("3x8x8", 1) is not None
    with Session(engine) as session, pytest.raises(SpecError, match=r"open dims.*images"):
        session.warm_up(quiet=True)


def test_low_memory_brings_batches_down_to_one(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 200 kB\n")
    engine = GateEngine()
    policy = BatchPolicy(max_delay_ms=5, min_free_memory_share=0.3)
    with Session(engine, policy=policy, meminfo=meminfo) as session:
        for future in [session.submit(frame(float(mark))) for mark in range(3)]:
            future.result(10)
        session.infer(frame(rows=3), timeout_s=10)
    assert set(engine.sizes) == {1}
    meminfo.write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    with Session(engine, policy=policy, meminfo=meminfo) as session:
        session.infer(frame(rows=3), timeout_s=10)
    assert engine.sizes[-1] == 3


def test_waiting_for_oneself_is_refused():
    """A callback runs on the session's thread: waiting there would hang for good."""
    errors = []
    with Session(GateEngine(), policy=BatchPolicy(max_delay_ms=0)) as session:

        def again(future):
            try:
                session.infer(frame())
            except SpecError as error:
                errors.append(error)

        future = session.submit(frame(), deadline_ms=5000)
        future.add_done_callback(again)
        future.result(10)
    # The callback may also have run here, in the main thread, if the answer was there before it was added.
    assert len(errors) <= 1


def test_models_without_a_batch_axis_are_refused():
    scalar = TensorSpec(name="threshold", dtype="float32", shape=())
    with pytest.raises(SpecError, match="'threshold' has no batch axis"):
        Session(NullEngine([IMAGE, scalar], [OUT]))
    one = TensorSpec(name="a", dtype="float32", shape=(1, 2))
    four = TensorSpec(name="b", dtype="float32", shape=(4, 2))
    with pytest.raises(SpecError, match="different batch sizes"):
        Session(NullEngine([one, four], [OUT]))


def test_forgotten_sessions_end_their_thread():
    session = Session(GateEngine())
    thread = session._worker._thread
    future = session.submit(frame(3.0))
    del session
    gc.collect()
    assert mark_of(future.result(10)) == 3.0, "a request under way keeps its session"
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_the_interpreter_leaves_with_an_open_session():
    code = """
import numpy as np
from edgeds.engines.null import NullEngine
from edgeds.runtime import BatchPolicy, Session
from edgeds.specs import TensorSpec
spec = TensorSpec(name="x", dtype="float32", shape=("n", 2))
session = Session(NullEngine([spec], [spec]), policy=BatchPolicy(max_delay_ms=60_000))
futures = [session.submit({"x": np.zeros((1, 2), np.float32)}) for _ in range(3)]
print("end of main")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    assert done.stdout == "end of main\n"
    assert done.stderr == ""
