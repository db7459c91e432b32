"""Convert a float (or INT8 Q/DQ) network to float16 for strongly typed builds: what breaks stays float32, and is named.

| part                                              | result                                                   |
|---------------------------------------------------|----------------------------------------------------------|
| Conv, MatMul, activations, moves                  | float16                                                  |
| normalisation, sums of squares, large or tiny     | float32, with a Cast where the types meet                |
| constants, index arithmetic, coordinates          |                                                          |
| QuantizeLinear, DequantizeLinear                  | same integers; the scale has the type of the float side  |
| graph inputs and outputs                          | as asked (float32)                                       |
| bodies of If, Loop and Scan, custom operators     | as they were                                             |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from onnx import ModelProto, NodeProto

from edgeds.errors import ModelError, SpecError
from edgeds.graph.fold import fold_constants
from edgeds.graph.halfplan import HalfPlan, plan_half
from edgeds.graph.opset import require_opset
from edgeds.graph.proto import each_graph, main_opset, one_line, subgraphs
from edgeds.graph.retype import FLOAT16, FLOAT32, Retyper
from edgeds.graph.schemas import op_types
from edgeds.graph.session import open_session, runtime_errors
from edgeds.graph.typecheck import check_types
from edgeds.graph.view import GraphView

QDQ_HALF_OPSET = 19
"""The first opset in which QuantizeLinear and DequantizeLinear take float16."""

IoType = Literal["float32", "float16", "keep"]
Ranges = Mapping[str, Any]
_IO: dict[str, np.dtype[Any] | None] = {"float32": FLOAT32, "float16": FLOAT16, "keep": None}


@dataclass(frozen=True, kw_only=True)
class KeptNode:
    """A node that stays float32, and why."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class HalfReport:
    """The converted model and what to know about it. ``half_nodes`` counts the nodes that compute in float16."""

    model: ModelProto
    kept: tuple[KeptNode, ...]
    half_nodes: int
    notes: tuple[str, ...] = ()


def to_float16(
    model: ModelProto, *, keep: Sequence[str] = (), ranges: Ranges | None = None, io: IoType = "float32"
) -> ModelProto:
    """Return the model in float16, strongly typed; see ``convert_float16`` for the arguments and the report."""
    return convert_float16(model, keep=keep, ranges=ranges, io=io).model


def convert_float16(
    model: ModelProto, *, keep: Sequence[str] = (), ranges: Ranges | None = None, io: IoType = "float32"
) -> HalfReport:
    """Convert the float parts of ``model`` to float16; the given model is not changed.

    ``keep``: names of nodes (or patterns such as ``/head/*``) that stay float32. ``ranges``: what calibration saw, by
    tensor: the largest magnitude, a (minimum, maximum) pair, or an object with ``minimum`` and ``maximum``; tensors
    beyond 32752 (65504 with a factor of 2 in hand) keep their producer and readers float32. ``io``: type of float
    inputs and outputs (``keep``: the one each has). Constants are folded first; names of surviving nodes and outputs
    never change. The opset is raised, to 19, only for Q/DQ in float16.

    The result passes the full ONNX checker and ``typecheck.check_types``. Raises SpecError for bad arguments and
    ModelError for a model that cannot be converted.
    """
    if io not in _IO:
        raise SpecError(f"io {io!r}: expected one of {', '.join(_IO)}")
    if isinstance(keep, str):
        raise SpecError(f"keep {keep!r}: give a list of node names")
    peaks = peaks_of(ranges or {})
    if not main_opset(model):
        raise ModelError("the model imports no default operator set, so it holds nothing to convert to float16")
    folded = fold_constants(model)
    keep = _still_there(keep, model, folded)
    view, plan = _planned(folded, keep, peaks)
    if main_opset(folded) < QDQ_HALF_OPSET and _has_half_qdq(view, plan):
        view, plan = _planned(require_opset(folded, QDQ_HALF_OPSET), keep, peaks)
    opset = main_opset(view.model)
    kept = tuple(_kept_nodes(view, plan, opset=opset))
    Retyper(view, plan, io=_IO[io]).run()
    result = view.finish()
    check_types(result, where="float16 conversion")
    notes = tuple(f"{name}: {fit.note}" for name, fit in plan.scales.items() if fit.note)
    return HalfReport(model=result, kept=kept, half_nodes=_count_half(view), notes=notes)


