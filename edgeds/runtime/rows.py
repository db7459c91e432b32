"""The batch axis: checking one request, joining requests into one run, and cutting the results apart again.

The batch is axis 0 of every input. An output belongs to the rows when its axis 0 is the batch: the same name as the
inputs' batch dim, the same fixed size, or, where the model does not say, proven by running one row three times over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgeds.engines import Engine, check_feeds
from edgeds.engines.base import Array, shape_text
from edgeds.errors import InputError, SpecError
from edgeds.specs import Resolution, TensorSpec

PROBE_ROWS = 3


@dataclass(frozen=True, kw_only=True)
class BatchAxis:
    """What a model allows. ``fixed`` is its only batch size, or None when any will do.

    ``unproven`` names outputs whose declaration does not tell whether axis 0 is the batch.
    ``whole`` names outputs that certainly have no batch axis: their requests must run alone.
    """

    inputs: tuple[TensorSpec, ...]
    fixed: int | None
    unproven: tuple[str, ...]
    whole: tuple[str, ...]

    @classmethod
    def of(cls, engine: Engine) -> BatchAxis:
        """Read it from an engine's specs; SpecError for inputs without a common leading batch axis."""
        for spec in engine.inputs:
            if not spec.shape:
                raise SpecError(f"input {spec.name!r} has no batch axis; run this model through its engine directly")
        dims = {spec.name: spec.shape[0] for spec in engine.inputs}
        numbers = {dim for dim in dims.values() if isinstance(dim, int)}
        if len(numbers) > 1:
            raise SpecError(
                f"the inputs have different batch sizes ({', '.join(f'{name}: {dim}' for name, dim in dims.items())}); "
                "run this model through its engine directly"
            )
        fixed = numbers.pop() if numbers else None
        unproven, whole = [], []
        for output in engine.outputs:
            lead = output.shape[0] if output.shape else 0
            if isinstance(lead, int):
                if lead != fixed:
                    whole.append(output.name)
            elif lead is None or lead not in dims.values():
                unproven.append(output.name)
        loose = tuple(replace(spec, shape=(None, *spec.shape[1:])) for spec in engine.inputs)
        return cls(inputs=loose, fixed=fixed, unproven=tuple(unproven), whole=tuple(whole))


def check_request(
    axis: BatchAxis, feeds: Mapping[str, Array], *, buckets: Sequence[Resolution] | None
) -> tuple[dict[str, Array], int]:
    """One request's feeds, contiguous, and its rows; InputError names the input that does not fit."""
    checked = check_feeds(axis.inputs, feeds)
    rows = {name: array.shape[0] for name, array in checked.items()}
    if len(set(rows.values())) > 1:
        text = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise InputError(f"the inputs have different numbers of rows ({text}); every input needs the same")
    if buckets:
        for spec in axis.inputs:
            if len(spec.shape) == 4:
                height, width = spatial_axes(spec)
                shape = checked[spec.name].shape
                if not any(b.height_px == shape[height] and b.width_px == shape[width] for b in buckets):
                    raise InputError(
                        f"input {spec.name!r}: {shape[height]}x{shape[width]} is not one of the session's resolutions "
                        f"({', '.join(map(str, buckets))}); scale and pad the image to one of them first"
                    )
    return checked, next(iter(rows.values()))


def spatial_axes(spec: TensorSpec) -> tuple[int, int]:
    """Axes of height and width of a rank-4 image input: channels first unless the last dim is a channel count."""
    return (1, 2) if spec.shape[3] in (1, 3, 4) and spec.shape[1] not in (1, 3, 4) else (2, 3)


def request_key(feeds: Mapping[str, Array], inputs: Sequence[TensorSpec]) -> str:
    """Shapes without the batch, as text: requests with equal keys may share a batch."""
    if len(inputs) == 1:
        return "x".join(map(str, feeds[inputs[0].name].shape[1:])) or "scalar"
    return " ".join(f"{spec.name}:{'x'.join(map(str, feeds[spec.name].shape[1:])) or 'scalar'}" for spec in inputs)


