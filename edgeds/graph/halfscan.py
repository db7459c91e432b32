"""The float tensors of a graph, known once, and the walks that the rules of float16 conversion share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from onnx import NodeProto

from edgeds.graph.halfvalues import HEAVY_OPS
from edgeds.graph.view import GraphView

FLEXIBLE = (np.dtype(np.float32), np.dtype(np.float16))
"""Types that conversion may change; float64, bfloat16 and integers stay."""

_GUARD_PASSES = frozenset(
    {"Add", "Sum", "Max", "Clip", "Sqrt", "Sub", "Neg", "Expand", "Identity", "Unsqueeze", "Squeeze", "Reshape"}
    | {"Transpose", "Cast", "Reciprocal", "Pow"}
)


class FloatScan:
    """The view with the float tensors known once, and the walks that the rules share."""

    def __init__(self, view: GraphView, peaks: dict[str, float]) -> None:
        self.view, self.peaks = view, peaks
        names = {name for node in view.nodes for name in (*node.input, *node.output) if name}
        self.dtypes = {name: view.dtype(name) for name in names | set(view.inputs) | set(view.outputs)}
        self.flexible = frozenset(name for name, dtype in self.dtypes.items() if dtype in FLEXIBLE)

    def is_mixed(self) -> bool:
        """Whether layers with weights already compute in float16."""
        return any(
            node.op_type in HEAVY_OPS and self.dtypes.get(node.output[0]) == np.float16 for node in self.view.nodes
        )

    def is_float32(self, node: NodeProto) -> bool:
        """Whether the node computes in float32 as the model is; a Cast is judged by what it gives."""
        names = node.output if node.op_type == "Cast" else (*node.input, *node.output)
        return any(self.dtypes[name] == np.float32 for name in names if name in self.flexible)

    def readers(self, node: NodeProto) -> list[NodeProto]:
        return [reader for name in node.output if name for reader in self.view.consumers(name)]

    def makers(self, node: NodeProto) -> list[NodeProto]:
        found = (self.view.producer(name) for name in node.input if name)
        return [maker for maker in found if maker is not None]

    def upstream(self, starts: Iterable[NodeProto], through: Callable[[NodeProto], bool]) -> list[NodeProto]:
        """Nodes that feed ``starts`` along a chain of nodes that all satisfy ``through``."""
        return self._walk(starts, self.makers, through)

    def _walk(
        self,
        starts: Iterable[NodeProto],
        step: Callable[[NodeProto], list[NodeProto]],
        through: Callable[[NodeProto], bool],
    ) -> list[NodeProto]:
        found: dict[str, NodeProto] = {}
        pending = [item for start in starts for item in step(start)]
        while pending:
            node = pending.pop()
            if node.name not in found and through(node):
                found[node.name] = node
                pending += step(node)
        return list(found.values())

    def guarded(self, starts: Iterable[NodeProto]) -> list[NodeProto]:
        """What reads a small guarded value, up to and with the division (or product) that uses it up."""
        pending, found = list(starts), dict[str, NodeProto]()
        while pending:
            for reader in self.readers(pending.pop()):
                if reader.name not in found:
                    found[reader.name] = reader
                    if reader.op_type in _GUARD_PASSES:
                        pending.append(reader)
        return list(found.values())

    def may_overflow(self, node: NodeProto) -> bool:
        """Whether a Pow grows its input and nothing measured says that the result fits."""
        exponent = self.view.constant(node.input[1])
        if exponent is not None and exponent.size and float(np.abs(exponent).max()) <= 1.0:
            return False
        return node.output[0] not in self.peaks

    def constants(self, node: NodeProto) -> list[tuple[int, str]]:
        return [
            (index, name)
            for index, name in enumerate(node.input)
            if name in self.flexible and self.view.is_constant(name)
        ]
