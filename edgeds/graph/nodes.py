"""Helpers on single nodes: Constant values, copies, unique names, captures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from edgeds.graph.proto import attributes, captured_names, each_graph, subgraphs


def constant_value(node: NodeProto) -> NDArray[Any] | None:
    """Value of a Constant node in any of its attribute forms; None for the sparse form."""
    attrs = attributes(node)
    if "value" in attrs:
        return numpy_helper.to_array(attrs["value"])
    for key, dtype in (("value_float", np.float32), ("value_floats", np.float32)):
        if key in attrs:
            return np.asarray(attrs[key], dtype)
    for key, kind in (("value_int", np.int64), ("value_ints", np.int64)):
        if key in attrs:
            return np.asarray(attrs[key], kind)
    for key in ("value_string", "value_strings"):
        if key in attrs:
            return np.asarray(attrs[key], object)
    return None


def copied(node: NodeProto) -> NodeProto:
    """A detached copy of a node."""
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy


def name_nodes(model: ModelProto) -> None:
    """Give unnamed nodes a name and repeated names a suffix, over all subgraphs; first come, first served."""
    nodes = [node for graph in each_graph(model.graph) for node in graph.node]
    taken = {node.name for node in nodes if node.name}
    seen: set[str] = set()
    for index, node in enumerate(nodes):
        if node.name and node.name not in seen:
            seen.add(node.name)
            continue
        base, suffix = (node.name, 1) if node.name else (f"{node.op_type}_{index}", 0)
        name = f"{base}_{suffix}" if suffix else base
        while name in taken or name in seen:
            suffix += 1
            name = f"{base}_{suffix}"
        node.name = name
        seen.add(name)


def rename_captures(node: NodeProto, *, old: str, new: str) -> None:
    """Rename what the subgraphs of a node take from outside."""
    for graph in subgraphs(node):
        if old not in captured_names(graph):
            continue
        for inner in graph.node:
            for index, name in enumerate(inner.input):
                if name == old:
                    inner.input[index] = new
            rename_captures(inner, old=old, new=new)
        for item in graph.output:
            if item.name == old:
                item.name = new
