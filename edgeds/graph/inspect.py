"""Everything ``edgeds inspect`` shows about one file, as a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.boards.cost_file import LayerCost
from edgeds.graph.cost import ModelCost, count_cost
from edgeds.graph.findings import Finding
from edgeds.graph.io import input_specs, is_engine_file, load_model, output_specs, split_engine
from edgeds.graph.lint import lint_model
from edgeds.graph.proto import main_opset, weight_bytes
from edgeds.graph.sparse24 import Sparse24, check_24
from edgeds.specs import TensorSpec, to_json


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """An inspected model. A TensorRT engine has only ``kind``, ``file_bytes``, ``plan_bytes`` and ``metadata``."""

    path: str
    kind: str
    file_bytes: int
    metadata: dict[str, str]
    plan_bytes: int = 0
    ir_version: int = 0
    opset: int = 0
    weight_bytes: int = 0
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    ops: dict[str, int] | None = None
    cost: ModelCost | None = None
    lint: tuple[Finding, ...] = ()
    sparse_2_4: tuple[Sparse24, ...] = ()

    @property
    def flops(self) -> int | None:
        """Floating-point operations at ``cost.inputs``; None for an engine file, as all figures of cost."""
        return self.cost.flops if self.cost is not None else None

    @property
    def params(self) -> int | None:
        """Stored weights, each tensor once."""
        return self.cost.params if self.cost is not None else None

    @property
    def bytes(self) -> int | None:
        """Bytes that all layers read and write at ``cost.inputs``."""
        return self.cost.bytes if self.cost is not None else None

    @property
    def int8_flops_share(self) -> float | None:
        """Share of the Conv and MatMul FLOPs that run in INT8 (without Q/DQ: that could)."""
        return self.cost.int8_flops_share if self.cost is not None else None

    def top_layers(self, count: int = 10) -> list[LayerCost]:
        """The layers with the most FLOPs."""
        layers = self.cost.layers if self.cost is not None else ()
        return sorted(layers, key=lambda layer: layer.flops, reverse=True)[:count]

    def to_json(self) -> dict[str, Any]:
        """The document of ``edgeds inspect --json``."""
        cost = self.cost
        return {
            "path": self.path,
            "kind": self.kind,
            "file_bytes": self.file_bytes,
            "plan_bytes": self.plan_bytes or None,
            "ir_version": self.ir_version or None,
            "opset": self.opset or None,
            "inputs": to_json(self.inputs),
            "outputs": to_json(self.outputs),
            "ops": self.ops or {},
            "params": self.params,
            "flops": self.flops,
            "bytes": self.bytes,
            "weight_bytes": self.weight_bytes,
            "int8_flops_share": self.int8_flops_share,
            "quantized": cost.is_quantized if cost is not None else None,
            "cost_inputs": to_json(cost.inputs) if cost is not None else {},
            "notes": list(cost.notes) if cost is not None else [],
            "top_layers": to_json(self.top_layers()),
            "metadata": self.metadata,
            "lint": to_json(self.lint),
            "sparse_2_4": [layer.node for layer in self.sparse_2_4 if layer.is_24],
        }


def inspect_model(path: str | Path, input_shapes: Mapping[str, Sequence[int]] | None = None) -> ModelInfo:
    """Read an ONNX model or a TensorRT engine file and say what is in it.

    ``input_shapes`` are the shapes that cost is counted at. Raises ModelError for a file that cannot be read,
    SpecError for shapes that do not fit.
    """
    path = Path(path)
    if is_engine_file(path):
        metadata, _, plan_bytes = split_engine(path)
        return ModelInfo(
            path=str(path),
            kind="tensorrt plan",
            file_bytes=path.stat().st_size,
            metadata=metadata,
            plan_bytes=plan_bytes,
        )
    model = load_model(path)
    return ModelInfo(
        path=str(path),
        kind="onnx",
        file_bytes=path.stat().st_size,
        metadata={entry.key: entry.value for entry in model.metadata_props},
        ir_version=int(model.ir_version),
        opset=main_opset(model),
        weight_bytes=weight_bytes(model),
        inputs=input_specs(model),
        outputs=output_specs(model),
        ops=dict(Counter(node.op_type for node in model.graph.node).most_common()),
        cost=count_cost(model, input_shapes),
        lint=tuple(lint_model(model)),
        sparse_2_4=check_24(model),
    )
