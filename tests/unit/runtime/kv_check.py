"""What must hold in a KV pool after any operation, and a plain model of what its sequences contain."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from edgeds.runtime.kv_layout import KvLayout
from edgeds.runtime.kv_pool import KvPool
from edgeds.runtime.kv_sequence import KvSequence
from edgeds.runtime.kv_store import KvStore

SMALL = KvLayout(layers=2, kv_heads=1, head_dim=2, page=4)


def check_pool(pool: KvPool) -> None:
    """No page is lost, leaked, counted wrongly or written by two."""
    table, page = pool._table, pool.layout.page
    live = list(pool._live.values())
    holders = Counter(held for sequence in live for held in sequence.pages)
    assert table.refs == [holders[number] for number in range(table.count)]
    free, cached = set(table.free), set(table.cached)
    assert len(free) == len(table.free)
    assert not free & cached
    assert not (free | cached) & set(holders)
    assert free | cached | set(holders) == set(range(table.count))
    assert table.shared == sum(count > 1 for count in holders.values())
    assert table.used == len(holders)
    for sequence in live:
        assert len(set(sequence.pages)) == len(sequence.pages)
        assert sequence.length <= sequence.capacity
        assert len(sequence.block_table) == -(-sequence.length // page)
        assert [entry.page for entry in sequence.chain] == sequence.pages[: len(sequence.chain)]
        for spare in sequence.pages[-(-sequence.length // page) :]:
            assert table.is_writable(spare), "a page ahead of the tokens is this sequence's alone"
    check_index(pool)


def check_index(pool: KvPool) -> None:
    table = pool._table
    entries = [entry for entry in table.entries if entry is not None]
    assert all(table.entries[number] is not None for number in table.cached), "a cached page is one the index knows"
    assert all(table.entries[number] is None for number in table.free)
    if table.index is None:
        assert not entries
        return
    assert len(table.index) == len(entries)
    children = Counter(id(entry.parent) for entry in entries if entry.parent is not None)
    for number, entry in enumerate(table.entries):
        if entry is not None:
            assert entry.page == number
            assert entry.children == children[id(entry)]
            assert entry.parent is None or table.entries[entry.parent.page] is entry.parent
    if table.cached:
        oldest = table.entries[next(iter(table.cached))]
        assert oldest is not None
        assert oldest.children == 0, "the next page to be evicted is the end of a prefix"


def mix(state: int, value: int) -> int:
    return zlib.crc32(value.to_bytes(8, "little"), state)


@dataclass(kw_only=True)
class PlainSequence:
    """What a cache without pages would hold. A token's numbers depend on all that came before it, as in a decoder."""

    tokens: list[int]
    states: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    state: int = 0
    done: int = 0

    def add(self, tokens: list[int]) -> np.ndarray:
        start = len(self.states)
        for token in tokens:
            self.state = mix(self.state, token)
            self.states.append(self.state)
            self.positions.append(self.done)
            self.done += 1
        if self.done > len(self.tokens):
            self.tokens += tokens[len(tokens) - (self.done - len(self.tokens)) :]
        return numbers(self.states[start:])

    def take_back(self, count: int) -> None:
        keep = len(self.states) - count
        del self.states[keep:], self.positions[keep:], self.tokens[self.done - count :]
        self.done -= count
        self.state = self.states[-1] if self.states else 0

    def forget(self, keep: list[int]) -> None:
        self.states = [self.states[index] for index in keep]
        self.positions = [self.positions[index] for index in keep]
        self.state = mix(self.state, 7919)

    def restart(self) -> None:
        self.states, self.positions, self.state, self.done = [], [], 0, 0

    def begin_with(self, count: int) -> None:
        """What a cached prefix of ``count`` tokens must contain."""
        self.add(self.tokens[:count])

    def twin(self) -> PlainSequence:
        return PlainSequence(
            tokens=list(self.tokens),
            states=list(self.states),
            positions=list(self.positions),
            state=self.state,
            done=self.done,
        )


def numbers(states: list[int]) -> np.ndarray:
    """float32 [1, tokens, 2] of one KV head: exact, different for every state."""
    return np.array([[state & 0xFFFF, state >> 16] for state in states], np.float32).reshape(1, -1, 2)


def step(pool: KvPool, store: KvStore, sequence: KvSequence, plain: PlainSequence, tokens: list[int]) -> None:
    """Reserve, 'run' and store ``tokens``, commit."""
    pool.reserve(sequence, len(tokens))
    fresh = plain.add(tokens)
    layers = [fresh + layer for layer in range(pool.layout.layers)]
    store.write(sequence.slots(len(tokens)), layers, [-layer for layer in layers])
    pool.commit(sequence, tokens)


def check_contents(store: KvStore, sequence: KvSequence, plain: PlainSequence) -> None:
    """The pages of a sequence, read through ``feeds`` and the block table, hold what the plain cache would."""
    assert sequence.length == len(plain.states)
    assert sequence.position == plain.done
    assert sequence.tokens.tolist() == plain.tokens
    assert sequence.cached_positions.tolist() == plain.positions
    feeds, expected = store.feeds(), numbers(plain.states)
    for layer in range(store.layout.layers):
        keys = feeds[f"k_pages.{layer}"][sequence.block_table]  # [blocks, heads, dim, page]
        values = feeds[f"v_pages.{layer}"][sequence.block_table]  # [blocks, heads, page, dim]
        flat_keys = keys.transpose(1, 0, 3, 2).reshape(1, -1, 2)[:, : sequence.length]
        flat_values = values.transpose(1, 0, 2, 3).reshape(1, -1, 2)[:, : sequence.length]
        np.testing.assert_array_equal(flat_keys, expected + layer)
        np.testing.assert_array_equal(flat_values, -(expected + layer))
