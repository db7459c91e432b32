"""Cut a network at named tensors, so that each piece can run on values given from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, helper

from edgeds.graph.nodes import copied, rename_captures
from edgeds.graph.proto import captured_names, node_inputs, subgraphs
from edgeds.graph.shapes import infer_types
from edgeds.graph.sort import live_nodes, sort_nodes


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A network of its own, for part of another one."""

    model: ModelProto
    given: tuple[str, ...]
    """Shared tensors that the piece reads instead of computing them."""


class CutGraph:
    """B with every reader of a shared tensor reading a graph input in its place."""

    def __init__(self, model: ModelProto, shared: Sequence[str]) -> None:
        self.model = model
        self.types = infer_types(model)
        taken = {name for node in model.graph.node for name in (*node.input, *node.output)}
        self._given = {name: _free(f"{name}__given", taken) for name in shared}
        self.nodes = [self._cut(node) for node in model.graph.node]
        self._back = {given: name for name, given in self._given.items()}

    def given_name(self, tensor: str) -> str:
        """The input that stands for a shared tensor."""
        return self._given[tensor]

    def _cut(self, node: NodeProto) -> NodeProto:
        node = copied(node)
        for index, name in enumerate(node.input):
            node.input[index] = self._given.get(name, name)
        for name in {name for inner in subgraphs(node) for name in captured_names(inner)} & set(self._given):
            rename_captures(node, old=name, new=self._given[name])
        return node

    def piece(self, outputs: Sequence[str]) -> Piece:
        """The nodes that compute ``outputs`` from shared tensors, graph inputs and weights."""
        graph = self.model.graph
        nodes = live_nodes(self.nodes, outputs=outputs)
        read = {name for node in nodes for name in node_inputs(node)}
        given = [self._back[name] for name in read if name in self._back]
        weights = [tensor for tensor in graph.initializer if tensor.name in read]
        stored = {tensor.name for tensor in graph.initializer}
        inputs = [item for item in graph.input if item.name in read and item.name not in stored]
        inputs += [
            helper.make_tensor_value_info(self._given[name], self.types[name].tensor_type.elem_type, None)
            for name in given
        ]
        available = {item.name for item in inputs} | stored
        result = ModelProto()
        result.ir_version = self.model.ir_version
        result.opset_import.extend(self.model.opset_import)
        result.graph.name = "piece"
        result.graph.node.extend(sort_nodes(nodes, available=available))
        result.graph.input.extend(inputs)
        result.graph.initializer.extend(weights)
        for name in outputs:
            kind = self.types[name].tensor_type.elem_type
            result.graph.output.append(helper.make_tensor_value_info(name, kind, None))
        return Piece(model=result, given=tuple(sorted(given)))


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