class RowJoiner:
    """Stacks requests into staging buffers that are kept and reused; one owner thread, one run at a time."""

    def __init__(self, *, fixed: int | None) -> None:
        self._fixed = fixed
        self._buffers: dict[str, Array] = {}

    def join(self, parts: Sequence[Mapping[str, Array]], *, rows: int) -> dict[str, Array]:
        """One feed of all parts' rows, repeated last row up to a fixed batch. A lone part passes without a copy."""
        total = self._fixed or rows
        if len(parts) == 1 and total == rows:
            return dict(parts[0])
        return {name: self._stack(name, [part[name] for part in parts], total) for name in parts[0]}

    def _stack(self, name: str, arrays: list[Array], total: int) -> Array:
        shape = (total, *arrays[0].shape[1:])
        dtype = arrays[0].dtype
        out = np.empty(shape, dtype) if dtype.kind == "O" else self._view(name, shape, dtype)
        at = 0
        for array in arrays:
            out[at : at + array.shape[0]] = array
            at += array.shape[0]
        out[at:] = arrays[-1][-1:]
        return out

    def _view(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        size = int(np.prod(shape)) * dtype.itemsize
        buffer = self._buffers.get(name)
        # A kept buffer saves the page faults of a fresh one; one much too large is given back.
        if buffer is None or buffer.nbytes < size or buffer.nbytes > 8 * max(size, 1 << 20):
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size].view(dtype).reshape(shape)


def split_rows(
    outputs: Mapping[str, Array], counts: Sequence[int], *, total: int, check_whole: bool = False
) -> list[dict[str, Array]]:
    """Cut outputs of ``total`` rows into one dict per count, as copies; rows past the counts (padding) fall away.

    A single count of all rows passes uncut, and unchecked unless ``check_whole``.

    Raises InputError that names an output whose axis 0 is not the batch.
    """
    uncut = len(counts) == 1 and counts[0] == total
    if uncut and not check_whole:
        return [dict(outputs)]
    for name, value in outputs.items():
        if value.ndim == 0 or value.shape[0] != total:
            raise InputError(
                f"output {name!r} has shape {shape_text(value.shape)} for a batch of {total}: it has no batch axis, so "
                "its rows cannot be told apart; send requests of the model's own batch size"
            )
    if uncut:
        return [dict(outputs)]
    pieces, at = [], 0
    for count in counts:
        pieces.append({name: value[at : at + count].copy() for name, value in outputs.items()})
        at += count
    return pieces


def join_outputs(pieces: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Put the results of a split request back together, in order."""
    if len(pieces) == 1:
        return dict(pieces[0])
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def prove_rows(
    run: Callable[[dict[str, Array]], Mapping[str, Array]],
    row: Mapping[str, Array],
    *,
    names: Sequence[str],
    fixed: int | None,
) -> tuple[str, ...]:
    """Run one row several times over; return the outputs that do not simply repeat, so are not per row."""
    rows = fixed or PROBE_ROWS
    tiled = run({name: np.repeat(array, rows, axis=0) for name, array in row.items()})
    single = run(dict(row)) if fixed is None else {name: tiled[name][:1] for name in names if tiled[name].ndim}
    return tuple(name for name in names if name not in single or not _repeats(single[name], tiled[name], rows))


def _repeats(single: Array, tiled: Array, rows: int) -> bool:
    if single.ndim == 0 or single.shape[0] != 1 or tiled.shape != (rows, *single.shape[1:]):
        return False
    if tiled.dtype.kind not in "fc":
        return bool((tiled == single).all())
    scale = float(np.abs(single[np.isfinite(single)]).max(initial=0.0))
    return bool(np.allclose(tiled, single, rtol=1e-2, atol=1e-3 * scale, equal_nan=True))


def row_zeros(spec: TensorSpec, shape: Resolution | Mapping[str, tuple[int, ...]], *, rows: int) -> Array:
    """Zeros for one input: the given row shape, or the spec's own with height and width of the resolution.

    Raises SpecError when a dim stays open, InputError for a shape that cannot exist.
    """
    dims: list[object] = list(spec.shape[1:])
    if isinstance(shape, Resolution):
        if len(spec.shape) == 4:
            height, width = spatial_axes(spec)
            dims[height - 1], dims[width - 1] = shape.height_px, shape.width_px
    elif spec.name in shape:
        dims = list(shape[spec.name])
    sizes = [dim for dim in dims if isinstance(dim, int)]
    if len(sizes) < len(dims):
        raise SpecError(f"input {spec} has open dims; give its size, as shapes=[{{{spec.name!r}: (dims of one row)}}]")
    try:
        return np.zeros((rows, *sizes), dtype=spec.np_dtype)
    except ValueError as error:
        raise InputError(f"input {spec.name!r} cannot have shape {(rows, *sizes)}: {error}") from error


def no_batch_axis(output: str) -> InputError:
    """The error for a request that would have to be split, padded or joined although an output forbids it."""
    return InputError(
        f"output {output!r} has no batch axis, so the rows of a larger or smaller batch cannot be told apart; "
        "send requests of the model's own batch size"
    )
