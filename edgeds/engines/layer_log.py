"""Per-layer precision and memory of a build, read from TensorRT's verbose log (no GPU needed, unlike its inspector).

With ``ProfilingVerbosity.DETAILED`` the builder writes one line per engine layer: its tensors with data types, and
the ONNX nodes it came from. The form was read off TensorRT-RTX 1.7; a version that writes another form gives no
layers, which the report shows as an empty list, never as a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), Inputs: \[(?P<inputs>.*?)\](?=, (?:Constants|Outputs): \[)"
    r"(?:, Constants: \[(?P<constants>.*?)\](?=, Outputs: \[))?, Outputs: \[(?P<outputs>.*?)\](?=, \w+:)"
)
_DATATYPE = re.compile(r"(?<!/)Datatype: (\w+)")
# TensorRT 10's own form as public logs show it ("Format/Datatype: Row major linear FP16"); not run here.
_FORMAT = re.compile(r"Format/Datatype: [^}]*?\b(FP32|FP16|BF16|FP8|Int8|Int4|Int32|Int64|Bool)\b", re.IGNORECASE)
_WORDS = {"fp32": "Float", "fp16": "Half", "bf16": "BFloat16"}
# Entries are told apart by the separators 0x1e and 0x1f, at which str.splitlines() would cut too.
_NODE = re.compile(r"\[ONNX Layer: ([^\x1e\x1f]*)\](?=[\x1e\x1f\[]|\s*$)")
# Layer types that are generated elementwise code or move data.
ELEMENTWISE = ("kgen", "Reformat", "NoOp", "PointWise", "PointWiseV2", "Shuffle", "Constant", "Scale", "Slice")
_MEMORY = {
    "activations": re.compile(r"Total Activation Memory: (\d+) bytes"),
    "weights": re.compile(r"Total Weights Memory: (\d+) bytes"),
    "scratch": re.compile(r"Max Scratch Memory: (\d+) bytes"),
}


@dataclass(frozen=True, kw_only=True)
class EngineLayer:
    """One layer of the built engine. Types are TensorRT's words: Float, Half, Int8, Int32, ..."""

    name: str
    kind: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def precision(self) -> str:
        """What it computes in: its weights' type when inputs and weights are both Int8, else its first input's."""
        if self.constants and self.constants[0] == "Int8" and "Int8" in self.inputs:
            return "Int8"
        found = self.inputs or self.constants or self.outputs
        return found[0] if found else "?"


def read_layers(lines: Iterable[tuple[str, str]]) -> tuple[EngineLayer, ...]:
    """Engine layers in the order of the log. ``lines`` are (severity, text) pairs, texts may hold several lines."""
    found = []
    for _, text in lines:
        if "LayerType: " not in text:
            continue
        for line in text.split("\n"):
            match = _LAYER.match(line.strip())
            if match is not None:
                found.append(_layer(match, line))
    return tuple(found)


def node_precisions(layers: Sequence[EngineLayer]) -> dict[str, str]:
    """ONNX node name to the precision it computes in.

    A node can be part of several layers: its product, and generated elementwise code around it. The product decides.
    Where products differ (one per profile), all are told, as in ``Half/Int8``.
    """
    found: dict[str, list[EngineLayer]] = {}
    for layer in layers:
        for node in layer.nodes:
            found.setdefault(node, []).append(layer)
    return {node: _joint(group) for node, group in found.items()}


def read_memory_mib(lines: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Peak ``activations``, ``weights`` and ``scratch`` memory of the engine in MiB, where the log states them."""
    found: dict[str, float] = {}
    for _, text in lines:
        for key, pattern in _MEMORY.items():
            match = pattern.search(text)
            if match:
                found[key] = max(found.get(key, 0.0), int(match.group(1)) / (1 << 20))
    return found


def _layer(match: re.Match[str], line: str) -> EngineLayer:
    return EngineLayer(
        name=match["name"],
        kind=match["kind"],
        nodes=tuple(dict.fromkeys(_NODE.findall(line))),
        inputs=_types(match["inputs"]),
        constants=_types(match["constants"] or ""),
        outputs=_types(match["outputs"]),
    )


def _types(text: str) -> tuple[str, ...]:
    found = _DATATYPE.findall(text)
    return tuple(found or (_WORDS.get(word.lower(), word.capitalize()) for word in _FORMAT.findall(text)))


def _joint(layers: Sequence[EngineLayer]) -> str:
    products = [layer for layer in layers if layer.kind not in ELEMENTWISE] or layers
    return "/".join(sorted({layer.precision for layer in products}))
