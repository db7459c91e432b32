"""The pages of the KV cache as numpy arrays, shaped as the decoder graph reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from edgeds.boards.memory import read_memory
from edgeds.errors import InputError, OutOfMemory, SpecError
from edgeds.runtime.kv_layout import KvLayout, Slots

Allocate = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]

MIB = 2**20
INT8_MAX = 127.0
FLOAT16_MAX = 65504.0
# Keys and values are converted in groups of layers of about this many bytes: temporaries that stay in the processor's
# cache made a prefill of 128 tokens three times as fast to store.
GROUP_BYTES = MIB // 2
# From this many neighbouring tokens on, one slice is stored faster than as many places looked up (measured: 3 to 6).
RUN_TOKENS = 4


class KvStore:
    """Keys and values of ``pages`` pages in host memory. Owned by one thread at a time (the one that runs the engine).

    All layers lie in one array per kind with the layer in front, so that a step is stored in a few numpy calls while
    the array of one layer is still contiguous. Pages start as zeros: a masked slot weighs exactly 0, and 0 times a
    number that is not finite would poison every sequence that meets the page, which is also why ``write`` refuses such
    numbers. ``memory_mib``: the memory that may be used, by default what the system has left. ``allocate`` makes the
    arrays, zeroed (default: numpy). Raises OutOfMemory.
    """

    def __init__(
        self, layout: KvLayout, pages: int, *, memory_mib: float | None = None, allocate: Allocate | None = None
    ) -> None:
        if isinstance(pages, bool) or not isinstance(pages, int) or pages < 1:
            raise SpecError(f"KV store: pages must be a whole number from 1, got {pages!r}")
        self.layout = layout
        self.pages = pages
        available_mib = read_memory("cpu").free_mib if memory_mib is None else memory_mib
        _check_memory(layout, pages, available_mib)
        shapes = layout.shapes(pages)
        make = allocate or (lambda _, shape, dtype: np.zeros(shape, dtype))
        try:
            self._arrays = {
                name: make(name, (layout.layers, *shape), np.dtype("f2" if name.endswith("scale") else layout.dtype))
                for name, shape in shapes.items()
            }
        except (MemoryError, ValueError) as error:  # numpy: ValueError when the size passes the address space
            raise OutOfMemory(_too_large(layout, pages, None)) from error

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def feeds(self) -> dict[str, np.ndarray]:
        """``k_pages.N``, ``v_pages.N`` (int8: ``k_scale.N``, ``v_scale.N``) of every layer: views, never copies."""
        return {f"{name}.{layer}": array[layer] for name, array in self._arrays.items() for layer in range(len(array))}

    def write(self, slots: Slots, k_new: Sequence[np.ndarray], v_new: Sequence[np.ndarray]) -> None:
        """Store the keys and values of ``slots``, nothing where one of them is refused.

        ``k_new``, ``v_new``: per layer float32 [batch, kv_heads, step, head_dim], or without the batch axis for one
        sequence. int8: symmetric, scale = amax / 127 per token and head in float16, rounded half to even; a row of
        zeros stays zero. Raises SpecError for arrays of another shape, InputError for NaN, infinities and numbers that
        the cache's type cannot hold.
        """
        sources = {"k": self._checked("k_new", k_new, slots), "v": self._checked("v_new", v_new, slots)}
        if not len(slots):
            return
        groups = list(self._groups(len(slots)))
        picked: dict[str, np.ndarray] = {}
        for kind, arrays in sources.items():
            for layers in groups:
                rows = _pick(arrays[layers], slots)
                self._check_numbers(rows, f"{kind}_new", layers.start)
                if len(groups) == 1:  # a few tokens: what was picked is kept, a long prefill is picked again
                    picked[kind] = rows
        for kind, arrays in sources.items():
            for layers in groups:
                rows = picked[kind] if kind in picked else _pick(arrays[layers], slots)
                if self.layout.is_quantized:
                    rows, scales = quantize_rows(rows)
                    self._put(f"{kind}_scale", layers, slots, scales)
                self._put(f"{kind}_pages", layers, slots, rows)

    def copy_page(self, source: int, target: int) -> None:
        """Make page ``target`` equal to page ``source``."""
        for array in self._arrays.values():
            array[:, target] = array[:, source]

    def move(self, source: Slots, target: Slots) -> None:
        """Copy token i of ``source`` to place i of ``target``; the two may overlap, scales go along."""
        if len(source) != len(target):
            raise SpecError(f"KV store: {len(source)} tokens do not fit into {len(target)} places")
        for name in self._arrays:
            for layers in self._groups(len(source)):  # a group is read whole before it is written
                self._put(name, layers, target, self._get(name, layers, source))

    def read(self, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of ``slots`` as the graph sees them: float32 [layers, kv_heads, tokens, head_dim] each."""
        every = slice(0, self.layout.layers)
        found: list[np.ndarray] = []
        for kind in ("k", "v"):
            rows = self._get(f"{kind}_pages", every, slots).astype(np.float32)
            if self.layout.is_quantized:
                rows *= self._get(f"{kind}_scale", every, slots).astype(np.float32)[..., None]
            found.append(rows)
        return found[0], found[1]

    def _put(self, name: str, layers: slice, slots: Slots, rows: np.ndarray) -> None:
        """Store ``rows`` [layers, kv_heads, tokens(, head_dim)]: run by run, or all at once where runs are short."""
        array = self._arrays[name]
        runs = slots.runs
        if len(slots) < RUN_TOKENS * len(runs):
            spread = np.moveaxis(rows, 2, 0)  # numpy puts the axis of split index arrays in front
            if name == "v_pages":
                array[layers, slots.pages, :, slots.offsets, :] = spread
            else:
                array[layers, slots.pages, ..., slots.offsets] = spread
            return
        for start, stop in runs:
            page, first = int(slots.pages[start]), int(slots.offsets[start])
            part, last = rows[:, :, start:stop], first + stop - start
            if name == "v_pages":
                array[layers, page, :, first:last] = part
            else:
                array[layers, page, ..., first:last] = part.swapaxes(2, 3) if name == "k_pages" else part

    def _get(self, name: str, layers: slice, slots: Slots) -> np.ndarray:
        """A copy [layers, kv_heads, tokens(, head_dim)]."""
        array = self._arrays[name]
        if name == "v_pages":
            return np.moveaxis(array[layers, slots.pages, :, slots.offsets, :], 0, 2)
        return np.moveaxis(array[layers, slots.pages, ..., slots.offsets], 0, 2)

    def _groups(self, tokens: int) -> Iterator[slice]:
        layer_bytes = 4 * tokens * self.layout.kv_heads * self.layout.head_dim
        step = max(1, GROUP_BYTES // max(1, layer_bytes))
        for start in range(0, self.layout.layers, step):
            yield slice(start, min(start + step, self.layout.layers))

    def _checked(self, name: str, arrays: Sequence[np.ndarray], slots: Slots) -> list[np.ndarray]:
        """The arrays with a batch axis. Raises SpecError with the layer whose array does not fit."""
        layout = self.layout
        if len(arrays) != layout.layers:
            raise SpecError(f"{name}: {len(arrays)} layers, the cache has {layout.layers}")
        batched = [array[None] if array.ndim == 3 else array for array in arrays]
        least_rows = int(slots.rows.max(initial=-1)) + 1
        least_steps = int(slots.steps.max(initial=-1)) + 1
        for layer, array in enumerate(batched):
            fits = array.ndim == 4 and array.shape[1::2] == (layout.kv_heads, layout.head_dim)
            if (
                not fits
                or array.shape != batched[0].shape
                or array.shape[0] < least_rows
                or array.shape[2] < least_steps
            ):
                raise SpecError(
                    f"{name}.{layer}: shape {list(arrays[layer].shape)}, expected [batch from {least_rows}, "
                    f"{layout.kv_heads}, step from {least_steps}, {layout.head_dim}], the same in every layer"
                )
            if array.dtype.kind != "f":
                raise SpecError(f"{name}.{layer}: {array.dtype}, expected float32")
        return batched

    def _check_numbers(self, rows: np.ndarray, name: str, first_layer: int) -> None:
        limit = {"float32": np.inf, "float16": FLOAT16_MAX, "int8": FLOAT16_MAX * INT8_MAX}[self.layout.dtype]
        highest = np.maximum(rows.max(axis=(1, 2, 3)), -rows.min(axis=(1, 2, 3)))
        wrong = np.flatnonzero(~(np.isfinite(highest) & (highest <= limit)))
        if len(wrong):
            layer = int(wrong[0])
            what = "NaN or infinity" if not np.isfinite(highest[layer]) else f"{highest[layer]:.3g}"
            raise InputError(
                f"{name}.{first_layer + layer} holds {what}, which the {self.layout.dtype} KV cache cannot keep: "
                "the model overflows on this input; run it in a wider precision or with float32 KV"
            )


def quantize_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 [..., head_dim] and float16 scales [...] of float rows: symmetric, q = round_half_even(x / scale).

    The scale is amax / 127 rounded to float16, and the numbers are divided by that rounded value, so that reading
    them back errs by half a step and no more (save the last ulp of float16, which is clipped at 127).
    """
    scales = (np.abs(rows).max(axis=-1) / np.float32(INT8_MAX)).astype(np.float16)
    divisors = scales.astype(np.float32)
    divisors[divisors == 0] = np.inf  # a row of zeros, or of numbers below float16's smallest, is stored as zeros
    numbers = rows / divisors[..., None]
    np.rint(numbers, out=numbers)
    np.clip(numbers, -INT8_MAX, INT8_MAX, out=numbers)
    return numbers.astype(np.int8), scales


def _pick(arrays: Sequence[np.ndarray], slots: Slots) -> np.ndarray:
    """float32 [layers, kv_heads, tokens, head_dim] out of arrays [batch, kv_heads, step, head_dim] per layer."""
    batch, heads, step, dim = arrays[0].shape
    if len(slots) == batch * step and np.array_equal(slots.rows * step + slots.steps, np.arange(len(slots))):
        stacked = np.stack(arrays).astype(np.float32, copy=False)  # every place of the step: one pass
        return stacked[:, 0] if batch == 1 else stacked.swapaxes(1, 2).reshape(len(arrays), heads, len(slots), dim)
    rows = np.empty((len(arrays), heads, len(slots), dim), np.float32)
    for layer, array in enumerate(arrays):  # a padded step is mostly padding: never touch it
        rows[layer] = np.moveaxis(array[slots.rows, :, slots.steps, :], 0, 1)
    return rows


def _check_memory(layout: KvLayout, pages: int, available_mib: float | None) -> None:
    if available_mib is not None and layout.page_bytes * pages > available_mib * MIB:
        raise OutOfMemory(_too_large(layout, pages, available_mib))


def _too_large(layout: KvLayout, pages: int, available_mib: float | None) -> str:
    needed_mib = layout.page_bytes * pages / MIB
    smaller = "" if layout.is_quantized else " or an int8 KV cache"
    if available_mib is None:
        return (
            f"the KV cache of {pages} pages needs {needed_mib:.0f} MiB, which this system does not give; "
            f"take fewer pages{smaller}"
        )
    fitting = int(available_mib * MIB // layout.page_bytes)
    return (
        f"the KV cache of {pages} pages of {layout.page} tokens needs {needed_mib:.0f} MiB and {available_mib:.0f} MiB "
        f"are available: take at most {fitting} pages ({fitting * layout.page} tokens){smaller}"
    )
