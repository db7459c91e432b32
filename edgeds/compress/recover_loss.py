"""What a student should match of its teacher: features, class scores, boxes, each in the loss that suits it.

Teacher and student are the same graph with other weights (and fewer channels), so tensors are matched by name. A
detector's last layers are told apart by their channels: scores, distributions over distances (Li et al. 2020,
arXiv:2006.04388), or anchors with box, objectness and scores side by side; where the teacher sees nothing, boxes do
not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto

from edgeds.compress.tail import WEIGHTED_OPS, find_detector_tail, is_weighted
from edgeds.compress.torch_lib import import_torch
from edgeds.errors import ModelError
from edgeds.graph.view import GraphView

Tensors = Mapping[str, Any]
FEATURE_WEIGHT = 1.0
OUTPUT_WEIGHT = 4.0
"""Outputs are few and what counts; features say to every layer what it should give, from the first step on."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One tensor to match. ``kind``: feature, values, probabilities, scores, bins or anchors."""

    tensor: str
    kind: str
    axis: int | None = None
    kept: tuple[int, ...] | None = None
    """Channels of the teacher along ``axis`` that the student still has, in its order."""


def plan_targets(
    student: ModelProto, teacher: ModelProto, *, classes: int | None, mapping: Mapping[str, Mapping[str, Any]]
) -> tuple[Target, ...]:
    """What can be compared. ``mapping`` is that of ``<pruned>.mapping.json``. Raises ModelError when nothing can."""
    ours, theirs = GraphView(student, copy=False), GraphView(teacher, copy=False)
    shared = {name for node in ours.nodes for name in node.output} & {n for node in theirs.nodes for n in node.output}
    tail = find_detector_tail(theirs)
    last = [node.output[0] for node in theirs.nodes if node.name in tail.last_layers and node.output[0] in shared]
    targets = [Target(tensor=name, kind=_head_kind(theirs, name, classes)) for name in last]
    if not targets:
        targets = [_output_target(theirs, name) for name in theirs.outputs if name in ours.outputs]
    chosen = {target.tensor for target in targets}
    for node in theirs.nodes:
        name = node.output[0] if node.output else ""
        if node.op_type not in WEIGHTED_OPS or name not in shared or name in chosen or node.name in tail.nodes:
            continue
        if is_weighted(theirs, node):
            cut = mapping.get(name)
            targets.append(
                Target(
                    tensor=name,
                    kind="feature",
                    axis=None if cut is None else int(cut["axis"]),
                    kept=None if cut is None else tuple(int(place) for place in cut["kept"]),
                )
            )
    if not targets:
        raise ModelError("the two models share no output and no layer by name, so there is nothing to learn from")
    return tuple(targets)


def _head_kind(view: GraphView, tensor: str, classes: int | None) -> str:
    shape = view.shape(tensor)
    channels = shape[1] if shape is not None and len(shape) == 4 else None
    if classes is None or not isinstance(channels, int):
        return "values"
    if channels == classes:
        return "scores"
    if channels % (5 + classes) == 0:
        return "anchors"
    return "bins" if channels % 4 == 0 and channels > 4 else "values"


def _output_target(view: GraphView, name: str) -> Target:
    maker = view.producer(name)
    return Target(tensor=name, kind="probabilities" if maker is not None and maker.op_type == "Softmax" else "values")


def total_loss(targets: tuple[Target, ...], student: Tensors, teacher: Tensors, *, classes: int | None) -> Any:
    """The weighted sum as a scalar: the mean over features and the mean over outputs."""
    torch = import_torch()
    certainty = _certainty(targets, teacher)
    sums: dict[bool, list[Any]] = {True: [], False: []}
    for target in targets:
        ours, theirs = student[target.tensor], _aligned(teacher[target.tensor], target)
        if ours.shape != theirs.shape:
            if target.kind == "feature":
                continue
            raise ModelError(
                f"tensor '{target.tensor}' is {tuple(ours.shape)} in the student and {tuple(theirs.shape)} in the "
                "teacher; the two are not one network before and after pruning"
            )
        loss = _LOSSES[target.kind](ours, theirs, certainty.get(tuple(theirs.shape[2:])), classes)
        sums[target.kind == "feature"].append(loss)
    features = torch.stack(sums[True]).mean() if sums[True] else 0.0
    outputs = torch.stack(sums[False]).mean() if sums[False] else 0.0
    return FEATURE_WEIGHT * features + OUTPUT_WEIGHT * outputs


