"""Compare two forms of one network tensor by tensor, and find the first layer whose own error is too large.

Forms share tensor names: a float model and its INT8 Q/DQ or float16 form. Names that a rewrite adds are mapped back
(``x_dequantized``, ``x_float16`` to ``x``). Tensors leave the runs in groups of bounded size, so memory does not grow
with the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TypeProto

from edgeds.difference import Difference, Tolerance
from edgeds.errors import ModelError, SpecError
from edgeds.graph.cut import CutGraph
from edgeds.graph.proto import dims_of, np_dtype, one_line
from edgeds.graph.session import open_session, runtime_errors
from edgeds.graph.shapes import infer_shapes, infer_types
from edgeds.progress import track

Array = np.ndarray[Any, np.dtype[Any]]
Feeds = Mapping[str, Array]

GROUP_BYTES = 128 << 20
"""Values of about this size leave one run at a time."""
UNKNOWN_TENSOR_BYTES = 4 << 20
_ADDED = re.compile(r"(_dequantized|_DequantizeLinear_Output|_QuantizeLinear_Input|_float16|_float32)(_\d+)?$")


@dataclass(frozen=True, kw_only=True)
class LayerMatch:
    """A tensor that both forms compute: the node of A that makes it, and its name on either side."""

    node: str
    op: str
    tensor: str
    other: str


@dataclass(frozen=True, kw_only=True)
class LayerDifference:
    """One layer's output. ``own``: with equal inputs; otherwise with the error accumulated up to there."""

    match: LayerMatch
    difference: Difference
    own: bool
    ok: bool


@dataclass(frozen=True, kw_only=True)
class BisectResult:
    """``first`` is the first layer, in A's order, beyond the tolerance on its own; ``worst`` those with most error."""

    first: LayerDifference | None
    worst: tuple[LayerDifference, ...]
    layers: int
    checked: int


def match_layers(a: ModelProto, b: ModelProto) -> tuple[LayerMatch, ...]:
    """Float tensors that nodes of both main graphs compute, in A's topological order.

    Raises SpecError when there is none.
    """
    theirs = _computed(b)
    renamed = {_ADDED.sub("", name): name for name in reversed(theirs) if _ADDED.search(name)}
    found, used = [], set[str]()
    for name, node in _computed(a).items():
        plain = _ADDED.sub("", name)
        other = name if name in theirs else plain if plain in theirs else renamed.get(plain)
        if other is not None and other not in used:
            used.add(other)
            found.append(LayerMatch(node=node.name, op=node.op_type, tensor=name, other=other))
    if not found:
        raise SpecError(
            "the two graphs share no tensor names, so layers cannot be compared; give two forms of one export"
        )
    return tuple(found)


def _computed(model: ModelProto) -> dict[str, NodeProto]:
    types = infer_types(model)
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    return {name: node for node in nodes for name in node.output if name in types and _is_float(types[name])}


def _is_float(kind: TypeProto) -> bool:
    dtype = np_dtype(kind.tensor_type.elem_type) if kind.WhichOneof("value") == "tensor_type" else None
    return dtype is not None and dtype.name in ("float16", "float32", "float64")


def compare_layers(
    a: ModelProto,
    b: ModelProto,
    feeds: Sequence[Feeds],
    *,
    tolerance: Tolerance,
    group_bytes: int = GROUP_BYTES,
    threads: int | None = None,
    quiet: bool = False,
) -> tuple[LayerDifference, ...]:
    """Run both forms as they are and compare every shared tensor: the error that has built up to each layer.

    Graphs run as written (no fusion). Raises SpecError when nothing is shared or there are no feeds, ModelError when a
    model does not run on them.
    """
    matches = match_layers(a, b)
    results: list[LayerDifference] = []
    for group in _progress(_groups(a, matches, feeds, group_bytes), len(matches), "comparing layers", quiet):
        sessions = [
            open_session(a, outputs=[item.tensor for item in group], threads=threads, optimize=False),
            open_session(b, outputs=[item.other for item in group], threads=threads, optimize=False),
        ]
        totals = [Difference() for _ in group]
        for sample in feeds:
            want = _run(sessions[0], [item.tensor for item in group], sample)
            got = _run(sessions[1], [item.other for item in group], sample)
            for total, left, right in zip(totals, want, got, strict=True):
                total.add(left, right)
        results += [_layer(item, total, tolerance, own=False) for item, total in zip(group, totals, strict=True)]
    return tuple(results)


