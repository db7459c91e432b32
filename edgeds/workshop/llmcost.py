"""Costs of one decode step of a paged decoder, as the predictor takes them: one pair of products per attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from onnx import ModelProto

from edgeds.boards.cost_file import LayerCost
from edgeds.errors import ModelError
from edgeds.graph.cost import count_cost
from edgeds.graph.io import input_specs
from edgeds.specs import to_json

COST_CONTEXT = 512
"""Tokens in the cache that costs are counted at; the predictor scales them to others."""
_PRODUCTS = 4


def count_decode_step(model: ModelProto) -> dict[str, Any]:
    """``cost.json`` of a decoder made by ``build_decoder``: one token, a full cache of about 512 tokens.

    The graph attends to pages and to the step's own tokens in products of their own; of one new token the latter are
    next to nothing, and the predictor knows attention as two products, so they are left out. Raises ModelError for
    other models.
    """
    metadata = {item.key: item.value for item in model.metadata_props}
    try:
        sizes = {key: int(metadata[f"edgeds.{key}"]) for key in ("layers", "num_heads", "kv_heads", "head_dim", "page")}
    except (KeyError, ValueError) as error:
        raise ModelError(f"the model's metadata has no number under {error}: not a decoder that edgeds built") from None
    blocks = max(1, COST_CONTEXT // sizes["page"])
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in input_specs(model):
        known = {"batch": 1, "step": 1, "picks": 1, "blocks": blocks, "pages": blocks}
        shapes[spec.name] = tuple(dim if isinstance(dim, int) else known.get(str(dim), blocks) for dim in spec.shape)
    cost = count_cost(model, shapes)
    own = _own_products(cost.layers, count=sizes["layers"])
    layers = [dataclasses.replace(layer, reads=None) for at, layer in enumerate(cost.layers) if at not in own]
    facts = {
        "layers": sizes["layers"],
        "heads": sizes["num_heads"],
        "kv_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "context": blocks * sizes["page"],
    }
    document: dict[str, Any] = to_json(dataclasses.replace(cost, layers=tuple(layers)))
    return {**document, "decoder": facts}


def _own_products(layers: tuple[LayerCost, ...], *, count: int) -> set[int]:
    """Of the four products of each attention, in order: pages of keys, new keys, pages of values, new values."""
    products = [at for at, layer in enumerate(layers) if layer.op == "MatMul" and not layer.params and layer.flops]
    if len(products) != count * _PRODUCTS:
        raise ModelError(f"expected {count * _PRODUCTS} attention products in {count} layers, found {len(products)}")
    return {at for index, at in enumerate(products) if index % 2}
