"""One sequence in the KV pool: its tokens and the pages that hold them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from edgeds.errors import InputError, SpecError
from edgeds.runtime.kv_layout import KvLayout, Slots, make_slots
from edgeds.runtime.kv_pages import PageTable
from edgeds.runtime.kv_prefix import PrefixEntry


class KvSequence:
    """A handle of ``KvPool``. Only the pool changes it; the thread that steps the sequence reads it.

    ``length``: tokens in the pages. ``position``: tokens computed so far, the absolute position of the next one; it is
    more than ``length`` once tokens were evicted. ``tokens``: all tokens known, those to be computed included.
    ``cached_tokens``: tokens found in the prefix cache by ``open`` or ``resume``. ``steps``: commits so far.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        table: PageTable,
        number: int,
        tokens: array[int],
        priority: int,
        max_tokens: int | None,
    ) -> None:
        self.layout = layout
        self.table = table
        self.number = number
        self.tokens = tokens
        self.priority = priority
        self.max_tokens = max_tokens
        self.length = 0
        self.position = 0
        self.cached_tokens = 0
        self.steps = 0
        self.is_open = True
        self.pages: list[int] = []
        self.chain: list[PrefixEntry] = []  # the index entries of the first pages, as far as they are shareable
        self.is_shareable = table.index is not None
        self.kept: np.ndarray | None = None  # int64 [length] absolute positions, once tokens were evicted

    @property
    def pending(self) -> list[int]:
        """Tokens that are known and not computed: the rest of the prompt, or all after a preemption."""
        return self.tokens[self.position :].tolist()

    @property
    def capacity(self) -> int:
        """Tokens that the pages of this sequence can hold."""
        return len(self.pages) * self.layout.page

    @property
    def block_table(self) -> np.ndarray:
        """int64 [blocks]: the pages with cached tokens, in order. Empty before the first token is computed."""
        return np.array(self.pages[: self.layout.pages_for(self.length)], np.int64)

    @property
    def cached_positions(self) -> np.ndarray:
        """int64 [length]: the absolute position of every cached token."""
        return np.arange(self.length) if self.kept is None else self.kept

    def slots(self, count: int, *, row: int = 0) -> Slots:
        """Where the next ``count`` tokens go, as row ``row`` of the batch. Raises SpecError without ``reserve``."""
        self.check_room(count)
        return make_slots(self.pages, np.arange(self.length, self.length + count), page=self.layout.page, row=row)

    def check_room(self, count: int) -> None:
        """Raise SpecError unless the next ``count`` tokens have pages that are this sequence's alone."""
        self.check_open()
        if count < 0:
            raise SpecError(f"KV sequence {self.number}: {count} tokens")
        block, used = divmod(self.length, self.layout.page)
        mine = not (count and used) or self.table.is_writable(self.pages[block])
        if not mine or self.length + count > self.capacity:
            raise SpecError(
                f"KV sequence {self.number}: no pages of its own for {count} more tokens (length {self.length}, "
                f"capacity {self.capacity}); call reserve first, and again after a fork or a rollback"
            )

    def check_limit(self, count: int) -> None:
        """Raise InputError when ``count`` more tokens pass ``max_tokens``."""
        if self.max_tokens is not None and self.position + count > self.max_tokens:
            raise InputError(
                f"KV sequence {self.number}: {self.position + count} tokens, and its limit is {self.max_tokens}"
            )

    def check_open(self) -> None:
        if not self.is_open:
            raise SpecError(f"KV sequence {self.number} is closed; open a new one")


def as_tokens(tokens: Iterable[int]) -> array[int]:
    """Token ids as int64. Raises InputError for anything but whole numbers from 0."""
    if isinstance(tokens, bytes | bytearray):
        raise InputError("token ids must be a list of whole numbers, not bytes")
    listed = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
    try:
        found = array("q", listed)
    except (TypeError, OverflowError) as error:
        raise InputError(f"token ids must be a flat list of whole numbers from 0 to 2^63-1: {error}") from error
    if found and min(found) < 0:
        raise InputError(f"token ids must be from 0, got {min(found)}")
    return found
