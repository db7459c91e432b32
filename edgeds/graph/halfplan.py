"""Which nodes of a float network stay float32 when the rest becomes float16, each with the reason.

The rules follow what is known to break: sums of squares overflow (LayerNorm by hand), mask constants and infinities
do not fit, guards such as 1e-12 vanish, indices beyond 2048 lose their last bit, pixel coordinates of 640 have a step
of 0.5, equal scores change the order that TopK gives.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from edgeds.errors import SpecError
from edgeds.graph.halfscan import FLEXIBLE, FloatScan
from edgeds.graph.halfvalues import (
    HALF_SMALLEST_NORMAL,
    HEAVY_OPS,
    ScaleFit,
    describe_misfit,
    fit_scale,
    large_flow,
)
from edgeds.graph.proto import attributes, is_standard, subgraphs
from edgeds.graph.view import GraphView

NORMS = frozenset(
    {"LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization", "LpNormalization"}
    | {"MeanVarianceNormalization", "LRN"}
)
_EXACT_OPS = {
    **dict.fromkeys(NORMS, "normalisation"),
    **dict.fromkeys(("ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd"), "may overflow"),
    **dict.fromkeys(("CumSum", "DFT", "STFT", "Det"), "long sums lose digits"),
    **dict.fromkeys(("GridSample", "RoiAlign", "AffineGrid"), "reads positions in an image"),
    **dict.fromkeys(("TopK", "NonMaxSuppression"), "orders scores, which tie in float16"),
}
_SCORE_OPS = frozenset(
    {"Sigmoid", "Softmax", "Split", "Slice", "Concat", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze"}
    | {"ReduceMax", "Gather", "GatherElements", "GatherND", "Mul", "Max", "Identity", "Cast"}
)
_FROM_ATTRIBUTES = frozenset({"ConstantOfShape", "RandomNormal", "RandomUniform", "EyeLike", "Range"})
_GATHERS = frozenset({"Gather", "GatherElements", "GatherND"})
_SMALL_TABLE = 4096
_COORDINATE = 8.0
"""Constants above this in the arithmetic after the last layer are taken for strides, anchors or pixel factors."""


@dataclass(kw_only=True)
class HalfPlan:
    """``floats``: node name -> why it stays float32. ``scales``: DequantizeLinear name -> its new scale and values."""

    floats: dict[str, str] = field(default_factory=dict)
    scales: dict[str, ScaleFit] = field(default_factory=dict)

    def keep(self, nodes: Iterable[NodeProto], reason: str) -> None:
        """Let nodes stay float32; the first reason stays."""
        for node in nodes:
            self.floats.setdefault(node.name, reason)


def plan_half(view: GraphView, *, keep: Sequence[str] = (), peaks: Mapping[str, float] | None = None) -> HalfPlan:
    """Decide for every node. ``keep`` are node names or patterns (``/decoder/*``), ``peaks`` measured magnitudes.

    Raises SpecError for a name that matches no node.
    """
    scan = FloatScan(view, dict(peaks or {}))
    plan = HalfPlan()
    plan.keep(_named(view, keep), "named by the caller")
    _keep_large_and_small(scan, plan)
    _keep_sums_of_squares(scan, plan)
    # What is computed from shapes and indices alone is small, and wrong beyond 2048 in float16.
    indices = _index_nodes(scan)
    plan.keep((node for node in view.nodes if node.name in indices), "computed from shapes or indices")
    for node in view.nodes:
        if node.op_type in _EXACT_OPS and is_standard(node):
            plan.keep([node], _EXACT_OPS[node.op_type])
        if node.op_type in ("TopK", "NonMaxSuppression"):
            before = scan.upstream([node], lambda item: item.op_type in _SCORE_OPS)
            plan.keep(before, f"its scores are ordered by {node.op_type}")
        if node.op_type in ("ScatterElements", "ScatterND") and attributes(node).get("reduction", b"none") != b"none":
            plan.keep([node], "long sums lose digits")
        if node.op_type in ("ReduceL2", "ReduceSumSquare"):
            plan.keep(scan.guarded([node]), f"uses the norm of {node.name!r}")
        if node.op_type == "Pow" and scan.may_overflow(node):
            plan.keep([node], "a power may overflow")
    _keep_coordinates(scan, plan, indices)
    if scan.is_mixed():
        plan.keep((n for n in view.nodes if scan.is_float32(n)), "is float32 in a model that mixes precisions")
    _fit_scales(scan, plan)
    return plan


def _named(view: GraphView, keep: Sequence[str]) -> list[NodeProto]:
    by_name = {node.name: node for node in view.nodes}
    found: list[NodeProto] = []
    for name in keep:
        matches = [name] if name in by_name else fnmatch.filter(by_name, name)
        if not matches:
            near = difflib.get_close_matches(name, by_name, n=3)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise SpecError(f"keep: the model has no node named {name!r}{hint}")
        found += [by_name[match] for match in matches]
    return found


def _keep_large_and_small(scan: FloatScan, plan: HalfPlan) -> None:
    view, large_constants = scan.view, dict[str, str]()
    misfits: dict[tuple[str, bool], str | None] = {}
    for node in view.nodes:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear", "Constant"):
            continue
        for index, name in scan.constants(node):
            if node.op_type == "Clip" and index > 0:
                continue  # limits saturate
            divides = (node.op_type == "Div" and index == 1) or (node.op_type == "BatchNormalization" and index == 4)
            if (name, divides) not in misfits:
                value = view.constant(name)
                misfits[name, divides] = None if value is None else describe_misfit(value, divides=divides)
            kind, _, reason = (misfits[name, divides] or "").partition(": ")
            if kind == "large":
                large_constants[name] = reason
            elif kind == "small":
                plan.keep([node], reason)
                if node.op_type in ("Add", "Max", "Sum") and _is_scalar(view, name):
                    plan.keep(scan.guarded([node]), f"guarded by {reason}")
    for node in view.nodes:
        limit = _tiny_lower_limit(view, node)
        if limit is not None:
            plan.keep([node, *scan.guarded([node])], f"guarded by constant {limit:g}")
    large = large_flow(view, large_constants, scan.peaks, scan.flexible)
    tiny = {n for n, peak in scan.peaks.items() if 0 < peak < HALF_SMALLEST_NORMAL and n in scan.flexible}
    for node in view.nodes:
        if node.op_type == "Constant":
            continue
        limits = node.input[1:] if node.op_type == "Clip" else ()
        touched = [name for name in (*node.input, *node.output) if name in large and name not in limits]
        if touched:
            plan.keep([node], large[touched[0]])
        elif any(name in tiny for name in (*node.input, *node.output)):
            plan.keep([node], "its values stay below float16's normal range on calibration data")


def _tiny_lower_limit(view: GraphView, node: NodeProto) -> float | None:
    """The lower limit of a Clip that keeps a divisor from zero."""
    value = view.constant(node.input[1]) if node.op_type == "Clip" and len(node.input) > 1 else None
    if value is None or value.dtype not in FLEXIBLE or not value.size:
        return None
    limit = float(value.max())
    return limit if 0 < limit < HALF_SMALLEST_NORMAL else None


def _is_scalar(view: GraphView, name: str) -> bool:
    value = view.constant(name)
    return value is not None and value.size == 1


def _keep_sums_of_squares(scan: FloatScan, plan: HalfPlan) -> None:
    """LayerNorm, RMSNorm and the like spelled out: square, mean, guard, root, division, and the centring before."""
    for node in scan.view.nodes:
        if node.op_type not in ("ReduceMean", "ReduceSum", "GlobalAveragePool"):
            continue
        square = scan.view.producer(node.input[0])
        if square is not None and square.op_type == "Cast":
            square = scan.view.producer(square.input[0])
        if square is None or not _is_square(scan.view, square):
            continue
        chain = [square, node, *scan.guarded([node])]
        centre = scan.view.producer(square.input[0])
        if centre is not None and centre.op_type == "Sub":
            chain += [centre, *(maker for maker in scan.makers(centre) if maker.op_type == "ReduceMean")]
        plan.keep(chain, f"normalisation: mean of squares in {node.name!r}")


def _is_square(view: GraphView, node: NodeProto) -> bool:
    if node.op_type == "Mul":
        return node.input[0] == node.input[1]
    exponent = view.constant(node.input[1]) if node.op_type == "Pow" else None
    return exponent is not None and exponent.size == 1 and float(exponent.reshape(-1)[0]) == 2.0


def _index_nodes(scan: FloatScan) -> set[str]:
    """Names of float nodes whose dynamic inputs are all integers, shapes, or floats made from those."""
    known: set[str] = set()
    for node in scan.view.nodes:
        dynamic = [name for name in node.input if name and not scan.view.is_constant(name)]
        floats = [name for name in dynamic if name in scan.flexible]
        if _makes_activations(scan, node, floats) or not all(_derived(scan.view, name, known) for name in floats):
            continue
        if (dynamic or node.op_type in _FROM_ATTRIBUTES) and any(name in scan.flexible for name in node.output):
            known.add(node.name)
    return known


def _makes_activations(scan: FloatScan, node: NodeProto, floats: Sequence[str]) -> bool:
    """Whether a node turns integers into features: layers with weights, embeddings, images in bytes, masks."""
    view = scan.view
    if node.op_type in ("Conv", "ConvTranspose", "Constant", "DequantizeLinear") or subgraphs(node):
        return True
    if node.op_type in HEAVY_OPS:
        return any(_elements(view, name) > _SMALL_TABLE for _, name in scan.constants(node))
    if node.op_type in _GATHERS:
        return view.is_constant(node.input[0]) and len(view.shape(node.input[0]) or ()) > 1
    if node.op_type == "Cast" and not floats:
        dtype = scan.dtypes.get(node.input[0])
        return dtype is None or dtype.kind not in "iu" or dtype.itemsize == 1
    return not is_standard(node)


def _derived(view: GraphView, name: str, known: Collection[str]) -> bool:
    maker = view.producer(name)
    return maker is not None and maker.name in known


def _elements(view: GraphView, name: str) -> int:
    return int(np.prod([dim for dim in view.shape(name) or () if isinstance(dim, int)], dtype=np.int64))


def _keep_coordinates(scan: FloatScan, plan: HalfPlan, indices: Collection[str]) -> None:
    """Box arithmetic behind the last layers: what mixes in positions, strides or pixel factors, up to the outputs."""
    ends = HEAVY_OPS | NORMS | {"QuantizeLinear", "DequantizeLinear", "BatchNormalization"}
    makers = [maker for name in scan.view.outputs if (maker := scan.view.producer(name)) is not None]

    def in_tail(node: NodeProto) -> bool:
        return node.op_type not in ends and not subgraphs(node)

    last = [maker for maker in makers if in_tail(maker)]
    tail = {node.name for node in (*last, *scan.upstream(last, in_tail))}
    marked: set[str] = set()
    for node in scan.view.nodes:
        if node.name not in tail or not any(name in scan.flexible for name in node.output):
            continue
        scaled = node.op_type in ("Add", "Sub", "Mul", "Div") and any(
            _is_coordinate(scan.view, name) for _, name in scan.constants(node)
        )
        if node.name in indices or scaled or any(maker.name in marked for maker in scan.makers(node)):
            marked.add(node.name)
            plan.keep([node], "coordinates: positions in pixels need more digits")


def _is_coordinate(view: GraphView, name: str) -> bool:
    value = view.constant(name)
    return value is not None and value.size > 0 and float(np.abs(value).max()) > _COORDINATE


def _fit_scales(scan: FloatScan, plan: HalfPlan) -> None:
    """Scales must be normal float16 numbers; where they cannot be, what reads them stays float32."""
    view = scan.view
    for node in view.nodes:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or not is_standard(node):
            continue
        scale = view.constant(node.input[1])
        if scale is not None and scale.dtype not in FLEXIBLE:
            continue
        if scale is None or node.name in plan.floats:
            plan.keep(
                [node, *_float_readers(scan, node)], plan.floats.get(node.name, "its scale is computed at run time")
            )
            continue
        values = view.constant(node.input[0]) if node.op_type == "DequantizeLinear" else None
        axis = int(attributes(node).get("axis", 1)) if scale.ndim == 1 and scale.size > 1 else None
        fit = fit_scale(scale, values, axis)
        if fit.problem is not None:
            plan.keep([node, *_float_readers(scan, node)], fit.problem)
        elif fit.scale is not None:
            plan.scales[node.name] = fit


def _float_readers(scan: FloatScan, node: NodeProto) -> list[NodeProto]:
    """What reads a dequantized tensor: a Cast in between would keep the layer from running in INT8."""
    readers = scan.readers(node) if node.op_type == "DequantizeLinear" else []
    return [reader for reader in readers if reader.op_type != "QuantizeLinear"]
