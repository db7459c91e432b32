"""First-order importance: how far the outputs move when a unit's weights go to zero, by their gradient.

Molchanov et al. 2019 ("Importance Estimation for Neural Network Pruning", equation 8) square the sum of gradient times
weight of a unit. Their gradient is that of a loss against labels. Against the model's own outputs it would be zero, so
here it is that of random projections of the outputs, each output counted relative to its size: the mean of the square
over projections is the squared change of the outputs themselves, to first order. Needs torch (extra ``train``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from edgeds.compress.groups import ChannelGroup, Groups
from edgeds.compress.torch_graph import TorchGraph
from edgeds.compress.torch_lib import import_torch
from edgeds.errors import ModelError, SpecError
from edgeds.graph.fold import fold_batchnorm
from edgeds.progress import track

Array = NDArray[np.float64]
PROJECTIONS = 4
"""Per sample; gradients of different samples average as well."""

Products = Mapping[str, Array]
"""Gradient times weight, by initializer."""


def taylor_scores(
    model: ModelProto,
    groups: Groups,
    feeds: Iterable[Mapping[str, NDArray[np.generic]]],
    *,
    projections: int = PROJECTIONS,
    seed: int = 0,
    quiet: bool = False,
) -> dict[int, Array]:
    """Group index -> root mean square of each unit's first-order effect on the outputs, relative to their size.

    Raises SpecError without samples, MissingDependency without torch, ModelError for operators it cannot run.
    """
    folded = fold_batchnorm(model)
    graph, nodes = TorchGraph(folded), {node.name: node for node in folded.graph.node}
    totals = {group.index: np.zeros(group.size) for group in groups.groups}
    torch = import_torch()
    generator = torch.Generator().manual_seed(seed)
    outputs = [value.name for value in folded.graph.output]
    count = 0
    for sample in track(feeds, what="measuring gradients", unit="sample", quiet=quiet):
        values = graph.run({name: torch.from_numpy(np.array(array)) for name, array in sample.items()}, want=outputs)
        for _ in range(projections):
            count += 1
            products = _products(graph, _projected(torch, values, generator), torch)
            for group in groups.groups:
                totals[group.index] += np.square(_effects(nodes, group, products))
    if not count:
        raise SpecError("method taylor weighs what samples show: give --calib (calibration samples)")
    return {index: np.sqrt(total / count) for index, total in totals.items()}


def _projected(torch: Any, values: Mapping[str, Any], generator: Any) -> Any:
    """One number: the outputs against random signs, each output divided by its norm."""
    total = None
    for value in values.values():
        if not value.is_floating_point() or not value.requires_grad:
            continue
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value.dtype) * 2 - 1
        norm = float(value.detach().norm())
        part = (value * signs).sum() / (norm or 1.0)
        total = part if total is None else total + part
    if total is None:
        raise ModelError("method taylor: no output depends on the weights")
    return total


def _products(graph: TorchGraph, number: Any, torch: Any) -> Products:
    names = list(graph.parameters)
    parameters = [graph.parameters[name] for name in names]
    gradients = torch.autograd.grad(number, parameters, retain_graph=True, allow_unused=True)
    return {
        name: (gradient * graph.parameters[name]).detach().numpy().astype(np.float64)
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is not None
    }


def _effects(nodes: Mapping[str, NodeProto], group: ChannelGroup, products: Products) -> Array:
    """Sum of the products of all that makes a unit: rows of its producers, and their biases. No weight counts twice."""
    total = np.zeros(group.size)
    seen: set[str] = set()
    for member in group.members:
        node = nodes.get(member.node)
        if node is None or member.role not in ("producer", "bias"):
            continue
        places = {member.index: member.axis}
        if member.role == "producer" and node.op_type != "MatMul":
            places.setdefault(2, 0)  # folding may have made a bias that the group does not know
        for place, axis in places.items():
            name = node.input[place] if place < len(node.input) else ""
            product = products.get(name)
            if product is None or name in seen or axis >= product.ndim or product.shape[axis] != member.units.size:
                continue
            seen.add(name)
            total += _per_unit(product, axis, member.units, group.size)
    return total


def _per_unit(product: Array, axis: int, units: NDArray[np.int64], size: int) -> Array:
    sums = np.moveaxis(product, axis, 0).reshape(product.shape[axis], -1).sum(axis=1)
    inside = units >= 0
    found: Array = np.bincount(units[inside], weights=sums[inside], minlength=size)[:size].astype(np.float64)
    return found
