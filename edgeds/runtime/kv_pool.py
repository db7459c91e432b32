"""A fixed number of KV-cache pages, shared by many sequences without copies and without leaks."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np

from edgeds.errors import InputError, PoolExhausted, SpecError
from edgeds.runtime.kv_compact import compact_sequence
from edgeds.runtime.kv_layout import KvLayout, PageMover
from edgeds.runtime.kv_pages import PageTable
from edgeds.runtime.kv_prefix import Digest, PrefixIndex, chained_digest
from edgeds.runtime.kv_sequence import KvSequence, as_tokens
from edgeds.runtime.kv_share import attach_prefix, drop_pages, empty_sequence, match_prefix, share_full_pages
from edgeds.runtime.kv_stats import PoolStats


class KvPool:
    """Bookkeeping of the pages. Their contents are in ``store``, asked only to copy before a shared page changes.

    Thread-safe: one lock around every method, so another thread may close a sequence or read ``stats`` while one
    thread steps them. A single sequence is stepped by one thread at a time. What raises has changed nothing.

    ``watermark``: the share of all pages, from 0 to below 1, that ``can_admit`` leaves to the sequences that run.
    """

    def __init__(
        self,
        layout: KvLayout,
        *,
        pages: int,
        store: PageMover | None = None,
        prefix_cache: bool = True,
        watermark: float = 0.0,
        digest: Digest = chained_digest,
    ) -> None:
        if isinstance(pages, bool) or not isinstance(pages, int) or not 1 <= pages < 2**31:
            raise SpecError(f"KV pool: pages must be a whole number from 1, got {pages!r}")
        if not 0 <= watermark < 1:
            raise SpecError(f"KV pool: watermark must be from 0 to below 1, got {watermark!r}")
        self.layout = layout
        self.watermark = watermark
        self._store = store
        self._table = PageTable(pages, index=PrefixIndex(digest=digest) if prefix_cache else None)
        self._lock = threading.RLock()
        self._live: dict[int, KvSequence] = {}
        self._opened = 0
        self._peak_used = 0
        self._counts = dict.fromkeys(
            ("hit_tokens", "miss_tokens", "evicted_tokens", "copies", "preemptions", "forced_releases", "exhausted"), 0
        )

    def open(
        self, tokens: Iterable[int], *, reserve: int = 0, priority: int = 0, max_tokens: int | None = None
    ) -> KvSequence:
        """A sequence of ``tokens`` on the longest cached prefix of whole pages; ``pending`` is what is left to compute.

        At least the last token stays pending, since its logits are wanted. ``reserve``: pages for that many tokens
        after the cached ones are taken at once. ``max_tokens``: the most tokens it may ever have. ``priority``: the
        lowest is preempted first. Raises InputError, or PoolExhausted where the reserve does not fit.
        """
        known = as_tokens(tokens)
        if max_tokens is not None and len(known) > max_tokens:
            raise InputError(f"the prompt has {len(known)} tokens, and the sequence's limit is {max_tokens}")
        with self._lock:
            self._opened += 1
            sequence = KvSequence(
                layout=self.layout,
                table=self._table,
                number=self._opened,
                tokens=known,
                priority=priority,
                max_tokens=max_tokens,
            )
            self._live[sequence.number] = sequence
            try:
                attach_prefix(sequence)
                self._reserve(sequence, reserve)
            except (PoolExhausted, SpecError):
                self.close(sequence)
                raise
            self._count_prefix(sequence)
            return sequence

    def find_prefix(self, tokens: Iterable[int]) -> int:
        """How many of ``tokens`` a sequence opened now would find in the cache."""
        known = as_tokens(tokens)
        with self._lock:
            return len(match_prefix(self._table, known, page=self.layout.page)) * self.layout.page

    def reserve(self, sequence: KvSequence, count: int) -> None:
        """Make sure that ``count`` more tokens have pages of this sequence's own, copying a shared last page.

        Raises PoolExhausted, InputError past ``max_tokens``, SpecError for a closed sequence or a negative count.
        """
        with self._lock:
            self._check(sequence)
            self._reserve(sequence, count)

    def commit(self, sequence: KvSequence, tokens: Iterable[int]) -> None:
        """``tokens`` are now in the pages (reserved before, written by the store); full pages become shareable.

        Pending tokens must be committed as they are; after them any tokens may follow. A full page that the cache
        already has is given up for that one, so ``block_table`` may change. Raises SpecError or InputError.
        """
        new = as_tokens(tokens)
        with self._lock:
            self._check(sequence)
            sequence.check_room(len(new))
            sequence.check_limit(len(new))
            expected = sequence.tokens[sequence.position : sequence.position + len(new)]
            if new[: len(expected)] != expected:
                raise SpecError(
                    f"KV sequence {sequence.number}: the committed tokens are not those pending from position "
                    f"{sequence.position}"
                )
            sequence.tokens.extend(new[len(expected) :])
            if sequence.kept is not None:
                following = np.arange(sequence.position, sequence.position + len(new))
                sequence.kept = np.concatenate([sequence.kept, following])
            sequence.length += len(new)
            sequence.position += len(new)
            sequence.steps += 1
            share_full_pages(sequence)

    def rollback(self, sequence: KvSequence, count: int) -> None:
        """Take back the last ``count`` committed tokens (rejected drafts) and give back the pages beyond the rest.

        Raises SpecError when that many are not there, or where tokens are pending or were evicted in between.
        """
        with self._lock:
            self._check(sequence)
            kept = sequence.length - count
            if count < 0 or kept < 0 or sequence.position != len(sequence.tokens):
                raise SpecError(
                    f"KV sequence {sequence.number}: cannot take back {count} of {sequence.length} cached tokens with "
                    f"{len(sequence.tokens) - sequence.position} pending"
                )
            if count and sequence.cached_positions[kept] != sequence.position - count:
                raise SpecError(f"KV sequence {sequence.number}: some of the last {count} tokens were evicted")
            del sequence.tokens[sequence.position - count :]
            sequence.length = kept
            sequence.position -= count
            if sequence.kept is not None:
                sequence.kept = sequence.kept[:kept]
            del sequence.chain[kept // self.layout.page :]
            drop_pages(sequence, first=self.layout.pages_for(kept))

    def fork(self, sequence: KvSequence) -> KvSequence:
        """A second sequence with the same tokens on the same pages. Both must ``reserve`` before they go on.

        A partial last page is copied when the first of them does so. Takes no page, so it never fails for want of one.
        """
        with self._lock:
            self._check(sequence)
            self._opened += 1
            twin = KvSequence(
                layout=self.layout,
                table=self._table,
                number=self._opened,
                tokens=sequence.tokens[:],
                priority=sequence.priority,
                max_tokens=sequence.max_tokens,
            )
            twin.length, twin.position, twin.steps = sequence.length, sequence.position, sequence.steps
            twin.cached_tokens = sequence.cached_tokens
            twin.is_shareable = sequence.is_shareable
            twin.chain = list(sequence.chain)
            twin.kept = None if sequence.kept is None else sequence.kept.copy()
            twin.pages = sequence.pages[: self.layout.pages_for(sequence.length)]
            for page in twin.pages:
                self._table.share(page)
            self._live[twin.number] = twin
            return twin

    def close(self, sequence: KvSequence) -> None:
        """Give all pages back: shareable ones stay cached, the others are free. Closing twice does nothing."""
        with self._lock:
            if not sequence.is_open:
                return
            self._check(sequence)
            del self._live[sequence.number]
            drop_pages(sequence, first=0)
            sequence.is_open = False
            sequence.chain = []

    def release_past(self, sequence: KvSequence, limit: int) -> bool:
        """Close a sequence that has made more than ``limit`` commits, whatever its owner does. True when it did."""
        with self._lock:
            self._check(sequence)
            if sequence.steps <= limit:
                return False
            self.close(sequence)
            self._counts["forced_releases"] += 1
            return True

    def preempt(self, sequence: KvSequence) -> None:
        """Give the pages back and keep the tokens, all pending again; ``resume`` finds what is still cached."""
        with self._lock:
            self._check(sequence)
            empty_sequence(sequence)
            self._counts["preemptions"] += 1

    def resume(self, sequence: KvSequence, *, reserve: int = 0) -> int:
        """Put a preempted sequence on the longest cached prefix of its tokens and return ``cached_tokens``.

        Raises PoolExhausted where ``reserve`` does not fit; the sequence is then preempted as before.
        """
        with self._lock:
            self._check(sequence)
            if sequence.pages:
                raise SpecError(f"KV sequence {sequence.number} has pages; only a preempted sequence is resumed")
            attach_prefix(sequence)
            try:
                self._reserve(sequence, reserve)
            except (PoolExhausted, SpecError):
                empty_sequence(sequence)
                raise
            self._count_prefix(sequence)
            return sequence.cached_tokens

    def preempt_candidate(self, *, below: int | None = None, exclude: Iterable[KvSequence] = ()) -> KvSequence | None:
        """The sequence with pages that costs least to stop: lowest priority, then youngest.

        ``below``: only of a lower priority than this. None where there is no such sequence.
        """
        spared = {sequence.number for sequence in exclude}
        with self._lock:
            found = [
                sequence
                for sequence in self._live.values()
                if sequence.pages and sequence.number not in spared and (below is None or sequence.priority < below)
            ]
            return min(found, key=lambda sequence: (sequence.priority, -sequence.number), default=None)

    def compact(self, sequence: KvSequence, keep: np.ndarray) -> int:
        """Forget all cached tokens but ``keep`` (rising int64 indices) and return how many; see ``kv_compact``.

        The sequence's later pages are no longer shared with prompts: what they hold depends on what was forgotten.
        """
        with self._lock:
            self._check(sequence)
            gone = compact_sequence(sequence, keep, store=self._store)
            self._counts["evicted_tokens"] += gone
            self._note_peak()
            return gone

    def can_admit(self, count: int, *, prompt: Iterable[int] = ()) -> bool:
        """True where ``count`` tokens of a new sequence fit and the watermark stays free.

        ``prompt``: its tokens; pages of it that running sequences hold already cost nothing.
        """
        known = as_tokens(prompt)
        with self._lock:
            cached = match_prefix(self._table, known, page=self.layout.page)
            held = sum(1 for entry in cached if self._table.refs[entry.page])
            needed = self.layout.pages_for(count) - held
            return needed <= self._table.available - int(self.watermark * self._table.count)

    def drop_cache(self, count: int | None = None) -> int:
        """Free the ``count`` least recently used cached pages (all by default) and return how many there were."""
        with self._lock:
            cached = len(self._table.cached)
            found = cached if count is None else max(0, min(count, cached))
            for _ in range(found):
                self._table.evict_oldest()
            return found

    def stats(self) -> PoolStats:
        """One consistent moment of the pool, from any thread."""
        with self._lock:
            table = self._table
            return PoolStats(
                pages=table.count,
                used=table.used,
                shared=table.shared,
                cached=len(table.cached),
                free=len(table.free),
                sequences=len(self._live),
                tokens=sum(sequence.length for sequence in self._live.values()),
                page_bytes=self.layout.page_bytes,
                peak_used=self._peak_used,
                evictions=table.evictions,
                **self._counts,
            )

    def _check(self, sequence: KvSequence) -> None:
        sequence.check_open()
        if self._live.get(sequence.number) is not sequence:
            raise SpecError(f"KV sequence {sequence.number} belongs to another pool")

    def _reserve(self, sequence: KvSequence, count: int) -> None:
        if count < 0:
            raise SpecError(f"KV sequence {sequence.number}: cannot reserve {count} tokens")
        sequence.check_limit(count)
        table = self._table
        block, used = divmod(sequence.length, self.layout.page)
        page = sequence.pages[block] if count and used else None
        copies = page is not None and not table.can_claim(page)
        fresh = max(0, self.layout.pages_for(sequence.length + count) - len(sequence.pages))
        needed = fresh + copies
        if needed > table.available:
            self._counts["exhausted"] += 1
            cure = "close or preempt a sequence" if needed <= table.count else "the pool is too small for it"
            raise PoolExhausted(
                f"KV pool: {count} more tokens of sequence {sequence.number} need {needed} pages, and "
                f"{table.available} of {table.count} are left: {cure}"
            )
        if page is not None and copies:
            target = table.take()
            if self._store is not None:
                self._store.copy_page(page, target)
            sequence.pages[block] = target
            table.drop(page)
            self._counts["copies"] += 1
        elif page is not None:
            table.unregister(page)
        sequence.pages += [table.take() for _ in range(fresh)]
        self._note_peak()

    def _count_prefix(self, sequence: KvSequence) -> None:
        if self._table.index is not None:
            self._counts["hit_tokens"] += sequence.cached_tokens
            self._counts["miss_tokens"] += len(sequence.tokens) - sequence.cached_tokens

    def _note_peak(self) -> None:
        self._peak_used = max(self._peak_used, self._table.used)
