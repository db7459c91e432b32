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


class Interleaving:
    """Any order of operations on a pool that is nearly full, with prompts whose beginnings meet all the time."""

    def start(self, rng: random.Random) -> None:
        pages = rng.randint(3, 14)
        self.store = KvStore(SMALL, pages)
        clash = {"digest": lambda parent, tokens: bytes([sum(tokens) % 3])} if rng.random() < 0.25 else {}
        self.pool = KvPool(SMALL, pages=pages, store=self.store, prefix_cache=rng.random() < 0.8, **clash)
        self.live: list[tuple[KvSequence, PlainSequence]] = []

    def draw_tokens(self, rng: random.Random) -> list[int]:
        """Mostly zeros: pages that look alike, in different places."""
        return [int(rng.random() < 0.05) for _ in range(rng.randint(0, 16))]

    def open(self, rng: random.Random) -> None:
        tokens, reserve = self.draw_tokens(rng), rng.choice([0, 0, 5])
        expected = self.pool.find_prefix(tokens)
        try:
            sequence = self.pool.open(tokens, reserve=reserve)
        except PoolExhausted:
            return
        assert sequence.cached_tokens == expected
        assert sequence.capacity >= expected + reserve
        plain = PlainSequence(tokens=tokens)
        plain.begin_with(expected)
        self.live.append((sequence, plain))

    def advance(self, rng: random.Random) -> None:
        sequence, plain = rng.choice(self.live)
        tokens = (sequence.pending or self.draw_tokens(rng))[: rng.randint(1, 16)]
        before = sequence.block_table.tolist()
        try:
            step(self.pool, self.store, sequence, plain, tokens)
        except PoolExhausted:
            assert sequence.block_table.tolist() == before

    def reserve_only(self, rng: random.Random) -> None:
        (sequence, _), count = rng.choice(self.live), rng.randint(0, 9)
        try:
            self.pool.reserve(sequence, count)
        except PoolExhausted:
            return
        assert len(sequence.slots(count)) == count

    def rollback(self, rng: random.Random) -> None:
        sequence, plain = rng.choice(self.live)
        if sequence.pending:
            return
        last = 0  # tokens since the last gap that an eviction left
        for later, earlier in pairwise([plain.done, *reversed(plain.positions)]):
            if later - earlier != 1:
                break
            last += 1
        count = rng.randint(0, last)
        self.pool.rollback(sequence, count)
        plain.take_back(count)

    def fork(self, rng: random.Random) -> None:
        sequence, plain = rng.choice(self.live)
        self.live.append((self.pool.fork(sequence), plain.twin()))

    def close(self, rng: random.Random) -> None:
        sequence, _ = self.live.pop(rng.randrange(len(self.live)))
        self.pool.close(sequence)
        self.pool.close(sequence)

    def compact(self, rng: random.Random) -> None:
        sequence, plain = rng.choice(self.live)
        share = rng.choice([0.3, 0.9])
        keep = [index for index in range(sequence.length) if rng.random() < share]
        try:
            gone = self.pool.compact(sequence, np.array(keep, np.int64))
        except PoolExhausted:
            return
        assert gone == len(plain.states) - len(keep)
        if gone:
            plain.forget(keep)

    def preempt(self, rng: random.Random) -> None:
        sequence, plain = rng.choice(self.live)
        self.pool.preempt(sequence)
        plain.restart()
        assert sequence.pending == plain.tokens
        if rng.random() < 0.5:
            plain.begin_with(self.pool.resume(sequence))

    def drop_cache(self, rng: random.Random) -> None:
        self.pool.drop_cache(rng.choice([None, 1, 2]))

    def release_past(self, rng: random.Random) -> None:
        chosen = rng.choice(self.live)
        if self.pool.release_past(chosen[0], rng.randint(1, 4)):
            self.live.remove(chosen)

    def check(self) -> None:
        check_pool(self.pool)
        for sequence, plain in self.live:
            check_contents(self.store, sequence, plain)

    def finish(self) -> None:
        for sequence, _ in self.live:
            self.pool.close(sequence)
        self.pool.drop_cache()
        check_pool(self.pool)
        stats = self.pool.stats()
        assert (stats.free, stats.sequences, stats.tokens) == (stats.pages, 0, 0)


ON_SEQUENCES = ("advance", "reserve_only", "rollback", "fork", "close", "compact", "preempt", "release_past")
WEIGHTS = (10, 1, 4, 2, 2, 2, 1, 1)
RANDOMS = st.randoms(use_true_random=False)


class PoolMachine(Interleaving, RuleBasedStateMachine):
    """The same operations in orders that Hypothesis chooses and makes short where one fails."""

    begin = initialize(rng=RANDOMS)(Interleaving.start)
    opening = rule(rng=RANDOMS)(Interleaving.open)
    dropping = rule(rng=RANDOMS)(Interleaving.drop_cache)
    holds = invariant()(Interleaving.check)

    @precondition(lambda self: self.live)
    @rule(rng=RANDOMS, name=st.sampled_from(ON_SEQUENCES))
    def operate(self, rng: random.Random, name: str) -> None:
        getattr(self, name)(rng)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.finish()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_operations_keeps_pages_and_contents(seed: int) -> None:
    """8 pools of 60 operations each: allocation, references, prefix sharing, copy-on-write, rollback, eviction,
    preemption with recompute, forced release and cache eviction, checked after every one of them."""
    rng = random.Random(seed)
    for _ in range(8):
        run = Interleaving()
        run.start(rng)
        for _ in range(60):
            if not run.live or rng.random() < 0.2:
                run.open(rng)
            elif rng.random() < 0.03:
                run.drop_cache(rng)
            else:
                getattr(run, rng.choices(ON_SEQUENCES, WEIGHTS)[0])(rng)
            run.check()
        run.finish()


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
