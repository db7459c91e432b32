"""Which element types an operator's inputs and outputs may have, and which of them must be equal, from ONNX schemas."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import NodeProto

from edgeds.graph.proto import is_standard

FLOAT, HALF = "tensor(float)", "tensor(float16)"


@dataclass(frozen=True, kw_only=True)
class OpTypes:
    """Type variables of one operator, by input and output position; the last one repeats for variadic operators.

    A variable is a name ("T") whose tensors all have one type, or a fixed type ("tensor(float)") as written.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mixed: frozenset[str]
    """Variables whose variadic members may differ from each other (Loop, If, Sequence operators)."""
    allowed: dict[str, frozenset[str]]

    def input(self, index: int) -> str:
        return _at(self.inputs, index)

    def output(self, index: int) -> str:
        return _at(self.outputs, index)

    def takes(self, variable: str, kind: str) -> bool:
        """Whether the variable may be the type ``kind``, written as in schemas: ``tensor(float16)``."""
        return kind in self.allowed.get(variable, frozenset((variable,)))


def op_types(node: NodeProto, *, opset: int) -> OpTypes | None:
    """The type rules of a node; None for other domains and for operators the installed onnx does not know."""
    return _lookup(node.op_type, opset) if is_standard(node) else None


@functools.lru_cache(maxsize=4096)
def _lookup(op: str, opset: int) -> OpTypes | None:
    try:
        schema = onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return None
    formal = (*schema.inputs, *schema.outputs)
    return OpTypes(
        inputs=tuple(_variable(item) for item in schema.inputs),
        outputs=tuple(_variable(item) for item in schema.outputs),
        mixed=frozenset(_variable(item) for item in formal if not item.is_homogeneous),
        allowed={item.type_param_str: frozenset(item.allowed_type_strs) for item in schema.type_constraints},
    )


def _variable(formal: onnx.defs.OpSchema.FormalParameter) -> str:
    # The attribute was renamed between onnx releases.
    return str(formal.type_str if hasattr(formal, "type_str") else formal.typeStr)


def _at(names: Sequence[str], index: int) -> str:
    return names[min(index, len(names) - 1)] if names else ""
