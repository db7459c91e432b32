"""The batcher as a state machine: properties over random interleavings, and simulations on a fake clock."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.errors import QueueFull, SpecError
from edgeds.runtime import Batcher, BatchPolicy, Entry, LatencyTable

KEYS = ("320x320", "384x640", "640x640")


def entry(key="a", *, rows=1, at=0.0, priority=0, deadline=math.inf, payload=None):
    return Entry(key=key, rows=rows, arrival_s=at, priority=priority, deadline_s=deadline, payload=payload)


def payloads(batch):
    return [item.payload for item in batch]


def test_sent_when_full_or_after_the_delay():
    batcher = Batcher(BatchPolicy(max_batch=2, max_delay_ms=10))
    batcher.add(entry(at=0.0, payload=1))
    assert batcher.take(0.005) == []
    assert batcher.next_wakeup(0.005) == pytest.approx(0.010)
    batcher.add(entry(at=0.006, payload=2))
    batcher.add(entry(at=0.006, payload=3))
    assert payloads(batcher.take(0.006)) == [1, 2]
    assert batcher.take(0.006) == []
    assert payloads(batcher.take(0.016)) == [3]
    assert batcher.next_wakeup(0.016) is None


def test_a_batch_holds_one_key():
    """B69: shapes never mix."""
    batcher = Batcher(BatchPolicy(max_batch=4, max_delay_ms=0))
    for index in range(8):
        batcher.add(entry(KEYS[index % 2], at=index * 1e-3, payload=index))
    assert payloads(batcher.take(1.0)) == [0, 2, 4, 6]
    assert payloads(batcher.take(1.0)) == [1, 3, 5, 7]


def test_ten_at_once_with_batch_four():
    """B67: 4 + 4 + 2, in order."""
    batcher = Batcher(BatchPolicy(max_batch=4, max_delay_ms=5))
    for index in range(10):
        batcher.add(entry(payload=index))
    assert payloads(batcher.take(0.0)) == [0, 1, 2, 3]
    assert payloads(batcher.take(0.0)) == [4, 5, 6, 7]
    assert batcher.take(0.0) == []
    assert payloads(batcher.take(0.005)) == [8, 9]


def test_a_deadline_sends_early_by_the_latency_table():
    latency = LatencyTable()
    latency.update("a", rows=1, latency_ms=4)
    batcher = Batcher(BatchPolicy(max_delay_ms=100), latency=latency)
    batcher.add(entry(deadline=0.020))
    assert batcher.next_wakeup(0.0) == pytest.approx(0.016)
    assert batcher.take(0.0159) == []
    assert len(batcher.take(0.0161)) == 1
    batcher.add(entry("never measured", deadline=0.5))
    assert len(batcher.take(0.017)) == 1, "without a measurement no time is spared"


def test_expired_entries_leave_before_compute():
    latency = LatencyTable()
    latency.update("a", rows=1, latency_ms=1)
    batcher = Batcher(BatchPolicy(max_delay_ms=50), latency=latency)
    batcher.add(entry(deadline=0.010, payload="late"))
    batcher.add(entry(payload="fine"))
    assert payloads(batcher.expire(0.010)) == ["late"]
    assert batcher.expire(0.010) == []
    assert payloads(batcher.take(0.050)) == ["fine"]


def test_priorities_go_first_and_age():
    """A request of priority 0 is overtaken by priority 2 only if that arrives within 2 x aging of it."""
    policy = BatchPolicy(max_batch=1, max_delay_ms=0, aging_ms=1000)
    batcher = Batcher(policy)
    batcher.add(entry(at=0.0, priority=0, payload="old low"))
    batcher.add(entry(at=1.9, priority=2, payload="overtakes"))
    batcher.add(entry(at=2.1, priority=2, payload="too late"))
    assert payloads([batcher.take(3.0)[0] for _ in range(3)]) == ["overtakes", "old low", "too late"]


def test_no_starvation_under_a_stream_of_higher_priority():
    """Simulation: high-priority requests arrive faster than they are served; the low one leaves within its bound."""
    batcher = Batcher(BatchPolicy(max_batch=1, max_delay_ms=0, aging_ms=100, max_queue=10_000))
    batcher.add(entry("slow", at=0.0, priority=0, payload="low"))
    left_at = None
    for step in range(400):
        now = step * 0.01
        for _ in range(2):
            batcher.add(entry("fast", at=now, priority=5))
        if payloads(batcher.take(now)) == ["low"]:
            left_at = now
            break
    # Everything that may overtake arrives within 5 x 100 ms, two per step, one served per step of 10 ms.
    assert left_at is not None
    assert 0.5 <= left_at <= 1.05


def test_the_rare_key_leaves_within_its_delay_plus_one_batch():
    """B69: a key with a growing backlog cannot hold back a rare one."""
    batcher = Batcher(BatchPolicy(max_batch=8, max_delay_ms=20, max_queue=10_000))
    run_s, now, sent_at = 0.030, 0.0, None
    batcher.add(entry("rare", at=0.001, payload="rare"))
    while now < 1.0 and sent_at is None:
        for _ in range(12):
            batcher.add(entry("busy", at=now))
        batch = batcher.take(now)
        if payloads(batch) == ["rare"]:
            sent_at = now
        now += run_s
    assert sent_at is not None
    assert sent_at - 0.001 <= 0.020 + run_s + 1e-9


def test_a_tight_deadline_overtakes_a_patient_head():
    latency = LatencyTable()
    for key in ("patient", "tight"):
        latency.update(key, rows=1, latency_ms=10)
    batcher = Batcher(BatchPolicy(max_batch=1, max_delay_ms=0), latency=latency)
    batcher.add(entry("patient", at=0.0))
    batcher.add(entry("tight", at=0.001, deadline=0.015))
    assert batcher.take(0.002)[0].key == "tight"
    batcher.add(entry("tight", at=0.003, deadline=0.100))
    assert batcher.take(0.003)[0].key == "patient"


def test_preferred_sizes():
    batcher = Batcher(BatchPolicy(max_batch=8, max_delay_ms=10, preferred_batch=(2, 4)))
    for index in range(5):
        batcher.add(entry(at=index * 1e-3, payload=index))
    assert payloads(batcher.take(0.004)) == [0, 1, 2, 3]
    for index in range(5, 7):
        batcher.add(entry(at=0.012, payload=index))
    # The oldest is due: two go, the third has time left and waits for company.
    assert payloads(batcher.take(0.014)) == [4, 5]
    assert batcher.take(0.014) == []
    assert payloads(batcher.take(0.022)) == [6]


def test_entries_larger_than_the_rest_keep_their_turn():
    batcher = Batcher(BatchPolicy(max_batch=4, max_delay_ms=1000))
    for rows in (3, 2, 1):
        batcher.add(entry(rows=rows, payload=rows))
    assert payloads(batcher.take(0.0)) == [3]
    assert batcher.take(0.0) == []
    assert payloads(batcher.take(0.0, flush=True)) == [2, 1]


def test_overload():
    batcher = Batcher(BatchPolicy(max_queue=2))
    batcher.add(entry(at=0.0, priority=1, payload="high"))
    batcher.add(entry(at=1.0, priority=0, payload="low"))
    with pytest.raises(QueueFull, match="2 requests wait"):
        batcher.add(entry())
    assert batcher.make_room(priority=0).payload == "low"
    batcher.add(entry(at=2.0, priority=1, payload="newer"))
    with pytest.raises(QueueFull, match="priority above 0"):
        batcher.make_room(priority=0)
    assert batcher.make_room(priority=1).payload == "high"


def test_a_lower_limit_applies_to_the_batch():
    batcher = Batcher(BatchPolicy(max_batch=8, max_delay_ms=1000))
    for index in range(3):
        batcher.add(entry(payload=index))
    assert payloads(batcher.take(0.0, limit=1)) == [0]
    assert batcher.next_wakeup(0.0, limit=1) == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 0},
        {"max_batch": 2.0},
        {"max_queue": 0},
        {"max_delay_ms": -1},
        {"max_delay_ms": math.nan},
        {"aging_ms": 0},
        {"on_full": "panic"},
        {"preferred_batch": (9,)},
        {"min_free_memory_share": 1.0},
    ],
)
def test_policies_are_checked(options):
    with pytest.raises(SpecError, match=next(iter(options))):
        BatchPolicy(**options)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "take", "wait", "cancel"]),
        st.sampled_from(KEYS),
        st.integers(1, 4),
        st.integers(-1, 2),
        st.sampled_from([None, None, 3.0, 15.0]),
        st.floats(0.0, 12.0),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.integers(4, 8), st.sampled_from([(), (2,), (2, 4)]))
def test_nothing_is_lost_or_duplicated_and_order_holds(events, max_batch, preferred):
    """Any interleaving: each entry leaves exactly once, one key per batch, at most max_batch rows, FIFO."""
    policy = BatchPolicy(max_batch=max_batch, max_delay_ms=5, max_queue=16, preferred_batch=preferred, aging_ms=20)
    batcher = Batcher(policy)
    now, added, gone = 0.0, [], []

    def take(flush: bool) -> bool:
        batch = batcher.take(now, flush=flush)
        gone.extend(batch)
        assert len({item.key for item in batch}) <= 1
        assert sum(item.rows for item in batch) <= max_batch
        for before, after in itertools.pairwise(batch):
            assert before.order < after.order
        return bool(batch)

    for kind, key, rows, priority, deadline_ms, wait_ms in events:
        if kind == "add":
            deadline = math.inf if deadline_ms is None else now + deadline_ms / 1000
            item = entry(key, rows=rows, at=now, priority=priority, deadline=deadline, payload=len(added))
            try:
                batcher.add(item)
                added.append(item)
            except QueueFull:
                assert len(batcher) == 16
        elif kind == "take":
            take(False)
        elif kind == "cancel" and added:
            if batcher.remove(added[rows % len(added)]):
                gone.append(added[rows % len(added)])
        else:
            now += wait_ms / 1000
            gone.extend(batcher.expire(now))
            wake = batcher.next_wakeup(now)
            assert (wake is None) == (len(batcher) == 0)
            if wake is not None:
                assert wake >= now
                # At the time it asked for, there is something to do; a moment before there is not.
                assert wake == now or not batcher.take(now)
        assert len(batcher) == len(added) - len(gone)
    while take(True):
        pass
    assert len(batcher) == 0
    assert sorted(item.payload for item in gone) == [item.payload for item in added]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.05), st.sampled_from(KEYS)), min_size=1, max_size=60), st.floats(0.001, 0.02))
def test_waiting_is_bounded_when_the_engine_keeps_up(arrivals, run_s):
    """Simulation of an owner thread: below capacity no wait exceeds max_delay plus the runs that were in the way."""
    policy = BatchPolicy(max_batch=64, max_delay_ms=10, max_queue=1000)
    batcher = Batcher(policy)
    times, now = [], 0.0
    for gap, _ in arrivals:
        now += gap
        times.append(now)
    pending = [(at, key) for at, (_, key) in zip(times, arrivals, strict=True)]
    now, waits = 0.0, []
    while pending or len(batcher):
        while pending and pending[0][0] <= now:
            at, key = pending.pop(0)
            batcher.add(entry(key, at=at))
        batch = batcher.take(now)
        if batch:
            waits.extend(now - item.arrival_s for item in batch)
            now += run_s
            continue
        wake = batcher.next_wakeup(now)
        following = pending[0][0] if pending else math.inf
        now = min(following, math.inf if wake is None else wake)
    # Three keys, so at most one run under way and one of each other key can stand before a due batch.
    assert max(waits) <= 0.010 + len(KEYS) * run_s + 1e-9
    assert len(waits) == len(arrivals)
