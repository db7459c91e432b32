"""``edgeds inspect``: inputs, operators, cost, what can be INT8, and what TensorRT will not like."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.cli.output import emit_json, emit_text
from edgeds.errors import SpecError

if TYPE_CHECKING:
    from edgeds.graph.cost import ModelCost
    from edgeds.graph.inspect import ModelInfo

SUMMARY = "Show what a model is: inputs, operators, FLOPs and bytes, what share can be INT8, problems for TensorRT."

EXAMPLES = """\
examples:
  edgeds inspect yolo11n.onnx
  edgeds inspect yolo11n.onnx --input images:8x3x320x320      cost at this shape
  edgeds inspect bert.onnx --input ids:1x128 --input mask:1x128 --json
  edgeds inspect yolo11n.engine                               metadata of an engine file
"""

_SHOWN_FINDINGS = 20
_SHOWN_LAYERS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="ONNX file, or a TensorRT engine file")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME:1x3x640x640",
        help="shape to count the cost at, repeatable; other inputs: batch 1, the model's image size or 640, length 128",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    shapes = parse_shapes(args.input)
    from edgeds.graph.inspect import inspect_model

    info = inspect_model(args.model, shapes)
    if args.json:
        emit_json(info.to_json())
    else:
        emit_text("\n".join(describe(info)))
    return 0


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Read ``NAME:1x3x640x640``; names may hold colons (the last one counts). Raises SpecError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, separator, dims = text.rpartition(":")
        if not separator or not name or not re.fullmatch(r"\d{1,10}(?:[xX]\d{1,10})*", dims):
            raise SpecError(f"--input {text!r}: expected NAME:SHAPE with dims joined by x, as in images:1x3x640x640")
        if name in shapes:
            raise SpecError(f"--input {name!r} is given twice; give each input one shape")
        shapes[name] = tuple(int(dim) for dim in re.split("[xX]", dims))
    return shapes


def describe(info: ModelInfo) -> list[str]:
    """The table for people, line by line."""
    lines = [f"{info.path}: {info.kind}, {info.file_bytes / 1e6:.1f} MB"]
    if info.plan_bytes:
        lines.append(
            f"  TensorRT plan of {info.plan_bytes / 1e6:.1f} MB: runs only on the GPU and version it was built for"
        )
    if info.cost is not None:
        lines += _describe_graph(info, info.cost)
    if info.metadata:
        lines.append("metadata")
        lines += [f"  {key:<14} {_short(value)}" for key, value in info.metadata.items()]
    if info.cost is not None:
        lines += _describe_lint(info)
    return lines


def _describe_graph(info: ModelInfo, cost: ModelCost) -> list[str]:
    sizes = ", ".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in cost.inputs.items())
    share = "of the Conv and MatMul FLOPs " + ("run" if cost.is_quantized else "can run") + " in INT8"
    lines = [f"  opset {info.opset}, IR {info.ir_version}, {sum((info.ops or {}).values())} nodes"]
    lines += [f"  input  {spec}" for spec in info.inputs] + [f"  output {spec}" for spec in info.outputs]
    lines += [
        f"cost at {sizes}",
        f"  {cost.flops / 1e9:.3f} GFLOPs (2 per multiply-add), {cost.params / 1e6:.3f} M parameters, "
        f"{cost.bytes / 1e6:.1f} MB moved",
        f"  {cost.int8_flops_share:.1%} {share}",
    ]
    lines += [f"  assumed: {note}" for note in cost.notes]
    sparse = sum(layer.is_24 for layer in info.sparse_2_4)
    if sparse:
        lines.append(f"  {sparse} of {len(info.sparse_2_4)} layers are 2:4 sparse")
    lines.append("operators")
    lines.append("  " + ", ".join(f"{op} {count}" for op, count in (info.ops or {}).items()))
    lines.append("largest layers")
    total = max(cost.flops, 1)
    for layer in info.top_layers(_SHOWN_LAYERS):
        flops = f"{layer.flops / 1e6:9.1f} MFLOPs {layer.flops / total:6.1%}"
        lines.append(f"  {flops}  {layer.op:<14} {layer.precision:<8} {layer.node}")
    return lines


def _describe_lint(info: ModelInfo) -> list[str]:
    if not info.lint:
        return ["lint: nothing to report"]
    counts = {level: sum(f.level == level for f in info.lint) for level in ("error", "warning", "info")}
    lines = ["lint: " + ", ".join(f"{count} {level}" for level, count in counts.items() if count)]
    lines += [f"  {f.level:<8} {f.node}: {f.message}" for f in info.lint[:_SHOWN_FINDINGS]]
    if len(info.lint) > _SHOWN_FINDINGS:
        lines.append(f"  ... and {len(info.lint) - _SHOWN_FINDINGS} more; --json lists all")
    return lines


def _short(text: str, *, limit: int = 100) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."
