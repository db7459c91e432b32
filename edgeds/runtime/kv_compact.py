"""Forget some tokens of a sequence and close the gaps in its own pages."""

from __future__ import annotations

import numpy as np

from edgeds.errors import PoolExhausted, SpecError
from edgeds.runtime.kv_layout import PageMover, make_slots
from edgeds.runtime.kv_prefix import PrefixEntry
from edgeds.runtime.kv_sequence import KvSequence


def compact_sequence(sequence: KvSequence, keep: np.ndarray, *, store: PageMover | None) -> int:
    """Keep only the cached tokens ``keep`` (int64 indices, rising) and return how many were forgotten.

    Tokens move down in order and keep their keys, so their absolute positions stay. Pages before the first gap are not
    touched. From there on only pages of the sequence's own are written: a shared page is left to the others, and its
    tokens move into a spare page of this sequence or a new one. Raises PoolExhausted, with nothing changed.
    """
    check_keep(sequence, keep)
    page, length = sequence.layout.page, sequence.length
    gone = length - len(keep)
    if not gone:
        return 0
    unmoved = int(np.count_nonzero(keep == np.arange(len(keep))))  # rising indices: once one is off, all after it are
    first = unmoved // page  # the first block that is written, or cut short
    blocks = sequence.layout.pages_for(len(keep))
    own = own_pages(sequence, first)
    spare = [sequence.pages[block] for block in range(blocks, len(sequence.pages)) if block in own]
    to_replace = [block for block in range(first, blocks) if block not in own]
    lacking = len(to_replace) - len(spare)
    table = sequence.table
    if lacking > table.available:
        raise PoolExhausted(
            f"evicting from KV sequence {sequence.number} needs {lacking} pages of its own in place of shared ones, "
            f"and {table.available} are left: preempt or close a sequence"
        )
    for block in sorted(own, reverse=True):  # children before parents
        table.unregister(sequence.pages[block])
    old = list(sequence.pages)
    targets = old[:blocks]
    reused = set()
    for block in to_replace:
        if spare:
            targets[block] = spare.pop()
            reused.add(targets[block])
        else:
            targets[block] = table.take()
    if store is not None:
        source = make_slots(old, keep[first * page :], page=page)
        store.move(source, make_slots(targets, np.arange(first * page, len(keep)), page=page))
    for block in range(len(old) - 1, first - 1, -1):
        if old[block] not in reused and (block >= blocks or targets[block] != old[block]):
            table.drop(old[block])
    sequence.kept = sequence.cached_positions[keep]
    sequence.pages = targets
    sequence.length = len(keep)
    del sequence.chain[first:]
    sequence.is_shareable = False
    return gone


def own_pages(sequence: KvSequence, first: int) -> set[int]:
    """Blocks from ``first`` on whose pages this sequence can have to itself.

    An entry of the index only stands in the way if something other than this sequence's own next page follows it.
    """
    table = sequence.table
    own: set[int] = set()
    freed_parent: PrefixEntry | None = None
    for block in range(len(sequence.pages) - 1, first - 1, -1):
        page = sequence.pages[block]
        entry = table.entries[page]
        followers = 0 if entry is None else entry.children - (freed_parent is entry)
        if table.refs[page] == 1 and not followers:
            own.add(block)
            freed_parent = None if entry is None else entry.parent
        else:
            freed_parent = None
    return own


def check_keep(sequence: KvSequence, keep: np.ndarray) -> None:
    """Raise SpecError unless ``keep`` holds rising indices of cached tokens."""
    sequence.check_open()
    valid = keep.ndim == 1 and keep.dtype.kind in "iu"
    if valid and len(keep):
        valid = bool(keep[0] >= 0 and keep[-1] < sequence.length and np.all(np.diff(keep) > 0))
    if not valid:
        raise SpecError(
            f"KV sequence {sequence.number}: the tokens to keep must be rising whole numbers below {sequence.length}"
        )