def find_first_break(
    a: ModelProto,
    b: ModelProto,
    feeds: Sequence[Feeds],
    *,
    tolerance: Tolerance,
    group_bytes: int = GROUP_BYTES,
    threads: int | None = None,
    quiet: bool = False,
) -> BisectResult:
    """Find the first layer of B that breaks the tolerance when it is given A's values as its inputs.

    B is cut at every shared tensor, so each piece is judged on its own: errors that earlier layers made do not count.
    One group of layers is checked at a time and the search ends with the first group that holds a break. Raises as
    ``compare_layers`` does.
    """
    matches = match_layers(a, b)
    cut = CutGraph(b, [item.other for item in matches])
    by_other = {item.other: item for item in matches}
    results: list[LayerDifference] = []
    for group in _progress(_groups(a, matches, feeds, group_bytes), len(matches), "bisecting", quiet):
        piece = cut.piece([item.other for item in group])
        given = [by_other[name].tensor for name in piece.given]
        wanted = list(dict.fromkeys([*(item.tensor for item in group), *given]))
        reference = open_session(a, outputs=wanted, threads=threads, optimize=False)
        session = open_session(piece.model, threads=threads, optimize=False)
        totals = [Difference() for _ in group]
        for sample in feeds:
            values = dict(zip(wanted, _run(reference, wanted, sample), strict=True))
            inputs = dict(sample) | {cut.given_name(name): values[by_other[name].tensor] for name in piece.given}
            got = _run(session, [item.other for item in group], inputs)
            for total, item, value in zip(totals, group, got, strict=True):
                total.add(values[item.tensor], value)
        results += [_layer(item, total, tolerance, own=True) for item, total in zip(group, totals, strict=True)]
        if not all(item.ok for item in results):
            break
    worst = sorted(results, key=_severity, reverse=True)
    return BisectResult(
        first=next((item for item in results if not item.ok), None),
        worst=tuple(worst[:5]),
        layers=len(matches),
        checked=len(results),
    )


def _layer(match: LayerMatch, total: Difference, tolerance: Tolerance, *, own: bool) -> LayerDifference:
    return LayerDifference(match=match, difference=total, own=own, ok=tolerance.allows_layer(total))


def _severity(item: LayerDifference) -> float:
    relative = item.difference.relative
    broken = item.difference.problem is not None or item.difference.non_finite_mismatch > 0
    return float("inf") if relative is None or broken else relative


def _progress(
    groups: Sequence[Sequence[LayerMatch]], total: int, what: str, quiet: bool
) -> Iterator[Sequence[LayerMatch]]:
    yield from track(groups, what=f"{what} ({total} tensors)", unit="group", quiet=quiet)


def _groups(
    model: ModelProto, matches: Sequence[LayerMatch], feeds: Sequence[Feeds], group_bytes: int
) -> list[list[LayerMatch]]:
    """Consecutive layers whose values, both sides and inputs together, stay near ``group_bytes``."""
    if not feeds:
        raise SpecError("there is no sample to compare layers on")
    sizes = _sizes(model, feeds)
    groups: list[list[LayerMatch]] = [[]]
    filled = 0
    for item in matches:
        size = 3 * sizes.get(item.tensor, UNKNOWN_TENSOR_BYTES)
        if groups[-1] and filled + size > group_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size
    return groups


def _sizes(model: ModelProto, feeds: Sequence[Feeds]) -> dict[str, int]:
    """Bytes per tensor for the largest sample, where shape inference finds them."""
    stored = {tensor.name for tensor in model.graph.initializer}
    names = [item.name for item in model.graph.input if item.name not in stored]
    largest = max(feeds, key=lambda sample: sum(array.size for array in sample.values()))
    try:
        inferred = infer_shapes(model, {name: largest[name].shape for name in names if name in largest})
    except ModelError:
        return {}  # the model itself will say on these feeds what is wrong
    sizes = {}
    for item in (*inferred.graph.value_info, *inferred.graph.output):
        dims = dims_of(item.type)
        if dims is not None and all(isinstance(dim, int) for dim in dims):
            sizes[item.name] = 4 * int(np.prod([int(dim) for dim in dims if isinstance(dim, int)], dtype=np.int64))
    return sizes


def _run(session: Any, names: Sequence[str], feeds: Feeds) -> list[Array]:
    fed: dict[str, Array] = {}
    for item in session.get_inputs():
        if item.name not in feeds:
            raise SpecError(f"the sample holds no array for input {item.name!r}")
        kind = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(double)": np.float64}.get(item.type)
        array = feeds[item.name]
        with np.errstate(over="ignore"):
            fed[item.name] = array.astype(kind) if kind is not None and array.dtype.kind == "f" else array
    try:
        return session.run(list(names), fed)
    except runtime_errors() as error:
        raise ModelError(f"the model does not run on the samples given: {one_line(error)}") from error
