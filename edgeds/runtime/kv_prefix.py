"""Finds pages that already hold the keys and values of a prompt's beginning."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

DIGEST_BYTES = 16
Digest = Callable[[bytes, bytes], bytes]


def chained_digest(parent: bytes, tokens: bytes) -> bytes:
    """BLAKE2b of the digest of everything before a page and of the page's own tokens."""
    return hashlib.blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


class PrefixEntry:
    """One shareable page: ``tokens`` (int64 bytes) after the pages of ``parent``; ``children`` entries follow it."""

    __slots__ = ("children", "digest", "page", "parent", "tokens")

    def __init__(self, *, digest: bytes, tokens: bytes, parent: PrefixEntry | None, page: int) -> None:
        self.digest = digest
        self.tokens = tokens
        self.parent = parent
        self.page = page
        self.children = 0


class PrefixIndex:
    """Entries by chained digest. Not thread-safe: ``KvPool`` holds the lock.

    A digest only finds a candidate. It is taken when its tokens are equal and its parent is the very entry matched
    before, so by induction all tokens are equal and no collision can mix two prompts.
    """

    def __init__(self, *, digest: Digest = chained_digest) -> None:
        self._digest = digest
        self._entries: dict[bytes, PrefixEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, parent: PrefixEntry | None, tokens: bytes) -> PrefixEntry | None:
        entry = self._entries.get(self._key(parent, tokens))
        if entry is None or entry.parent is not parent or entry.tokens != tokens:
            return None
        return entry

    def add(self, parent: PrefixEntry | None, tokens: bytes, *, page: int) -> PrefixEntry | None:
        """The new entry, or None where another prefix has the same digest: that page is then simply not shared."""
        digest = self._key(parent, tokens)
        if digest in self._entries:
            return None
        entry = PrefixEntry(digest=digest, tokens=tokens, parent=parent, page=page)
        self._entries[digest] = entry
        if parent is not None:
            parent.children += 1
        return entry

    def remove(self, entry: PrefixEntry) -> None:
        """Forget an entry without children."""
        del self._entries[entry.digest]
        if entry.parent is not None:
            entry.parent.children -= 1

    def _key(self, parent: PrefixEntry | None, tokens: bytes) -> bytes:
        return self._digest(b"" if parent is None else parent.digest, tokens)
