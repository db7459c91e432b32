"""An editable index over the main graph of a model: producers, consumers, constants, shapes, safe edits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from edgeds.errors import ModelError
from edgeds.graph.nodes import constant_value, copied, name_nodes, rename_captures
from edgeds.graph.proto import (
    captured_names,
    clone_model,
    dims_of,
    each_graph,
    is_standard,
    np_dtype,
    subgraphs,
)
from edgeds.graph.shapes import infer_types
from edgeds.graph.sort import live_nodes, sort_nodes
from edgeds.graph.validate import check_model
from edgeds.specs import Dim


class GraphView:
    """Index and edit one model. The model given is not touched: edits go to a copy, which ``finish()`` returns.

    ``copy=False`` edits (and names unnamed nodes of) the given model itself; use it for reading or when the caller
    owns the model. Nodes without a name get ``<op>_<index>`` at construction and repeated names a suffix, so that every
    report and selection can name every node; other names never change. Node objects stay valid until ``finish()``.
    Captures by subgraphs count as uses everywhere.
    """

    def __init__(self, model: ModelProto, *, copy: bool = True) -> None:
        self.model = clone_model(model) if copy else model
        self._inferred: dict[str, TypeProto] | None = None
        self._edited = False
        self._rebuild()

    # reading ------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[NodeProto]:
        """Main-graph nodes: topological order as loaded, added nodes last (until ``finish()``)."""
        return list(self._nodes.values())

    @property
    def inputs(self) -> list[str]:
        """Names of the graph inputs that a caller feeds."""
        return [item.name for item in self.model.graph.input if item.name not in self._initializers]

    @property
    def outputs(self) -> list[str]:
        return [item.name for item in self.model.graph.output]

    def producer(self, tensor: str) -> NodeProto | None:
        """The main-graph node that computes a tensor; None for inputs, initializers and unknown names."""
        key = self._producers.get(tensor)
        return None if key is None else self._nodes[key]

    def consumers(self, tensor: str) -> list[NodeProto]:
        """Main-graph nodes with the tensor among their inputs, each once, in order. Captures: ``used_in_subgraph``."""
        return [self._nodes[key] for key in self._consumers.get(tensor, ())]

    def used_in_subgraph(self, tensor: str) -> bool:
        """Whether a branch or loop body of a main-graph node reads the tensor through the outer scope."""
        return bool(self._captures.get(tensor))

    def is_input(self, tensor: str) -> bool:
        return tensor in self.inputs

    def is_output(self, tensor: str) -> bool:
        return tensor in self.outputs

    def is_constant(self, tensor: str) -> bool:
        """Whether ``constant`` would return a value, without building it."""
        node = self.producer(tensor)
        return tensor in self._initializers or (node is not None and node.op_type == "Constant" and is_standard(node))

    def constant(self, tensor: str) -> NDArray[Any] | None:
        """Value of an initializer or Constant node (a fresh array on every call); None for anything computed."""
        stored = self._initializers.get(tensor)
        if stored is not None:
            return numpy_helper.to_array(stored)
        node = self.producer(tensor)
        if node is None or node.op_type != "Constant" or not is_standard(node):
            return None
        return constant_value(node)

    def shape(self, tensor: str) -> tuple[Dim, ...] | None:
        """Dims as numbers, names or None; None when the rank is unknown. Inferred on first need."""
        stored = self._initializers.get(tensor)
        if stored is not None:
            return tuple(stored.dims)
        found = self._type(tensor)
        return None if found is None else dims_of(found)

    def dtype(self, tensor: str) -> np.dtype[Any] | None:
        """numpy dtype (object for strings); None when unknown or not a tensor. Inferred on first need."""
        stored = self._initializers.get(tensor)
        if stored is not None:
            return np_dtype(stored.data_type)
        found = self._type(tensor)
        if found is None or found.WhichOneof("value") != "tensor_type":
            return None
        return np_dtype(found.tensor_type.elem_type)

    def _type(self, tensor: str) -> TypeProto | None:
        if not tensor:
            return None
        if self._inferred is None:
            self._flush()
            self._inferred = infer_types(self.model)
        return self._inferred.get(tensor)

    # editing ------------------------------------------------------------------------------------------------------

    def fresh_name(self, base: str) -> str:
        """A name no tensor or node of the model (subgraphs included) has: ``base``, else ``base_1``, ..."""
        name, index = base, 0
        while not name or name in self._names:
            index += 1
            name = f"{base}_{index}"
        self._names.add(name)
        return name

    def add_constant(self, base: str, array: NDArray[Any] | np.generic) -> str:
        """Add an initializer; return its name (fresh, from ``base``). Shape and dtype are the array's."""
        name = self.fresh_name(base)
        self._add_tensor(numpy_helper.from_array(np.ascontiguousarray(array).reshape(np.shape(array)), name))
        return name

    def add_tensor(self, tensor: TensorProto) -> str:
        """Add a ready TensorProto as an initializer (for types numpy has no dtype for); return its name, made fresh."""
        copy = TensorProto()
        copy.CopyFrom(tensor)
        copy.name = self.fresh_name(tensor.name)
        self._add_tensor(copy)
        return copy.name

    def store_constant(self, name: str, array: NDArray[Any]) -> None:
        """Add an initializer under exactly this name, the output of a node just removed."""
        if name in self._producers or name in self._initializers:
            raise ModelError(f"tensor {name!r} already exists")
        self._add_tensor(numpy_helper.from_array(np.ascontiguousarray(array).reshape(np.shape(array)), name))

    def set_constant(self, name: str, array: NDArray[Any]) -> None:
        """Replace the value of an existing initializer, keeping its name."""
        if name not in self._initializers:
            raise ModelError(f"there is no initializer {name!r} to set")
        self._initializers[name].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), name))

    def add_node(self, node: NodeProto) -> NodeProto:
        """Add a node (copied; an empty or taken name is made unique) and return the copy. Order is up to ``finish``."""
        copy = NodeProto()
        copy.CopyFrom(node)
        for name in copy.output:
            if name and (name in self._producers or name in self._initializers or self.is_input(name)):
                raise ModelError(f"node {node.name!r}: tensor {name!r} already exists")
        copy.name = self.fresh_name(node.name or node.op_type)
        self._names.update(name for name in copy.output if name)
        self._index(copy)
        return copy

    def make_node(
        self, op: str, inputs: Iterable[str], outputs: Iterable[str], *, name: str = "", **attrs: Any
    ) -> NodeProto:
        """``add_node`` of a new default-domain node."""
        return self.add_node(helper.make_node(op, list(inputs), list(outputs), name=name, **attrs))

    def remove_node(self, node: NodeProto) -> None:
        """Remove a node. Whatever read its outputs must be rewired before ``finish()``."""
        self._unindex(node)
        name = node.name
        if not (name in self._producers or name in self._initializers or self.is_input(name)):
            self._names.discard(name)  # free for what takes the node's place, unless a tensor has it too

    def replace_input(self, node: NodeProto, old: str, new: str) -> None:
        """Let one node read ``new`` wherever its own inputs say ``old``. Its subgraphs are left alone."""
        self._unlink(node)
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new
        self._link(node)

    def set_input(self, node: NodeProto, index: int, new: str) -> None:
        """Set one input by position; missing optional inputs before it become empty."""
        self._unlink(node)
        while len(node.input) <= index:
            node.input.append("")
        node.input[index] = new
        self._link(node)

    def set_output(self, node: NodeProto, old: str, new: str) -> None:
        """Let a node produce ``new`` in place of ``old`` (readers of ``old`` are not changed)."""
        self._edited = True
        if new in self._producers and self._producers[new] != id(node):
            raise ModelError(f"node {node.name!r}: tensor {new!r} already has a producer")
        for index, name in enumerate(node.output):
            if name == old:
                node.output[index] = new
        self._producers.pop(old, None)
        self._producers[new] = id(node)
        self._names.add(new)

    def replace_uses(self, old: str, new: str) -> None:
        """Let every node and subgraph that reads ``old`` read ``new``. Graph outputs keep their names."""
        for node in self.consumers(old):
            self.replace_input(node, old, new)
        for key in list(self._captures.get(old, ())):
            node = self._nodes[key]
            self._unlink(node)
            rename_captures(node, old=old, new=new)
            self._link(node)

    def finish(self) -> ModelProto:
        """Return the edited model: dead nodes and initializers dropped, nodes sorted (captures are dependencies), names
        unique, checked by the full ONNX checker. Raises ModelError for a cycle, a missing tensor or an invalid graph.
        """
        self._flush()
        graph = self.model.graph
        available = {item.name for item in graph.input} | {tensor.name for tensor in graph.initializer}
        nodes = sort_nodes(live_nodes(list(graph.node), outputs=self.outputs), available=available)
        kept = [copied(node) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)
        self._drop_dead_values()
        check_model(self.model, full=True, where="edited model")
        self._inferred = None
        self._rebuild()
        return self.model

    # internals ----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Write the node list back in its current order; node objects handed out stay valid and keep their identity."""
        if self._edited:
            copies = [copied(node) for node in self._nodes.values()]
            del self.model.graph.node[:]
            self.model.graph.node.extend(copies)
            self._edited = False

    def _rebuild(self) -> None:
        graph = self.model.graph
        self._names: set[str] = set()
        self._nodes: dict[int, NodeProto] = {}
        self._producers: dict[str, int] = {}
        self._consumers: dict[str, dict[int, None]] = {}
        self._captures: dict[str, dict[int, None]] = {}
        self._initializers: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        name_nodes(self.model)
        for inner in each_graph(graph):
            self._names.update(
                item.name for item in (*inner.input, *inner.initializer, *inner.output, *inner.value_info)
            )
            for node in inner.node:
                self._names.add(node.name)
                self._names.update(node.output)
        for node in graph.node:
            self._index(node)
        self._edited = False

    def _add_tensor(self, tensor: TensorProto) -> None:
        entry = self.model.graph.initializer.add()
        entry.CopyFrom(tensor)
        self._initializers[tensor.name] = entry
        if self.model.ir_version < 4:  # before IR 4 every initializer had to be listed as an input
            self.model.ir_version = 4

    def _index(self, node: NodeProto) -> None:
        self._nodes[id(node)] = node
        for name in node.output:
            if name:
                if name in self._producers:
                    other = self._nodes[self._producers[name]].name
                    raise ModelError(f"tensor {name!r} is produced twice, by {other!r} and {node.name!r}")
                self._producers[name] = id(node)
        self._link(node)

    def _unindex(self, node: NodeProto) -> None:
        self._unlink(node)
        for name in node.output:
            if self._producers.get(name) == id(node):
                del self._producers[name]
        del self._nodes[id(node)]

    def _link(self, node: NodeProto) -> None:
        self._edited = True
        for name in node.input:
            if name:
                self._consumers.setdefault(name, {})[id(node)] = None
        for inner in subgraphs(node):
            for name in captured_names(inner):
                self._captures.setdefault(name, {})[id(node)] = None

    def _unlink(self, node: NodeProto) -> None:
        self._edited = True
        for name in node.input:
            self._consumers.get(name, {}).pop(id(node), None)
        for inner in subgraphs(node):
            for name in captured_names(inner):
                self._captures.get(name, {}).pop(id(node), None)

    def _drop_dead_values(self) -> None:
        graph = self.model.graph
        used = {item.name for item in graph.output}
        made: set[str] = set()
        for node in graph.node:
            made.update(node.output)
            used.update(node.input)
            for inner in subgraphs(node):
                used |= captured_names(inner)
        for index in reversed(range(len(graph.initializer))):
            if graph.initializer[index].name not in used:
                del graph.initializer[index]
        stored = {tensor.name for tensor in graph.initializer}
        hidden = {item.name for item in (*graph.input, *graph.output)}
        values = [item for item in graph.value_info if item.name in made | stored and item.name not in hidden]
        del graph.value_info[:]
        graph.value_info.extend(values)
        notes = [note for note in graph.quantization_annotation if note.tensor_name in made | stored]
        del graph.quantization_annotation[:]
        graph.quantization_annotation.extend(notes)
