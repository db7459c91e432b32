"""Order and liveness of nodes, with what subgraphs capture counted as inputs."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from onnx import NodeProto

from edgeds.errors import ModelError
from edgeds.graph.proto import node_inputs


def live_nodes(nodes: list[NodeProto], *, outputs: Iterable[str]) -> list[NodeProto]:
    """The nodes that the outputs depend on, in their given order."""
    producers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    alive: set[int] = set()
    pending = [producers[name] for name in outputs if name in producers]
    while pending:
        index = pending.pop()
        if index in alive:
            continue
        alive.add(index)
        pending.extend(producers[name] for name in node_inputs(nodes[index]) if name in producers)
    return [node for index, node in enumerate(nodes) if index in alive]


def sort_nodes(nodes: list[NodeProto], *, available: set[str]) -> list[NodeProto]:
    """Stable topological order (Kahn, lowest original index first).

    ``available`` holds graph inputs and initializers. Raises ModelError naming a node that reads a missing tensor or
    sits on a cycle.
    """
    producers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    waiting: list[int] = []
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        needs = set()
        for name in node_inputs(node):
            if name in producers:
                needs.add(producers[name])
            elif name not in available:
                raise ModelError(f"node {node.name!r} ({node.op_type}) reads tensor {name!r}, which nothing produces")
        waiting.append(len(needs))
        for need in needs:
            readers.setdefault(need, []).append(index)
    ready = [index for index, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[NodeProto] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(nodes[index])
        for reader in readers.get(index, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        stuck = next(node for node, count in zip(nodes, waiting, strict=True) if count > 0)
        raise ModelError(f"the graph has a cycle through node {stuck.name!r} ({stuck.op_type})")
    return order
