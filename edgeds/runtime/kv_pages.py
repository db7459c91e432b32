"""Who holds which page: references, the free list, and the pages kept because a later prompt may begin with them."""

from __future__ import annotations

from collections import OrderedDict

from edgeds.runtime.kv_prefix import PrefixEntry, PrefixIndex


class PageTable:
    """Pages 0..count-1, each in one of three states: free, held (``refs`` > 0) or cached (no holder, in the index).

    Every operation is O(1). Not thread-safe: ``KvPool`` holds the lock.

    The cache gives up its least recently used page. That page never has children in the index: whoever holds a page
    also holds all pages before it, and gives them back last page first.
    """

    def __init__(self, count: int, *, index: PrefixIndex | None) -> None:
        self.count = count
        self.index = index
        self.refs = [0] * count
        self.entries: list[PrefixEntry | None] = [None] * count
        self.free = list(range(count - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.shared = 0
        self.evictions = 0

    @property
    def available(self) -> int:
        """Pages that can be taken now: free ones and, after them, cached ones."""
        return len(self.free) + len(self.cached)

    @property
    def used(self) -> int:
        return self.count - self.available

    def take(self) -> int:
        """A page with one holder; its old contents mean nothing. The caller has checked ``available``."""
        if not self.free:
            self.evict_oldest()
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a held or cached page."""
        refs = self.refs[page] = self.refs[page] + 1
        if refs == 1:
            del self.cached[page]
        elif refs == 2:
            self.shared += 1

    def drop(self, page: int) -> None:
        """One holder less. Without any, the page is cached if the index knows it and else free."""
        refs = self.refs[page] = self.refs[page] - 1
        if refs == 1:
            self.shared -= 1
        elif refs == 0:
            if self.entries[page] is None:
                self.free.append(page)
            else:
                self.cached[page] = None

    def register(self, page: int, entry: PrefixEntry) -> None:
        self.entries[page] = entry

    def unregister(self, page: int) -> None:
        """Take a page without children out of the index, so that its holder may change it."""
        entry = self.entries[page]
        if entry is not None and self.index is not None:
            self.index.remove(entry)
            self.entries[page] = None

    def evict_oldest(self) -> None:
        """Free the least recently used cached page."""
        page, _ = self.cached.popitem(last=False)
        self.unregister(page)
        self.free.append(page)
        self.evictions += 1

    def is_writable(self, page: int) -> bool:
        """True where nobody else reads the page, now or through the index."""
        return self.refs[page] == 1 and self.entries[page] is None

    def can_claim(self, page: int) -> bool:
        """True where the only holder can have the page to itself by taking it out of the index."""
        entry = self.entries[page]
        return self.refs[page] == 1 and (entry is None or entry.children == 0)
