"""The KV pool as its users see it: sharing, copy-on-write, admission, preemption, figures and refusals."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from kv_check import SMALL, PlainSequence, check_contents, check_pool, step

from edgeds.errors import EdgedsError, InputError, PoolExhausted, SpecError
from edgeds.runtime.kv_pool import KvPool
from edgeds.runtime.kv_sequence import KvSequence
from edgeds.runtime.kv_store import KvStore

PROMPT = list(range(10))


def filled(pool: KvPool, tokens: list[int], **options: int) -> KvSequence:
    """A sequence whose tokens are all in the pages."""
    sequence = pool.open(tokens, **options)
    pool.reserve(sequence, len(sequence.pending))
    pool.commit(sequence, sequence.pending)
    return sequence


def test_a_prompt_seen_before_is_prefilled_once() -> None:
    pool = KvPool(SMALL, pages=8)
    first = filled(pool, PROMPT)
    assert (first.cached_tokens, first.length, len(first.block_table)) == (0, 10, 3)
    second = pool.open([*PROMPT[:9], 77, 78])
    assert second.cached_tokens == 8, "two whole pages"
    assert second.pending == [8, 77, 78]
    assert second.block_table.tolist() == first.block_table.tolist()[:2]
    assert pool.stats().shared == 2
    pool.close(first)
    third = pool.open(PROMPT[:8])
    assert third.pending == PROMPT[4:8], "the last token is always computed: its logits are wanted"
    assert pool.find_prefix(PROMPT) == 8


def test_the_prefix_outlives_its_sequence_until_the_pages_are_needed() -> None:
    """Least recently used first, and ends of prefixes before their beginnings."""
    pool = KvPool(SMALL, pages=6)
    for start in (0, 100):
        pool.close(filled(pool, list(range(start, start + 12))))
    assert (pool.stats().cached, pool.stats().free) == (6, 0)
    pool.close(pool.open(list(range(13))))  # used again: now the younger one
    pool.close(pool.open([500], reserve=4))
    assert pool.stats().evictions == 1
    assert pool.find_prefix(list(range(100, 113))) == 8
    assert pool.find_prefix(list(range(13))) == 12
    assert pool.drop_cache() == 5
    assert pool.stats().free == 6


def test_two_sequences_that_fill_the_same_page_at_once_keep_one() -> None:
    pool = KvPool(SMALL, pages=8)
    pair = [pool.open(PROMPT, reserve=10) for _ in range(2)]
    for sequence in pair:
        pool.commit(sequence, PROMPT)
    assert pair[0].block_table.tolist()[:2] == pair[1].block_table.tolist()[:2]
    assert pool.stats().used == 4
    check_pool(pool)


def test_a_hash_collision_cannot_mix_two_prompts() -> None:
    pool = KvPool(SMALL, pages=8, digest=lambda parent, tokens: b"same")
    first = filled(pool, PROMPT)
    other = pool.open([9, 9, 9, 9, 9, 9])
    assert other.cached_tokens == 0
    assert pool.open(PROMPT).cached_tokens == 4, "only the first page could be stored under that digest"
    pool.reserve(other, 6)
    pool.commit(other, [9] * 6)
    assert not set(other.pages) & set(first.pages)
    check_pool(pool)


def test_a_fork_copies_only_the_partial_last_page_and_only_when_it_goes_on() -> None:
    store = KvStore(SMALL, 8)
    pool = KvPool(SMALL, pages=8, store=store)
    parent = pool.open(PROMPT)
    plain = PlainSequence(tokens=list(PROMPT))
    step(pool, store, parent, plain, PROMPT)
    twin, twin_plain = pool.fork(parent), plain.twin()
    assert (pool.stats().used, pool.stats().shared) == (3, 3)
    with pytest.raises(SpecError, match="call reserve first, and again after a fork"):
        twin.slots(1)
    with pytest.raises(SpecError, match="call reserve first"):
        pool.commit(parent, [1])
    step(pool, store, twin, twin_plain, [50, 51])
    assert (pool.stats().copies, pool.stats().used) == (1, 4)
    step(pool, store, parent, plain, [60])
    assert pool.stats().copies == 1, "the last holder writes in place"
    check_contents(store, parent, plain)
    check_contents(store, twin, twin_plain)


def test_rejected_drafts_are_taken_back_and_their_pages_too() -> None:
    store = KvStore(SMALL, 8)
    pool = KvPool(SMALL, pages=8, store=store)
    sequence = pool.open(PROMPT)
    plain = PlainSequence(tokens=list(PROMPT))
    step(pool, store, sequence, plain, PROMPT)
    step(pool, store, sequence, plain, [20, 21, 22, 23])
    reader = pool.open([*PROMPT, 20, 21, 22])  # shares the page that is about to be taken back in part
    assert reader.cached_tokens == 12
    pool.rollback(sequence, 3)
    plain.take_back(3)
    assert (sequence.length, len(sequence.pages)) == (11, 3)
    step(pool, store, sequence, plain, [30])
    check_contents(store, sequence, plain)
    reader_plain = PlainSequence(tokens=reader.tokens.tolist())
    reader_plain.begin_with(12)
    check_contents(store, reader, reader_plain)
    for count, said in ((13, "cannot take back 13 of 12"), (-1, "cannot take back -1")):
        with pytest.raises(SpecError, match=said):
            pool.rollback(sequence, count)
    with pytest.raises(SpecError, match="with 1 pending"):
        pool.rollback(reader, 1)


def test_tokens_take_less_than_one_page_more_than_the_ideal() -> None:
    pool = KvPool(SMALL, pages=64)
    live = [filled(pool, list(range(start, start + start % 7 + 1))) for start in range(20)]
    ideal = sum(sequence.length for sequence in live)
    assert pool.stats().tokens == ideal
    assert pool.stats().used * SMALL.page < ideal + len(live) * SMALL.page


def test_exhaustion_says_what_is_left_and_changes_nothing() -> None:
    pool = KvPool(SMALL, pages=3)
    first = filled(pool, PROMPT[:6])
    with pytest.raises(PoolExhausted, match=r"8 more tokens .* need 2 pages, and 1 of 3 are left: close or preempt"):
        pool.open([70], reserve=8)
    with pytest.raises(PoolExhausted, match="need 4 pages, and 1 of 3 are left: the pool is too small"):
        pool.open([70], reserve=16)
    with pytest.raises(PoolExhausted, match="need 2 pages"):
        pool.reserve(first, 7)
    assert issubclass(PoolExhausted, EdgedsError)
    stats = pool.stats()
    assert (stats.sequences, stats.used, stats.free, stats.exhausted) == (1, 2, 1, 3)
    pool.reserve(first, 6)
    check_pool(pool)


def test_admission_leaves_the_watermark_to_those_that_run() -> None:
    pool = KvPool(SMALL, pages=10, watermark=0.2)
    assert pool.can_admit(32)
    assert not pool.can_admit(33)
    holder = filled(pool, list(range(20)))
    assert not pool.can_admit(20)
    assert pool.can_admit(20, prompt=list(range(20))), "four of its pages are held already"
    pool.close(holder)
    assert not pool.can_admit(36, prompt=list(range(20))), "cached pages count as free, and only once"


def test_the_lowest_priority_is_preempted_and_recomputed_on_its_cached_prefix() -> None:
    store = KvStore(SMALL, 8)
    pool = KvPool(SMALL, pages=8, store=store)
    important = pool.open([1], reserve=1, priority=2)
    old = pool.open(PROMPT, priority=1)
    plain = PlainSequence(tokens=list(PROMPT))
    step(pool, store, old, plain, PROMPT)
    young = pool.open([3], reserve=1, priority=1)
    idle = pool.open([4], priority=0)
    assert pool.preempt_candidate() is young, "lowest priority with pages, then youngest"
    assert pool.preempt_candidate(exclude=[young]) is old
    assert pool.preempt_candidate(below=1) is None
    step(pool, store, old, plain, [40, 41])
    pool.preempt(old)
    plain.restart()
    assert (old.pages, old.length, old.pending) == ([], 0, [*PROMPT, 40, 41])
    with pytest.raises(SpecError, match="has pages; only a preempted"):
        pool.resume(young)
    assert pool.resume(old, reserve=4) == 8
    plain.begin_with(8)
    step(pool, store, old, plain, old.pending)
    check_contents(store, old, plain)
    for sequence in (important, old, young, idle):
        pool.close(sequence)
    assert pool.preempt_candidate() is None
    assert pool.stats().preemptions == 1


def test_a_resume_that_does_not_fit_leaves_the_sequence_preempted() -> None:
    pool = KvPool(SMALL, pages=4)
    sequence = filled(pool, PROMPT)
    pool.preempt(sequence)
    with pytest.raises(PoolExhausted):
        pool.resume(sequence, reserve=16)
    assert (sequence.pages, sequence.length, sequence.pending) == ([], 0, PROMPT)
    assert pool.stats().cached == 2
    check_pool(pool)


def test_limits_stop_a_sequence_and_force_its_release() -> None:
    pool = KvPool(SMALL, pages=8)
    with pytest.raises(InputError, match="the prompt has 10 tokens, and the sequence's limit is 9"):
        pool.open(PROMPT, max_tokens=9)
    sequence = filled(pool, PROMPT, max_tokens=11)
    with pytest.raises(InputError, match="12 tokens, and its limit is 11"):
        pool.reserve(sequence, 2)
    pool.reserve(sequence, 1)
    with pytest.raises(InputError, match="12 tokens, and its limit is 11"):
        pool.commit(sequence, [1, 2])
    assert not pool.release_past(sequence, 1)
    pool.commit(sequence, [1])
    assert pool.release_past(sequence, 1)
    stats = pool.stats()
    assert (sequence.is_open, stats.used, stats.forced_releases) == (False, 0, 1)
    with pytest.raises(SpecError, match="is closed; open a new one"):
        pool.reserve(sequence, 1)
    pool.close(sequence)  # its owner may still close it


@pytest.mark.parametrize("tokens", [[1, -2], [1.5], ["a"], "ab", b"abcdefgh", [2**63], [[1]], None, np.ones((2, 2))])
def test_token_ids_that_are_none_are_refused(tokens: object) -> None:
    pool = KvPool(SMALL, pages=2)
    with pytest.raises(InputError, match="token ids must be"):
        pool.open(tokens)
    assert pool.stats().sequences == 0


def test_any_list_of_whole_numbers_is_taken() -> None:
    pool = KvPool(SMALL, pages=2)
    for tokens in ((), [5], (5,), np.array([5], np.int32), array("i", [5]), iter([5]), range(5, 6)):
        assert pool.open(tokens).pending in ([], [5])


def test_misuse_is_named() -> None:
    pool, other = KvPool(SMALL, pages=4), KvPool(SMALL, pages=4)
    sequence = pool.open(PROMPT[:3])
    with pytest.raises(SpecError, match="belongs to another pool"):
        other.close(sequence)
    with pytest.raises(SpecError, match="cannot reserve -1"):
        pool.reserve(sequence, -1)
    with pytest.raises(SpecError, match="no pages of its own for 3 more"):
        pool.commit(sequence, PROMPT[:3])
    with pytest.raises(SpecError, match="-1 tokens"):
        sequence.slots(-1)
    pool.reserve(sequence, 3)
    with pytest.raises(SpecError, match="are not those pending from position 0"):
        pool.commit(sequence, [0, 9])
    for pages in (0, True, 2**40, 1.0):
        with pytest.raises(SpecError, match="pages must be a whole number"):
            KvPool(SMALL, pages=pages)
    for watermark in (-0.1, 1.0, float("nan")):
        with pytest.raises(SpecError, match="watermark must be"):
            KvPool(SMALL, pages=1, watermark=watermark)
    check_pool(pool)


def test_figures_have_names_for_prometheus() -> None:
    pool = KvPool(SMALL, pages=8)
    pool.close(filled(pool, PROMPT))
    filled(pool, PROMPT)
    metrics = pool.stats().metrics()
    assert metrics["edgeds_kv_occupancy_ratio"] == 3 / 8
    assert (metrics["edgeds_kv_hit_tokens_total"], metrics["edgeds_kv_miss_tokens_total"]) == (8, 12)
    assert (metrics["edgeds_kv_used"], metrics["edgeds_kv_peak_used"], metrics["edgeds_kv_free"]) == (3, 3, 5)
    assert metrics["edgeds_kv_page_bytes"] == SMALL.page_bytes
    assert all(name.replace("_", "").isalnum() and name.islower() for name in metrics)
