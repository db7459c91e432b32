"""What a page of the KV cache holds, which places of it a step fills, and what a store of pages has to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from edgeds.errors import ModelError, SpecError

KvDtype = Literal["float32", "float16", "int8"]
KV_DTYPES: tuple[KvDtype, ...] = ("float32", "float16", "int8")

METADATA = {
    "layers": "edgeds.layers",
    "kv_heads": "edgeds.kv_heads",
    "head_dim": "edgeds.head_dim",
    "page": "edgeds.page",
}


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """The shape of the KV cache of one decoder: ``page`` tokens of every layer make one page.

    ``int8`` keeps one float16 scale per token and KV head beside the numbers, for keys and for values.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page: int = 64
    dtype: KvDtype = "float32"

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"KV layout: {name} must be a whole number from 1, got {value!r}")
        if self.dtype not in KV_DTYPES:
            raise SpecError(f"KV layout: dtype {self.dtype!r} is none of {', '.join(KV_DTYPES)}")

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> KvLayout:
        """The layout that a decoder of ``graph/decoder.py`` states in its metadata. Raises ModelError."""
        sizes: dict[str, int] = {}
        for name, key in METADATA.items():
            text = metadata.get(key, "")
            if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
                raise ModelError(f"the model's metadata has {key}={text!r}: not a decoder that edgeds built")
            sizes[name] = int(text)
        stated = metadata.get("edgeds.kv_dtype", "")
        dtype = next((kind for kind in KV_DTYPES if kind == stated), None)
        if dtype is None:
            raise ModelError(f"the model's metadata has edgeds.kv_dtype={stated!r}: expected {', '.join(KV_DTYPES)}")
        return cls(**sizes, dtype=dtype)

    @property
    def is_quantized(self) -> bool:
        return self.dtype == "int8"

    @property
    def token_bytes(self) -> int:
        """Bytes of one cached token over all layers, keys and values, with the scales of int8."""
        per_head = self.head_dim * np.dtype(self.dtype).itemsize + (2 if self.is_quantized else 0)
        return 2 * self.layers * self.kv_heads * per_head

    @property
    def page_bytes(self) -> int:
        return self.page * self.token_bytes

    def pages_for(self, tokens: int) -> int:
        """The fewest pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page)

    def shapes(self, pages: int) -> dict[str, tuple[int, ...]]:
        """The shape of one layer's arrays by what they hold: the graph's inputs ``k_pages.N`` and so on."""
        shapes: dict[str, tuple[int, ...]] = {
            "k_pages": (pages, self.kv_heads, self.head_dim, self.page),
            "v_pages": (pages, self.kv_heads, self.page, self.head_dim),
        }
        if self.is_quantized:
            shapes |= dict.fromkeys(("k_scale", "v_scale"), (pages, self.kv_heads, self.page))
        return shapes


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """Where tokens lie: token i is at ``offsets[i]`` of page ``pages[i]``.

    ``rows[i]``, ``steps[i]`` say where its keys and values are in ``k_new.N`` [batch, kv_heads, step, head_dim].
    All four are int64 [tokens].
    """

    pages: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    steps: np.ndarray

    def __len__(self) -> int:
        return len(self.pages)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Ranges of tokens (start, stop) that lie side by side in one page."""
        if not len(self):
            return ()
        apart = (np.diff(self.pages) != 0) | (np.diff(self.offsets) != 1)
        cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(self)]
        return tuple(pairwise(cuts))


def make_slots(block_pages: Sequence[int], indices: np.ndarray, *, page: int, row: int = 0) -> Slots:
    """The slots of the cached tokens ``indices`` (int64, from 0) of a sequence with ``block_pages`` in this order."""
    blocks, offsets = np.divmod(indices, page)
    pages = np.asarray(block_pages, np.int64)[blocks]
    count = len(indices)
    return Slots(pages=pages, offsets=offsets, rows=np.full(count, row, np.int64), steps=np.arange(count))


def join_slots(parts: Iterable[Slots]) -> Slots:
    """The slots of several sequences of one batch, so that one write stores the whole step."""
    found = list(parts)
    if not found:
        raise SpecError("no slots to join: a step has at least one sequence")
    if len(found) == 1:
        return found[0]
    return Slots(
        pages=np.concatenate([part.pages for part in found]),
        offsets=np.concatenate([part.offsets for part in found]),
        rows=np.concatenate([part.rows for part in found]),
        steps=np.concatenate([part.steps for part in found]),
    )


class PageMover(Protocol):
    """The part of a store that the pool itself needs: page contents from one place to another."""

    def copy_page(self, source: int, target: int) -> None:
        """Make page ``target`` equal to page ``source``, all layers."""

    def move(self, source: Slots, target: Slots) -> None:
        """Copy token i of ``source`` to place i of ``target``; the two may overlap."""


class PageStore(PageMover, Protocol):
    """Holds the contents of the pages: ``KvStore`` in host memory, or buffers bound to a device engine."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def pages(self) -> int: ...

    def write(self, slots: Slots, k_new: Sequence[np.ndarray], v_new: Sequence[np.ndarray]) -> None:
        """Store a step's keys and values of every layer; see ``KvStore.write``."""

    def feeds(self) -> Mapping[str, np.ndarray]:
        """The engine inputs by name. Never a copy: what is written later is seen by the next run."""
