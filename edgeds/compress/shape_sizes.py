"""Sizes that exporters compute although they never change, and guards around them, made ready for ``shape_fold``.

Shape inference leaves the -1 of ``view(b, s, -1, 64)`` open while ``b`` and ``s`` are names; the other sizes cancel.
PyTorch's exporters also wrap the target of an Expand as ``Where(target == -1, 1, target)``, transpose keys through a
merged axis of batch and heads, and share one target between layers, which could then only be pruned alike.
"""

from __future__ import annotations

import math
from collections import Counter

from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from edgeds.graph.proto import attributes, dims_of, is_standard, set_dims
from edgeds.graph.shapes import infer_types
from edgeds.graph.view import GraphView
from edgeds.specs import Dim

_MADE_UP = "unk__"
"""What onnx's inference calls sizes that it has no name for; the names are counted anew each time."""
_PASSED = frozenset(("Unsqueeze", "Squeeze", "Identity", "Cast", "Gather", "Slice", "Reshape"))
_FROM_SIZES = frozenset(("Mul", "Add", "Max", "Min", "Concat"))


def complete_reshapes(model: ModelProto) -> None:
    """Write the one open size of each Reshape where all named sizes cancel into ``value_info``, in place.

    Sound because a Reshape keeps the number of elements.
    """
    types = infer_types(model)
    dims = {name: dims_of(kind) for name, kind in types.items()}
    found = []
    for node in model.graph.node:
        if node.op_type != "Reshape" or not is_standard(node):
            continue
        before, after = dims.get(node.input[0]), dims.get(node.output[0])
        whole = _completed(before, after) if before is not None and after is not None else None
        if whole is not None:
            item = ValueInfoProto(name=node.output[0], type=types[node.output[0]])
            set_dims(item, tuple(None if str(dim).startswith(_MADE_UP) else dim for dim in whole))
            found.append(item)
    fixed = {item.name for item in found}
    found += [item for item in model.graph.value_info if item.name not in fixed]
    del model.graph.value_info[:]
    model.graph.value_info.extend(found)


def _completed(before: tuple[Dim, ...], after: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """``after`` with its one dim that is neither a number nor in ``before``; None where there is nothing to add."""
    common = Counter(before) & Counter(after)
    rest = list((Counter(before) - common).elements())
    new = list((Counter(after) - common).elements())
    named = [dim for dim in new if not isinstance(dim, int)]
    if None in common or len(named) != 1 or named[0] is None or after.count(named[0]) != 1:
        return None
    if not all(isinstance(dim, int) for dim in rest):
        return None
    total = math.prod(int(dim or 0) for dim in rest)
    others = math.prod(dim for dim in new if isinstance(dim, int))
    if total < 1 or others < 1 or total % others:
        return None
    return tuple(total // others if dim == named[0] else dim for dim in after)


def drop_guards(view: GraphView) -> int:
    """Replace ``Where(target == -1, ones, target)`` by the target where no size in it can be -1; how many."""
    done = 0
    for node in view.nodes:
        if node.op_type != "Where" or node.domain or view.is_output(node.output[0]):
            continue
        test = view.producer(node.input[0])
        if test is None or test.op_type != "Equal" or node.input[2] not in test.input:
            continue
        other = test.input[0] if test.input[1] == node.input[2] else test.input[1]
        value = view.constant(other)
        if value is None or not (value == -1).all():
            continue
        source = node.input[2]
        maker = view.producer(source)
        if maker is not None and maker.op_type == "Reshape":  # a vector taken as a vector
            shape, rank = view.constant(maker.input[1]), view.shape(maker.input[0])
            if shape is not None and shape.tolist() == [-1] and rank is not None and len(rank) == 1:
                source = maker.input[0]
        if _never_negative(view, source):
            view.replace_uses(node.output[0], source)
            view.remove_node(node)
            done += 1
    return done


def _never_negative(view: GraphView, tensor: str, *, depth: int = 12) -> bool:
    """Whether an integer tensor is computed from shapes and numbers of at least 0 only."""
    value = view.constant(tensor)
    if value is not None:
        return bool(value.dtype.kind in "iu" and (value >= 0).all())
    node = view.producer(tensor)
    if node is None or node.domain or depth == 0:
        return False
    if node.op_type == "Shape":
        return True
    if node.op_type in _PASSED:
        return _never_negative(view, node.input[0], depth=depth - 1)
    return node.op_type in _FROM_SIZES and all(_never_negative(view, name, depth=depth - 1) for name in node.input)


def straighten_transposes(view: GraphView) -> int:
    """Turn Reshape to (-1, m, n), Transpose (0, 2, 1) and Reshape back into one Transpose of the last axes; how many.

    Where the sizes before and after are known to be the same, by number or by name.
    """
    done = 0
    for node in view.nodes:
        if node.op_type != "Transpose" or attributes(node).get("perm") != [0, 2, 1]:
            continue
        into, readers = view.producer(node.input[0]), view.consumers(node.output[0])
        if into is None or into.op_type != "Reshape" or len(readers) != 1 or readers[0].op_type != "Reshape":
            continue
        out, alone = readers[0], len(view.consumers(node.input[0])) == 1
        if not alone or any(
            view.is_output(name) or view.used_in_subgraph(name) for name in (into.output[0], node.output[0])
        ):
            continue
        before, merged, after = (view.shape(name) for name in (into.input[0], into.output[0], out.output[0]))
        if before is None or merged is None or after is None or len(before) < 3 or None in before:
            continue
        if merged[-2:] != before[-2:] or after != (*before[:-2], before[-1], before[-2]):
            continue
        rank, tensor = len(before), out.output[0]
        for old in (out, node, into):
            view.remove_node(old)
        perm = [*range(rank - 2), rank - 1, rank - 2]
        view.add_node(helper.make_node("Transpose", [into.input[0]], [tensor], name=node.name, perm=perm))
        done += 1
    return done


def unshare_targets(view: GraphView) -> int:
    """Give every Reshape and Expand a Concat of sizes of its own, where several read one with numbers in it."""
    done = 0
    for node in view.nodes:
        if node.op_type != "Concat" or node.domain or attributes(node).get("axis", 0) not in (0, -1):
            continue
        if not any(view.is_constant(name) for name in node.input) or view.is_output(node.output[0]):
            continue
        readers = [reader for reader in view.consumers(node.output[0]) if _reads_target(reader, node)]
        if len(readers) < 2:
            continue
        for index, reader in enumerate(readers[1:], start=1):
            name = view.fresh_name(f"{node.output[0]}_{index}")
            view.add_node(helper.make_node("Concat", list(node.input), [name], name=f"{node.name}_{index}", axis=0))
            view.set_input(reader, 1, name)
            done += 1
    return done


def _reads_target(reader: NodeProto, concat: NodeProto) -> bool:
    if reader.op_type not in ("Reshape", "Expand") or reader.domain:
        return False
    return reader.input[1] == concat.output[0] and reader.input[0] != concat.output[0]
