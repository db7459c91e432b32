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
class LayerWork:
    """One node: floating-point operations (a multiply-add is two), stored weights, bytes moved in ``precision``."""

    node: str
    op: str
    flops: int
    params: int
    bytes_read: int
    bytes_written: int
    int8_eligible: bool
    precision: str


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """All nodes in order of execution, counted at the input shapes ``inputs``."""

    inputs: dict[str, tuple[int, ...]]
    layers: tuple[LayerWork, ...]
    notes: tuple[str, ...] = ()

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
    return work
