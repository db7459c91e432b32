"""Rewrite a network to the planned types: constants copied, Casts put where types meet, Q/DQ scales retyped."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from edgeds.graph.halfplan import HalfPlan
from edgeds.graph.halfscan import FLEXIBLE
from edgeds.graph.halfvalues import HALF_MAX
from edgeds.graph.nodes import copied, rename_captures
from edgeds.graph.proto import captured_names, is_standard, main_opset, subgraphs
from edgeds.graph.schemas import HALF, OpTypes, op_types
from edgeds.graph.view import GraphView

Dtype = np.dtype[Any]
FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
_ELEM = {FLOAT32: TensorProto.FLOAT, FLOAT16: TensorProto.FLOAT16}

_TYPE_STAYS = frozenset(
    {"ConstantOfShape", "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "EyeLike"}
    | {"Multinomial", "Bernoulli", "Optional", "OptionalGetElement", "BitCast", "MelWeightMatrix"}
)
"""Operators whose result type is an attribute, a matter of bits, or hidden in a container: left as they are."""
_READS_ANY = frozenset({"Shape", "Size"})
_UNTOUCHED_INPUTS = {"Resize": (1,), "Upsample": (1,), "Dropout": (1,), "OneHot": (1,)}
"""Inputs with a type of their own that TensorRT wants as float32 or does not read."""


class Retyper:
    """Edits a view in place. ``io`` is the type of float graph inputs and outputs; None: as they are.

    ``types`` holds the current type of every float32/float16 tensor; tensors of unknown type keep what they have.
    """

    def __init__(self, view: GraphView, plan: HalfPlan, *, io: Dtype | None) -> None:
        self.view, self.plan, self.io = view, plan, io
        self.opset = main_opset(view.model)
        names = {name for node in view.nodes for name in (*node.input, *node.output) if name}
        names |= {name for node in view.nodes for inner in subgraphs(node) for name in captured_names(inner)}
        known = {name: view.dtype(name) for name in names | set(view.inputs) | set(view.outputs)}
        self.unknown = {name for name, dtype in known.items() if dtype is None}
        self.original: dict[str, Dtype] = {n: d for n, d in known.items() if d is not None and d in FLEXIBLE}
        self.types = dict(self.original)
        self._copies: dict[tuple[str, Dtype], str] = {}
        self._clamped: dict[tuple[str, Dtype], str] = {}
        self._dequantizers: dict[str, NodeProto] = {}

    def run(self) -> None:
        """Retype inputs, every node in order, then outputs."""
        graph = self.view.model.graph
        del graph.value_info[:]  # stored types of the old network
        for item in graph.input:
            if item.name in self.types and item.name in self.view.inputs:
                self.types[item.name] = self.io or self.original[item.name]
                item.type.tensor_type.elem_type = _ELEM[self.types[item.name]]
        for node in self.view.nodes:
            self._retype(node)
        for item in graph.output:
            if item.name in self.original:
                wanted = self.io or self.original[item.name]
                self._finish_output(item.name, wanted)
                item.type.tensor_type.elem_type = _ELEM[wanted]

    # one node -----------------------------------------------------------------------------------------------------

    def _retype(self, node: NodeProto) -> None:
        rules = op_types(node, opset=self.opset)
        if node.op_type == "Constant" or (node.op_type in _READS_ANY and is_standard(node)):
            return
        if rules is None or self._must_stay(node):
            self._restore(node)
        elif node.op_type == "Cast":
            self._retype_cast(node)
        elif node.op_type == "QuantizeLinear":
            self._retype_quantize(node)
        elif node.op_type == "DequantizeLinear":
            self._retype_dequantize(node)
        else:
            self._retype_plain(node, rules)

    def _must_stay(self, node: NodeProto) -> bool:
        touched = (*node.input, *node.output)
        return bool(subgraphs(node)) or node.op_type in _TYPE_STAYS or any(name in self.unknown for name in touched)

    def _restore(self, node: NodeProto) -> None:
        """Give a node (and its bodies) every input in the type it had; outputs keep theirs."""
        for index, name in enumerate(node.input):
            if name in self.original:
                self.view.set_input(node, index, self.as_type(name, self.original[name]))
        if not subgraphs(node):
            return
        renamed = copied(node)
        for name in sorted(set().union(*(captured_names(inner) for inner in subgraphs(node)))):
            if name in self.original and self.types[name] != self.original[name]:
                rename_captures(renamed, old=name, new=self.as_type(name, self.original[name]))
        self.view.remove_node(node)
        self.view.add_node(renamed).name = node.name

    def wanted(self, node: NodeProto) -> Dtype:
        """The planned type of a node's own arithmetic."""
        return FLOAT32 if node.name in self.plan.floats else FLOAT16

    def _retype_plain(self, node: NodeProto, rules: OpTypes) -> None:
        want = self.wanted(node)
        untouched = _UNTOUCHED_INPUTS.get(node.op_type, ())
        for index, name in enumerate(node.input):
            if name not in self.types:
                continue
            kind = self._allowed(rules, rules.input(index), want)
            if index in untouched:
                kind = self.original[name]
            if node.op_type == "Clip" and index > 0 and self.view.is_constant(name):
                self.view.set_input(node, index, self._clip_limit(name, kind))
            else:
                self.view.set_input(node, index, self.as_type(name, kind))
        for index, name in enumerate(node.output):
            if name in self.types:
                self.types[name] = self._allowed(rules, rules.output(index), want)

    def _allowed(self, rules: OpTypes, variable: str, want: Dtype) -> Dtype:
        return want if want == FLOAT32 or rules.takes(variable, HALF) else FLOAT32

    def _retype_cast(self, node: NodeProto) -> None:
        output = node.output[0]
        if output not in self.types:
            return  # to integers or booleans: exact from either type
        self.types[output] = self.wanted(node)
        for attribute in node.attribute:
            if attribute.name == "to":
                attribute.i = _ELEM[self.types[output]]

    def _retype_quantize(self, node: NodeProto) -> None:
        """The scale has the type of what is quantized; stored weights are quantized as they are."""
        source, scale = node.input[0], node.input[1]
        if source not in self.types or scale not in self.types:
            return
        kind = self.types[source]
        if node.name in self.plan.floats or (self.view.is_constant(source) and self.original[source] == FLOAT32):
            kind = FLOAT32
        self.view.set_input(node, 0, self.as_type(source, kind))
        self.view.set_input(node, 1, self.as_type(scale, kind))

    def _retype_dequantize(self, node: NodeProto) -> None:
        """The scale has the type that the readers want, so that nothing comes between them and the node."""
        output = node.output[0]
        if output not in self.types or node.input[1] not in self.types:
            return
        self._dequantizers[output] = copied(node)
        kinds = {self._reader_type(reader) for reader in self.view.consumers(output)}
        if self.view.is_output(output):
            kinds.add(self.io or self.original[output])
        if self.view.used_in_subgraph(output):
            kinds.add(self.original[output])
        if node.name in self.plan.floats or (kinds and FLOAT16 not in kinds):
            self._set_scale(node, FLOAT32)
        else:
            self._set_scale(node, FLOAT16)

    def _reader_type(self, reader: NodeProto) -> Dtype:
        if op_types(reader, opset=self.opset) is None or self._must_stay(reader):
            return FLOAT32
        return self.wanted(reader)

    def _set_scale(self, node: NodeProto, kind: Dtype) -> None:
        fit = self.plan.scales.get(node.name)
        if fit is not None and fit.scale is not None and fit.values is not None and kind == FLOAT16:
            self.view.set_input(node, 1, self.view.add_constant(f"{node.input[1]}_float16", fit.scale.astype(kind)))
            self.view.set_input(node, 0, self.view.add_constant(f"{node.input[0]}_widened", fit.values))
        else:
            self.view.set_input(node, 1, self.as_type(node.input[1], kind))
        for attribute in node.attribute:
            if attribute.name == "output_dtype" and attribute.i:
                attribute.i = _ELEM[kind]
        self.types[node.output[0]] = kind

    # tensors ------------------------------------------------------------------------------------------------------

    def as_type(self, name: str, kind: Dtype) -> str:
        """The tensor in that type: itself, a converted constant, a second DequantizeLinear, or a Cast (each once)."""
        if self.types[name] == kind:
            return name
        key = (name, kind)
        if key not in self._copies:
            self._copies[key] = self._convert(name, kind)
            self.types[self._copies[key]] = self.original[self._copies[key]] = kind
        return self._copies[key]

    def _convert(self, name: str, kind: Dtype) -> str:
        value = self.view.constant(name)
        if value is not None:
            with np.errstate(over="ignore"):  # infinities are kept in float32 by the plan, or wanted as such
                return self.view.add_constant(f"{name}_{kind.name}", value.astype(kind))
        output = self.view.fresh_name(f"{name}_{kind.name}")
        source = self._dequantizers.get(name)
        if source is not None and source.name not in self.plan.floats:
            twin = copied(source)
            twin.output[0], twin.name = output, f"{source.name}_{kind.name}"
            self.types[output] = self.original[output] = kind
            self._set_scale(self.view.add_node(twin), kind)
        else:
            self.view.make_node("Cast", [name], [output], name=f"{name}_to_{kind.name}", to=_ELEM[kind])
        return output

    def _clip_limit(self, name: str, kind: Dtype) -> str:
        """A clipping limit: beyond the type's range it is the range's end, which clips nothing."""
        value = self.view.constant(name)
        if kind == FLOAT32 or value is None or not float(np.abs(value).max(initial=0.0)) > HALF_MAX:
            return self.as_type(name, kind)
        if (name, kind) not in self._clamped:
            limited = np.clip(value, -HALF_MAX, HALF_MAX).astype(kind)
            self._clamped[name, kind] = self.view.add_constant(f"{name}_{kind.name}", limited)
        return self._clamped[name, kind]

    def _finish_output(self, name: str, wanted: Dtype) -> None:
        """Let a graph output have the wanted type under its own name."""
        if self.types[name] == wanted:
            return
        maker = self.view.producer(name)
        value = self.view.constant(name)
        if maker is None and value is not None:  # a weight that is an output as well
            self.view.replace_uses(name, self.view.add_constant(f"{name}_{value.dtype.name}", value))
            self.view.set_constant(name, value.astype(wanted))
            return
        assert maker is not None  # an input passed through already has the wanted type
        inner = self.view.fresh_name(f"{name}_{self.types[name].name}")
        self.view.set_output(maker, name, inner)
        self.view.replace_uses(name, inner)
        self.view.make_node("Cast", [inner], [name], name=f"{name}_to_{wanted.name}", to=_ELEM[wanted])
