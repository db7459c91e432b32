"""Per-layer costs of a model as the device half reads them: ``cost.json`` of a bundle, or a file of the same form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.errors import SpecError
from edgeds.files import read_json
from edgeds.specs import from_json

_LIMIT = 1 << 60


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One node: floating-point operations (a multiply-add is two), stored weights, bytes moved in ``precision``.

    Bytes are what a compiled engine moves: int8 where the tensor comes from or goes to Q/DQ, and no data movement for
    reshapes. ``int8_eligible``: a Conv, ConvTranspose, Gemm or MatMul on floats. ``reads``: indices of the earlier
    layers whose outputs it takes; None where nobody noted the edges. ``sparse_24``: 2 of 4 weights are zero.
    ``elements``: of activations read and written; None leaves them to the bytes, which is wrong by the width of a type
    where a layer reads INT8 and writes floats.
    """

    node: str
    op: str
    flops: int
    params: int
    bytes_read: int
    bytes_written: int
    int8_eligible: bool
    precision: str
    reads: tuple[int, ...] | None = None
    sparse_24: bool = False
    elements: tuple[int, int] | None = None


LayerWork = LayerCost
"""The same under the name that the device half uses."""


@dataclass(frozen=True, kw_only=True)
class DecoderFacts:
    """What a language model's configuration says about attention, and the ``context`` (tokens in the cache, the new
    one among them) that its one decode step was counted at."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """All nodes in order of execution, counted at the input shapes ``inputs``. ``decoder`` for language models."""

    inputs: dict[str, tuple[int, ...]]
    layers: tuple[LayerCost, ...]
    notes: tuple[str, ...] = ()
    decoder: DecoderFacts | None = None

    @property
    def batch(self) -> int:
        """The batch that the layers were counted at: the first dimension of the first input, 1 without one."""
        first = next(iter(self.inputs.values()), ())
        return first[0] if first else 1

    @property
    def is_quantized(self) -> bool:
        return any(layer.op in ("QuantizeLinear", "DequantizeLinear") for layer in self.layers)


def read_cost(path: Path) -> ModelWork:
    """Read a cost file. Raises SpecError that names file and key for anything else than costs."""
    return parse_cost(read_json(path), where=str(path))


def parse_cost(data: Any, *, where: str) -> ModelWork:
    """Check a document of costs: known keys, whole figures that are not negative, at least one layer.

    Takes the document that ``cost.json`` holds, also as ``specs.to_json`` makes it. Raises SpecError.
    """
    if not isinstance(data, Mapping) or "layers" not in data:
        raise SpecError(f"{where}: holds no per-layer costs (no key 'layers'); use a model, a bundle or its cost.json")
    work = from_json(ModelWork, data, where=where)
    if not work.layers:
        raise SpecError(f"{where}: layers: no layer at all; count the costs again with edgeds bundle create")
    for name, shape in work.inputs.items():
        if any(dim < 1 for dim in shape) or math.prod(shape) > _LIMIT:
            raise SpecError(f"{where}: inputs: {name!r} has the impossible shape {list(shape)}")
    for index, layer in enumerate(work.layers):
        for key in ("flops", "params", "bytes_read", "bytes_written"):
            if not 0 <= getattr(layer, key) <= _LIMIT:
                raise SpecError(f"{where}: layers[{index}] ({layer.node!r}): {key} is {getattr(layer, key)}")
        if layer.elements is not None and any(not 0 <= count <= _LIMIT for count in layer.elements):
            raise SpecError(f"{where}: layers[{index}] ({layer.node!r}): elements is {list(layer.elements)}")
        if layer.reads is not None and any(not 0 <= source < index for source in layer.reads):
            wrong = next(source for source in layer.reads if not 0 <= source < index)
            raise SpecError(f"{where}: layers[{index}] ({layer.node!r}): reads layer {wrong}, which is not before it")
    _check_decoder(work.decoder, where=where)
    return work


def _check_decoder(facts: DecoderFacts | None, *, where: str) -> None:
    if facts is None:
        return
    for key in ("layers", "heads", "kv_heads", "head_dim", "context"):
        if not 1 <= getattr(facts, key) <= 1 << 24:
            raise SpecError(f"{where}: decoder: {key} is {getattr(facts, key)}, expected 1 or more")
    if facts.heads % facts.kv_heads:
        raise SpecError(f"{where}: decoder: {facts.heads} heads do not share {facts.kv_heads} KV heads evenly")
