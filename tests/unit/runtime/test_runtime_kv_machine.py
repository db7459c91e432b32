"""No page leaks, is lost or is shared wrongly under any interleaving, and contents equal those of a plain cache."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_check import SMALL, PlainSequence, check_contents, check_pool, step

from edgeds.errors import PoolExhausted
from edgeds.runtime.kv_layout import KvLayout
from edgeds.runtime.kv_pool import KvPool
from edgeds.runtime.kv_sequence import KvSequence
from edgeds.runtime.kv_store import KvStore

TOKENS = st.lists(st.integers(0, 1), max_size=14)


class PoolMachine(RuleBasedStateMachine):
    """Two-letter prompts, so that prefixes meet all the time, in a pool that is always nearly full."""

    @initialize(pages=st.integers(3, 12), prefix_cache=st.booleans(), clash=st.booleans())
    def start(self, pages: int, prefix_cache: bool, clash: bool) -> None:
        self.store = KvStore(SMALL, pages)
        digest = (lambda parent, tokens: bytes([(len(parent) + sum(tokens)) % 3])) if clash else None
        extra = {} if digest is None else {"digest": digest}
        self.pool = KvPool(SMALL, pages=pages, store=self.store, prefix_cache=prefix_cache, **extra)
        self.live: list[tuple[KvSequence, PlainSequence]] = []

    def pick(self, data: st.DataObject) -> tuple[KvSequence, PlainSequence]:
        return self.live[data.draw(st.integers(0, len(self.live) - 1))]

    @rule(tokens=TOKENS, reserve=st.integers(0, 9))
    def open(self, tokens: list[int], reserve: int) -> None:
        expected = self.pool.find_prefix(tokens)
        try:
            sequence = self.pool.open(tokens, reserve=reserve)
        except PoolExhausted:
            return
        assert sequence.cached_tokens == expected
        assert sequence.capacity >= expected + reserve
        plain = PlainSequence(tokens=list(tokens))
        plain.begin_with(expected)
        self.live.append((sequence, plain))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=TOKENS)
    def advance(self, data: st.DataObject, more: list[int]) -> None:
        sequence, plain = self.pick(data)
        tokens = (sequence.pending or more)[: data.draw(st.integers(0, 9))]
        before = sequence.block_table.tolist()
        try:
            step(self.pool, self.store, sequence, plain, tokens)
        except PoolExhausted:
            assert sequence.block_table.tolist() == before

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(0, 9))
    def reserve_only(self, data: st.DataObject, count: int) -> None:
        sequence, _ = self.pick(data)
        try:
            self.pool.reserve(sequence, count)
        except PoolExhausted:
            return
        assert len(sequence.slots(count)) == count

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        sequence, plain = self.pick(data)
        if sequence.pending:
            return
        last = 0  # tokens since the last gap that an eviction left
        for later, earlier in pairwise([plain.done, *reversed(plain.positions)]):
            if later - earlier != 1:
                break
            last += 1
        count = data.draw(st.integers(0, last))
        self.pool.rollback(sequence, count)
        plain.take_back(count)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence, plain = self.pick(data)
        self.live.append((self.pool.fork(sequence), plain.twin()))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        chosen = self.pick(data)
        self.live.remove(chosen)
        self.pool.close(chosen[0])
        self.pool.close(chosen[0])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        sequence, plain = self.pick(data)
        keep = [index for index in range(sequence.length) if data.draw(st.booleans())]
        try:
            gone = self.pool.compact(sequence, np.array(keep, np.int64))
        except PoolExhausted:
            return
        assert gone == len(plain.states) - len(keep)
        if gone:
            plain.forget(keep)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        sequence, plain = self.pick(data)
        self.pool.preempt(sequence)
        plain.restart()
        assert sequence.pending == plain.tokens
        if data.draw(st.booleans()):
            plain.begin_with(self.pool.resume(sequence))

    @rule(count=st.none() | st.integers(0, 3))
    def drop_cache(self, count: int | None) -> None:
        self.pool.drop_cache(count)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), limit=st.integers(0, 3))
    def release_past(self, data: st.DataObject, limit: int) -> None:
        chosen = self.pick(data)
        if self.pool.release_past(chosen[0], limit):
            self.live.remove(chosen)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            check_pool(self.pool)
            for sequence, plain in self.live:
                check_contents(self.store, sequence, plain)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for sequence, _ in self.live:
                self.pool.close(sequence)
            self.pool.drop_cache()
            check_pool(self.pool)
            stats = self.pool.stats()
            assert (stats.free, stats.sequences, stats.tokens) == (stats.pages, 0, 0)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_soak_of_5000_random_requests_leaks_nothing() -> None:
    """Joins, cancels in the middle, rejected drafts, forks, preemptions, evictions and step limits."""
    rng = random.Random(7)
    pool = KvPool(KvLayout(layers=1, kv_heads=1, head_dim=1, page=16), pages=40, watermark=0.05)
    heads = [[rng.randrange(1000) for _ in range(rng.randrange(10, 120))] for _ in range(6)]
    live: list[KvSequence] = []
    opened = 0
    started = time.process_time()
    while opened < 5000 or live:
        if opened < 5000 and len(live) < 16:
            prompt = rng.choice(heads) + [rng.randrange(1000) for _ in range(rng.randrange(1, 30))]
            if pool.can_admit(len(prompt), prompt=prompt) or not live:
                live.append(pool.open(prompt, priority=rng.randrange(3), max_tokens=400))
                opened += 1
        sequence = rng.choice(live)
        if not sequence.pages:
            pool.resume(sequence)
        tokens = sequence.pending[:64] or [rng.randrange(1000) for _ in range(rng.randrange(1, 5))]
        try:
            pool.reserve(sequence, len(tokens))
        except PoolExhausted:
            pool.preempt(pool.preempt_candidate(exclude=[sequence]) or sequence)
            continue
        pool.commit(sequence, tokens)
        _wander(pool, sequence, live, rng)
        if opened % 500 == 0:
            check_pool(pool)
    seconds = time.process_time() - started
    stats = pool.stats()
    pool.drop_cache()
    check_pool(pool)
    assert pool.stats().free == 40
    assert stats.sequences == 0
    assert len(pool._table.index or ()) == 0, "nothing is remembered of pages that are free"
    assert min(stats.hit_tokens, stats.evictions, stats.preemptions, stats.forced_releases, stats.copies) > 0
    assert seconds < 10


def _wander(pool: KvPool, sequence: KvSequence, live: list[KvSequence], rng: random.Random) -> None:
    chance = rng.random()
    if chance < 0.1 and not sequence.pending:
        pool.rollback(sequence, min(2, sequence.length))
    elif chance < 0.13 and len(live) < 16:
        live.append(pool.fork(sequence))
    elif chance < 0.16 and sequence.length > 40:
        with suppress(PoolExhausted):  # where another sequence holds the pages that would have to be replaced
            pool.compact(sequence, np.r_[:4, sequence.length - 20 : sequence.length])
    if pool.release_past(sequence, 12):
        live.remove(sequence)
    elif chance > 0.8:
        live.remove(sequence)
        pool.close(sequence)


def test_threads_share_one_pool() -> None:
    """One lock: threads that open, step and close at once, with a reader beside them, leave a sound pool."""
    pool = KvPool(SMALL, pages=64)
    failures: list[BaseException] = []
    done = threading.Event()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(120):
                try:
                    sequence = pool.open([rng.randrange(2) for _ in range(12)], reserve=12)
                    pool.commit(sequence, sequence.pending)
                    twin = pool.fork(sequence)
                    pool.reserve(twin, 3)
                    pool.commit(twin, [5, 6, 7])
                    pool.close(twin)
                    pool.close(sequence)
                except PoolExhausted:
                    continue
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            failures.append(error)

    def watch() -> None:
        while not done.is_set():
            stats = pool.stats()
            if stats.used + stats.cached + stats.free != stats.pages:
                failures.append(AssertionError(stats))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in (*workers, watcher):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    watcher.join()
    assert not failures
    for sequence in list(pool._live.values()):
        pool.close(sequence)
    check_pool(pool)
    assert pool.stats().used == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_taking_and_giving_back_a_page_takes_constant_time(prefix_cache: bool) -> None:
    """The time per page does not grow with the pool: 100 times the pages, less than 20 times the time of one page."""

    def per_page_s(pages: int) -> float:
        pool = KvPool(KvLayout(layers=1, kv_heads=1, head_dim=1, page=16), pages=pages, prefix_cache=prefix_cache)
        best = float("inf")
        for _ in range(5):
            started = time.process_time()
            sequence = pool.open((), reserve=pages * 16)
            pool.close(sequence)
            best = min(best, (time.process_time() - started) / pages)
        return best

    assert per_page_s(100_000) < 20 * max(per_page_s(1000), 1e-7)