def _aligned(tensor: Any, target: Target) -> Any:
    torch = import_torch()
    if target.kept is None or target.axis is None:
        return tensor
    places = torch.tensor(target.kept, dtype=torch.int64, device=tensor.device)
    return tensor.index_select(target.axis, places)


def _certainty(targets: tuple[Target, ...], teacher: Tensors) -> dict[tuple[int, ...], Any]:
    """Per map size, the teacher's highest class probability at every place, [N, 1, H, W]."""
    found = {}
    for target in targets:
        if target.kind == "scores":
            scores = teacher[target.tensor]
            found[tuple(scores.shape[2:])] = scores.sigmoid().amax(dim=1, keepdim=True)
    return found


def _relative(ours: Any, theirs: Any, _certainty: Any, _classes: int | None) -> Any:
    return (ours - theirs).square().mean() / theirs.var(unbiased=False).clamp(min=1e-8)


def _probabilities(ours: Any, theirs: Any, _certainty: Any, _classes: int | None) -> Any:
    """Kullback-Leibler divergence of probabilities along the last axis."""
    return (theirs * (theirs.clamp(min=1e-8).log() - ours.clamp(min=1e-8).log())).sum(dim=-1).mean()


def _scores(ours: Any, theirs: Any, _certainty: Any, _classes: int | None) -> Any:
    """Cross entropy above its minimum, weighted where the two differ (quality focal loss, arXiv:2006.04388)."""
    torch = import_torch()
    functional = torch.nn.functional
    wanted = theirs.sigmoid()
    entropy = functional.binary_cross_entropy_with_logits(theirs, wanted, reduction="none")
    loss = functional.binary_cross_entropy_with_logits(ours, wanted, reduction="none") - entropy
    weight = (ours.sigmoid() - wanted).abs().detach() + wanted
    return (loss * weight).sum() / wanted.amax(dim=1).sum().clamp(min=1.0) + 0.1 * _relative(ours, theirs, None, None)


def _bins(ours: Any, theirs: Any, certainty: Any, _classes: int | None) -> Any:
    """Divergence of the four distance distributions, where the teacher sees something."""
    torch = import_torch()
    n, channels, height, width = theirs.shape
    theirs, ours = (value.reshape(n, 4, channels // 4, height, width) for value in (theirs, ours))
    wanted = torch.log_softmax(theirs, dim=2)
    loss = (wanted.exp() * (wanted - torch.log_softmax(ours, dim=2))).sum(dim=2).mean(dim=1, keepdim=True)
    weight = certainty if certainty is not None else torch.ones_like(loss)
    return (loss * weight).sum() / weight.sum().clamp(min=1.0)


def _anchors(ours: Any, theirs: Any, _certainty: Any, classes: int | None) -> Any:
    """Heads of YOLOv5 and v7: [N, anchors * (4 box + 1 objectness + classes), H, W] before the sigmoid."""
    width = 5 + (classes or 0)
    shape = (theirs.shape[0], theirs.shape[1] // width, width, *theirs.shape[2:])
    ours, theirs = ours.reshape(shape), theirs.reshape(shape)
    seen = theirs[:, :, 4:5].sigmoid()
    boxes = ((ours[:, :, :4].sigmoid() - theirs[:, :, :4].sigmoid()).square() * seen).sum() / seen.sum().clamp(min=1.0)
    return boxes + _scores(ours[:, :, 4:].flatten(1, 2), theirs[:, :, 4:].flatten(1, 2), None, None)


_LOSSES = {
    "feature": _relative,
    "values": _relative,
    "probabilities": _probabilities,
    "scores": _scores,
    "bins": _bins,
    "anchors": _anchors,
}