def peaks_of(ranges: Ranges) -> dict[str, float]:
    """Largest magnitude per tensor from any of the forms that ``convert_float16`` takes. NaN is refused."""
    peaks: dict[str, float] = {}
    for name, value in ranges.items():
        if hasattr(value, "minimum") and hasattr(value, "maximum"):
            if not getattr(value, "count", 1):
                continue  # never seen, so nothing is known
            value = (value.minimum, value.maximum)
        try:
            peak = float(np.abs(np.asarray(value, np.float64)).max())
        except (TypeError, ValueError) as error:
            raise SpecError(f"ranges[{name!r}]: {value!r} is not a magnitude or a (minimum, maximum) pair") from error
        if np.isnan(peak):
            raise SpecError(f"ranges[{name!r}]: {value!r} holds NaN; leave the tensor out or measure it again")
        peaks[name] = peak
    return peaks


def _still_there(keep: Sequence[str], model: ModelProto, folded: ModelProto) -> list[str]:
    """The names to look up after folding: a node folded away, or inside a body, is float32 anyway."""
    present = {node.name for node in folded.graph.node}
    gone = {node.name for graph in each_graph(model.graph) for node in graph.node} - present
    return [name for name in keep if name not in gone]


def _planned(model: ModelProto, keep: Sequence[str], peaks: Mapping[str, float]) -> tuple[GraphView, HalfPlan]:
    view = GraphView(model)
    return view, plan_half(view, keep=keep, peaks=peaks)


def _has_half_qdq(view: GraphView, plan: HalfPlan) -> bool:
    return any(
        node.op_type in ("QuantizeLinear", "DequantizeLinear") and node.name not in plan.floats for node in view.nodes
    )


def _kept_nodes(view: GraphView, plan: HalfPlan, *, opset: int) -> Iterable[KeptNode]:
    for node in view.nodes:
        if node.op_type == "Constant" or not _touches_float(view, node):
            continue
        reason = plan.floats.get(node.name)
        if subgraphs(node):
            reason = "control flow: its bodies stay as they are"
        elif op_types(node, opset=opset) is None:
            reason = f"operator of domain {node.domain or 'ai.onnx'} without type rules"
        if reason is not None:
            yield KeptNode(node=node.name, op=node.op_type, reason=reason)


def _touches_float(view: GraphView, node: NodeProto) -> bool:
    return any(view.dtype(name) in (FLOAT16, FLOAT32) for name in (*node.input, *node.output) if name)


def _count_half(view: GraphView) -> int:
    return sum(
        any(view.dtype(name) == FLOAT16 for name in node.output if name)
        for node in view.nodes
        if node.op_type not in ("Constant", "Cast")
    )


def verify_float16(
    reference: ModelProto,
    converted: ModelProto,
    feeds: Iterable[Mapping[str, np.ndarray[Any, Any]]],
    *,
    threads: int | None = None,
) -> dict[str, float]:
    """Run both in ONNX Runtime; largest absolute difference per float output.

    Raises ModelError when the converted model does not load or run, or gives NaN or infinity where the reference does
    not. ONNX Runtime computes float16 on CPUs partly in float32, so overflow inside is found by ``find_amplitudes`` and
    ``ranges``, not here.
    """
    sessions = [open_session(item, threads=threads) for item in (reference, converted)]
    names = [item.name for item in reference.graph.output]
    worst: dict[str, float] = {}
    for sample in feeds:
        before, after = (_run(session, names, sample) for session in sessions)
        for name, want, got in zip(names, before, after, strict=True):
            if not isinstance(want, np.ndarray) or want.dtype.kind != "f":
                continue
            if want.shape != got.shape:
                raise ModelError(f"output {name!r}: shape {list(got.shape)} in float16, {list(want.shape)} in float32")
            known = np.isfinite(want)
            if not np.isfinite(got[known]).all():
                raise ModelError(
                    f"output {name!r} holds NaN or infinity in float16 and not in float32; give ranges measured on "
                    "samples, or name the nodes to keep float32"
                )
            difference = np.abs(got[known].astype(np.float64) - want[known].astype(np.float64))
            worst[name] = max(worst.get(name, 0.0), float(difference.max(initial=0.0)))
    return worst


def _run(session: Any, names: Sequence[str], feeds: Mapping[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    fed = {}
    for item in session.get_inputs():
        if item.name not in feeds:
            raise SpecError(f"feeds: no array for input {item.name!r}")
        half = {"tensor(float16)": np.float16, "tensor(float)": np.float32}.get(item.type)
        array = feeds[item.name]
        fed[item.name] = array.astype(half) if half is not None and array.dtype.kind == "f" else array
    try:
        return session.run(list(names), fed)
    except runtime_errors() as error:
        raise ModelError(f"the model does not run on the samples given: {one_line(error)}") from error
