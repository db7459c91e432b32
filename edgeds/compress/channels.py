"""Remove channels from a model: weights, biases, normalisation, group counts, Split sizes and other numbers at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from edgeds.compress.group_axes import Ids, Rewrite
from edgeds.compress.groups import ChannelGroup, Groups
from edgeds.errors import ModelError, SpecError
from edgeds.graph.proto import attributes, main_opset, set_dims
from edgeds.graph.view import GraphView

Keep = Mapping[int, NDArray[np.int64]]
"""Group index -> the units that stay; groups left out stay whole."""


@dataclass(frozen=True, kw_only=True)
class PruneResult:
    """``mapping``: tensor -> positions kept along its channel axis ``axes[tensor]``, where some are gone."""

    model: ModelProto
    mapping: dict[str, NDArray[np.int64]]
    axes: dict[str, int]


def prune_channels(model: ModelProto, keep: Keep, *, groups: Groups) -> PruneResult:
    """A smaller copy of ``model``, the one that ``groups`` was found in (``GraphView.model``, names given).

    Weights shared by layers that keep the same channels stay shared. Raises SpecError for groups or units that do not
    exist and for a group that would lose every unit, ModelError when the result is not a valid graph.
    """
    stays = _stays(keep, groups)
    view = GraphView(model)
    nodes = {node.name: node for node in view.nodes}
    _cut_constants(view, nodes, groups, stays)
    for rewrite in groups.rewrites:
        if rewrite.node not in nodes:
            raise ModelError(f"node {rewrite.node!r} is missing: the groups belong to another model")
        _REWRITES[rewrite.kind](view, nodes[rewrite.node], rewrite, stays)
    del view.model.graph.value_info[:]  # sizes of before
    mapping, axes = {}, {}
    for name, track in groups.tracks.items():
        mask = _mask(stays, track.ids)
        if not mask.all():
            mapping[name], axes[name] = np.flatnonzero(mask), track.axis
    return PruneResult(model=view.finish(), mapping=mapping, axes=axes)


def _stays(keep: Keep, groups: Groups) -> NDArray[np.bool_]:
    """For every atom whether it stays."""
    by_index: dict[int, ChannelGroup] = {group.index: group for group in groups.groups}
    stays = np.ones(len(groups.place), np.bool_)
    for index, units in keep.items():
        if index not in by_index:
            raise SpecError(f"keep: there is no group {index}; there are {len(by_index)}")
        wanted = np.asarray(units, np.int64)
        if not wanted.size or wanted.min() < 0 or wanted.max() >= by_index[index].size:
            size = by_index[index].size
            raise SpecError(f"keep: group {index} has units 0 to {size - 1} and keeps at least one; got {wanted}")
        inside = groups.place[:, 0] == index
        stays[inside] = np.isin(groups.place[inside, 1], wanted)
    return stays


def _mask(stays: NDArray[np.bool_], ids: Ids) -> NDArray[np.bool_]:
    if not stays.size:
        return np.ones(ids.size, np.bool_)
    mask: NDArray[np.bool_] = (ids < 0) | stays[np.maximum(ids, 0)]
    return mask


def _cut_constants(view: GraphView, nodes: Mapping[str, NodeProto], groups: Groups, stays: NDArray[np.bool_]) -> None:
    sites: dict[tuple[str, int], list[tuple[int, NDArray[np.bool_]]]] = defaultdict(list)
    for cut in groups.cuts:
        mask = _mask(stays, cut.ids)
        if not mask.all():
            sites[cut.node, cut.index].append((cut.axis, mask))
    by_tensor: dict[str, dict[bytes, list[tuple[NodeProto, int]]]] = defaultdict(lambda: defaultdict(list))
    masks: dict[bytes, list[tuple[int, NDArray[np.bool_]]]] = {}
    for (name, index), cuts in sites.items():
        if name not in nodes:
            raise ModelError(f"node {name!r} is missing: the groups belong to another model")
        key = b"|".join(bytes([axis]) + mask.tobytes() for axis, mask in sorted(cuts, key=lambda item: item[0]))
        masks[key] = cuts
        by_tensor[nodes[name].input[index]][key].append((nodes[name], index))
    for tensor, variants in by_tensor.items():
        value = view.constant(tensor)
        if value is None:
            raise ModelError(f"tensor {tensor!r} is not a constant: the groups belong to another model")
        uses = sum(list(node.input).count(tensor) for node in view.consumers(tensor))
        for key, places in variants.items():
            smaller = value
            for axis, mask in masks[key]:
                smaller = np.compress(mask, smaller, axis=axis)
            sole = len(places) == uses and not view.used_in_subgraph(tensor) and not view.is_output(tensor)
            _put(view, tensor, smaller, places=places, sole=sole)


def _put(
    view: GraphView, tensor: str, value: NDArray[np.generic], *, places: list[tuple[NodeProto, int]], sole: bool
) -> None:
    """Let these inputs read ``value``: under the old name when nothing else reads the tensor."""
    if sole and view.producer(tensor) is None:
        view.set_constant(tensor, value)
        for item in view.model.graph.input:  # where weights are listed as inputs too, as before IR 4
            if item.name == tensor:
                set_dims(item, value.shape)
        return
    name = view.add_constant(f"{tensor}_pruned", value)
    for node, index in places:
        view.set_input(node, index, name)


def _set_attribute(node: NodeProto, name: str, value: int | list[int]) -> None:
    kept = [item for item in node.attribute if item.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _set_group(view: GraphView, node: NodeProto, rewrite: Rewrite, stays: NDArray[np.bool_]) -> None:
    _set_attribute(node, rewrite.attribute, int(_mask(stays, rewrite.parts[0]).sum()))


def _set_split(view: GraphView, node: NodeProto, rewrite: Rewrite, stays: NDArray[np.bool_]) -> None:
    before = [part.size for part in rewrite.parts]
    sizes = [int(_mask(stays, part).sum()) for part in rewrite.parts]
    if sizes == before:
        return
    if "split" in attributes(node) or _is_old_split(view):
        _set_attribute(node, "split", sizes)
        return
    kept = [item for item in node.attribute if item.name != "num_outputs"]
    del node.attribute[:]
    node.attribute.extend(kept)
    view.set_input(node, 1, view.add_constant(f"{node.name}_sizes", np.asarray(sizes, np.int64)))


def _is_old_split(view: GraphView) -> bool:
    return main_opset(view.model) < 13


def _set_entry(view: GraphView, node: NodeProto, rewrite: Rewrite, stays: NDArray[np.bool_]) -> None:
    mask = _mask(stays, rewrite.parts[0])
    if mask.all():
        return
    if rewrite.input >= len(node.input):
        shape = list(attributes(node)["shape"])  # Reshape before opset 5
        shape[rewrite.index] = int(mask.sum())
        _set_attribute(node, "shape", shape)
        return
    _set_element(view, node, rewrite.input, index=rewrite.index, value=int(mask.sum()))


def _set_element(view: GraphView, node: NodeProto, place: int, *, index: int, value: int) -> None:
    array = view.constant(node.input[place])
    if array is None:
        raise ModelError(f"node {node.name!r}: input {node.input[place]!r} is not a constant")
    array = array.copy()
    array.reshape(-1)[index] = value
    view.set_input(node, place, view.add_constant(f"{node.input[place]}_pruned", array))


def _set_slice(view: GraphView, node: NodeProto, rewrite: Rewrite, stays: NDArray[np.bool_]) -> None:
    whole, before, inside = (int(_mask(stays, part).sum()) for part in rewrite.parts)
    if whole == rewrite.parts[0].size:
        return
    _set_element(view, node, 1, index=rewrite.index, value=before)
    _set_element(view, node, 2, index=rewrite.index, value=before + inside)


def _set_gather(view: GraphView, node: NodeProto, rewrite: Rewrite, stays: NDArray[np.bool_]) -> None:
    mask = _mask(stays, rewrite.parts[0])
    indices = view.constant(node.input[1])
    if mask.all() or indices is None:
        return
    places = np.cumsum(mask) - 1
    wanted = np.where(indices < 0, indices + mask.size, indices)
    moved = places[wanted[mask[wanted]]].astype(indices.dtype)
    view.set_input(node, 1, view.add_constant(f"{node.input[1]}_pruned", moved))


_REWRITES = {
    "group": _set_group,
    "attribute": _set_group,
    "split": _set_split,
    "entry": _set_entry,
    "slice": _set_slice,
    "gather": _set_gather,
}
