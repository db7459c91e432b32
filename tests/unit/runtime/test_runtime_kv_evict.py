"""Eviction by accumulated attention: sinks, recent tokens, order and positions stay, shared pages are left alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_check import SMALL, PlainSequence, check_contents, check_pool, step

from edgeds.errors import InputError, PoolExhausted, SpecError
from edgeds.runtime.kv_evict import EvictionPolicy, TokenScores, choose_kept, evict_tokens
from edgeds.runtime.kv_pool import KvPool
from edgeds.runtime.kv_sequence import KvSequence
from edgeds.runtime.kv_store import KvStore

TIGHT = EvictionPolicy(budget=12, sinks=2, recent=4, slack=2)


def start(pages: int, tokens: list[int]) -> tuple[KvPool, KvStore, KvSequence, PlainSequence]:
    store = KvStore(SMALL, pages)
    pool = KvPool(SMALL, pages=pages, store=store)
    sequence = pool.open(tokens)
    plain = PlainSequence(tokens=list(tokens))
    step(pool, store, sequence, plain, tokens)
    return pool, store, sequence, plain


@settings(max_examples=80)
@given(
    scores=st.lists(st.floats(0, 1), max_size=60),
    sinks=st.integers(0, 5),
    recent=st.integers(0, 8),
    slack=st.integers(0, 4),
    room=st.integers(1, 20),
)
def test_sinks_recent_and_the_best_are_kept(
    scores: list[float], sinks: int, recent: int, slack: int, room: int
) -> None:
    policy = EvictionPolicy(budget=sinks + recent + slack + room, sinks=sinks, recent=recent, slack=slack)
    kept = choose_kept(np.array(scores), policy).tolist()
    length = len(scores)
    if length <= policy.budget:
        assert kept == list(range(length))
        return
    assert len(kept) == policy.budget - slack
    assert kept == sorted(set(kept))
    always = {*range(sinks), *range(length - recent, length)}
    assert always <= set(kept)
    lost = set(range(length)) - set(kept)
    best_lost = max(scores[index] for index in lost)
    assert all(scores[index] >= best_lost for index in set(kept) - always)


def test_a_sequence_stays_within_its_budget_and_its_contents_follow() -> None:
    """40 steps: length never above the budget afterwards, positions go on, contents equal those of a plain cache."""
    pool, store, sequence, plain = start(8, list(range(10)))
    scores, rng = TokenScores(), np.random.default_rng(3)
    for token in range(40):
        scores.add(rng.random((3, 4)), length=sequence.length)
        step(pool, store, sequence, plain, [token % 5])
        before = scores.values(sequence.length)
        if sequence.length > TIGHT.budget:
            plain.forget(choose_kept(before, TIGHT).tolist())
        gone = evict_tokens(pool, sequence, scores=scores, policy=TIGHT)
        assert gone in (0, 3)
        assert sequence.length <= TIGHT.budget
        assert sequence.position == 11 + token
        assert sequence.cached_positions[:2].tolist() == [0, 1]
        assert sequence.cached_positions[-4:].tolist() == [token + 7, token + 8, token + 9, token + 10]
        check_contents(store, sequence, plain)
        check_pool(pool)
    assert len(sequence.pages) == 3
    assert pool.stats().evicted_tokens == 50 - sequence.length


def test_tokens_that_others_share_are_left_to_them() -> None:
    pool, store, sequence, plain = start(10, list(range(10)))
    reader = pool.open(list(range(10)))
    reader_plain = PlainSequence(tokens=list(range(10)))
    reader_plain.begin_with(8)
    keep = [0, 1, 5, 8, 9]
    assert pool.compact(sequence, np.array(keep)) == 5
    plain.forget(keep)
    check_contents(store, sequence, plain)
    check_contents(store, reader, reader_plain)
    assert not set(sequence.pages) & set(reader.pages)
    assert pool.find_prefix(list(range(10))) == 8
    pool.reserve(sequence, 4)
    step(pool, store, sequence, plain, [1, 2, 3, 4])
    again = pool.open([0, 1, 5, 8, 9, 1, 2, 3, 4])
    assert again.cached_tokens == 0, "what follows an eviction is not what a prompt of these tokens would compute"
    check_pool(pool)


def test_eviction_in_a_full_pool_needs_no_page_of_its_own() -> None:
    pool, store, sequence, plain = start(3, list(range(12)))
    assert pool.stats().free == 0
    keep = [0, 1, 6, 7, 8, 10, 11]
    pool.compact(sequence, np.array(keep))
    plain.forget(keep)
    check_contents(store, sequence, plain)
    assert pool.stats().free == 1
    check_pool(pool)


def test_eviction_that_needs_a_page_and_finds_none_changes_nothing() -> None:
    pool, store, sequence, plain = start(3, list(range(12)))
    twin = pool.fork(sequence)
    with pytest.raises(PoolExhausted, match="needs 1 pages of its own in place of shared ones, and 0 are left"):
        pool.compact(sequence, np.array([0, 2, 3]))
    check_contents(store, sequence, plain)
    check_contents(store, twin, plain)
    check_pool(pool)
    pool.close(twin)
    assert pool.compact(sequence, np.array([0, 2, 3])) == 9


def test_a_rollback_stops_at_the_gap() -> None:
    pool, _, sequence, _ = start(6, list(range(12)))
    pool.compact(sequence, np.array([0, 1, 2, 9, 10, 11]))
    with pytest.raises(SpecError, match="some of the last 4 tokens were evicted"):
        pool.rollback(sequence, 4)
    pool.rollback(sequence, 3)
    assert (sequence.length, sequence.position, sequence.tokens.tolist()) == (3, 9, list(range(9)))


def test_recomputing_after_an_eviction_starts_from_all_tokens() -> None:
    pool, store, sequence, plain = start(6, list(range(12)))
    pool.compact(sequence, np.array([0, 1, 11]))
    pool.preempt(sequence)
    plain.restart()
    assert pool.resume(sequence) == 0
    step(pool, store, sequence, plain, sequence.pending)
    check_contents(store, sequence, plain)


def test_scores_accumulate_decay_and_follow() -> None:
    scores = TokenScores(decay=0.5)
    scores.add(np.array([[1, 2], [3, 9]], np.float32), length=3)
    scores.add(np.array([[1, 1], [1, 1]], np.float32), length=4)
    assert scores.values(6).tolist() == [1.5, 2, 2.5, 1, 0, 0]
    twin = scores.copy()
    scores.keep(np.array([0, 2, 4]), length=5)
    assert scores.values(3).tolist() == [1.5, 2.5, 0]
    assert twin.values(2).tolist() == [1.5, 2], "after a rollback to two tokens"
    scores.add(np.zeros((0, 4)), length=0)


def test_wrong_attention_and_policies_are_refused() -> None:
    scores = TokenScores()
    with pytest.raises(SpecError, match="4 places for 5 cached tokens"):
        scores.add(np.ones((1, 4)), length=5)
    for wrong in (np.nan, np.inf, -1.0):
        with pytest.raises(InputError, match="NaN, infinity or a negative weight"):
            scores.add(np.array([[0.5, wrong]]), length=2)
    assert scores.values(2).tolist() == [0, 0]
    with pytest.raises(SpecError, match="decay must be"):
        TokenScores(decay=0)
    with pytest.raises(SpecError, match="a budget of 60 tokens cannot hold 4 sinks, 64 recent tokens"):
        EvictionPolicy(budget=60)
    with pytest.raises(SpecError, match="sinks must be a whole number from 0, got -1"):
        EvictionPolicy(budget=100, sinks=-1)
    pool, _, sequence, _ = start(4, list(range(6)))
    for keep in ([0, 0], [1, 0], [-1, 2], [0, 6], [[0]], [0.5]):
        with pytest.raises(SpecError, match="must be rising whole numbers below 6"):
            pool.compact(sequence, np.array(keep))
