"""How sequences share pages: onto a cached prefix, full pages into the cache, and back."""

from __future__ import annotations

from array import array

from edgeds.runtime.kv_pages import PageTable
from edgeds.runtime.kv_prefix import PrefixEntry
from edgeds.runtime.kv_sequence import KvSequence


def match_prefix(table: PageTable, tokens: array[int], *, page: int) -> list[PrefixEntry]:
    """The entries of the longest cached prefix of whole pages, short of the last token (its logits are wanted)."""
    found: list[PrefixEntry] = []
    if table.index is None:
        return found
    parent: PrefixEntry | None = None
    for start in range(0, len(tokens) - page, page):
        parent = table.index.find(parent, tokens[start : start + page].tobytes())
        if parent is None:
            break
        found.append(parent)
    return found


def attach_prefix(sequence: KvSequence) -> None:
    """Put a sequence without pages on the longest cached prefix of its tokens."""
    page = sequence.layout.page
    sequence.chain = match_prefix(sequence.table, sequence.tokens, page=page)
    sequence.pages = [entry.page for entry in sequence.chain]
    for held in sequence.pages:
        sequence.table.share(held)
    sequence.length = sequence.position = sequence.cached_tokens = len(sequence.pages) * page


def share_full_pages(sequence: KvSequence) -> None:
    """Register full pages; one that the cache already has is given up for that one."""
    table, page = sequence.table, sequence.layout.page
    while table.index is not None and sequence.is_shareable and (len(sequence.chain) + 1) * page <= sequence.length:
        block = len(sequence.chain)
        parent = sequence.chain[-1] if block else None
        tokens = sequence.tokens[block * page : (block + 1) * page].tobytes()
        entry = table.index.find(parent, tokens)
        if entry is not None:
            table.share(entry.page)
            table.drop(sequence.pages[block])
            sequence.pages[block] = entry.page
        else:
            entry = table.index.add(parent, tokens, page=sequence.pages[block])
            if entry is None:
                sequence.is_shareable = False
                return
            table.register(entry.page, entry)
        sequence.chain.append(entry)


def drop_pages(sequence: KvSequence, *, first: int) -> None:
    """Give back the pages from block ``first`` on, last first, so that the cache forgets ends before beginnings."""
    while len(sequence.pages) > first:
        sequence.table.drop(sequence.pages.pop())


def empty_sequence(sequence: KvSequence) -> None:
    """Give back all pages and keep the tokens, all of them pending."""
    drop_pages(sequence, first=0)
    sequence.length = sequence.position = sequence.cached_tokens = 0
    sequence.chain = []
    sequence.kept = None
    sequence.is_shareable = sequence.table.index is not None
