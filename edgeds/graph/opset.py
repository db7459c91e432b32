"""Raise a model's opset with its meaning kept: the ONNX version converter, then checks that it did its work."""

from __future__ import annotations

import onnx
from onnx import ModelProto, NodeProto, helper, version_converter

from edgeds.errors import ModelError
from edgeds.graph.feeds import is_close, random_feeds
from edgeds.graph.nodes import name_nodes
from edgeds.graph.proto import (
    INLINE_LIMIT_BYTES,
    clone_model,
    each_graph,
    is_standard,
    light_copy,
    main_opset,
    one_line,
    restore_weights,
    subgraphs,
    weight_bytes,
)
from edgeds.graph.session import open_session, runtime_errors
from edgeds.graph.shapes import assume_input_shapes
from edgeds.graph.validate import check_model
from edgeds.graph.versions import opset_limit


def import_domain(model: ModelProto, domain: str, version: int = 1) -> None:
    """Import an operator set in place, unless the model does already."""
    if not any(entry.domain == domain for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, version))


def require_opset(model: ModelProto, minimum: int) -> ModelProto:
    """Return a copy with the default opset at least ``minimum``; unchanged in meaning, IR kept unless types need more.

    A converted model is checked, loaded, and (below 1 GiB) compared with the original on random input. Raises
    ModelError naming the opset, and the node where known, when it cannot be converted faithfully.
    """
    found = main_opset(model)
    if found >= minimum:
        return clone_model(model)
    where = f"upgrade from opset {found} to {minimum}"
    if not found:
        raise ModelError(f"{where}: the model does not import the default operator set")
    if minimum > opset_limit():
        raise ModelError(f"{where}: the installed onnx knows opsets up to {opset_limit()}; upgrade onnx")
    named = light_copy(model)
    name_nodes(named)
    _refuse_unconverted_subgraphs(named, found=found, minimum=minimum)
    try:
        converted = version_converter.convert_version(named, minimum)
    except (RuntimeError, ValueError, version_converter.ConvertError) as error:
        raise ModelError(
            f"{where} failed: {one_line(error)}; export the model with opset {minimum} or newer"
        ) from error
    result = restore_weights(converted, model)
    _keep_names(result, named)
    if found < 11 <= minimum:
        _keep_resize_rule(result, {node.name for node in named.graph.node if node.op_type in ("Resize", "Upsample")})
    _restore_header(result, model, minimum=minimum)
    name_nodes(result)
    check_model(result, full=True, where=where)
    if weight_bytes(model) < INLINE_LIMIT_BYTES:
        _compare(model, result, where=where)
    return result


def _keep_names(result: ModelProto, named: ModelProto) -> None:
    """Where the converter swapped a node for another and lost its name, the node that makes its output gets it back."""
    present = {node.name for node in result.graph.node}
    lost = {n.output[0]: n.name for n in named.graph.node if n.output and n.name not in present}
    for node in result.graph.node:
        if not node.name and node.output and node.output[0] in lost:
            node.name = lost[node.output[0]]


def _keep_resize_rule(result: ModelProto, names: set[str]) -> None:
    """Before opset 11 resizing was 'asymmetric' with floor; the converter leaves the new default, half_pixel."""
    for node in result.graph.node:
        if node.op_type == "Resize" and node.name in names:
            set_by_name = {attribute.name for attribute in node.attribute}
            for key, text in (("coordinate_transformation_mode", "asymmetric"), ("nearest_mode", "floor")):
                if key not in set_by_name:
                    node.attribute.append(helper.make_attribute(key, text))


def _restore_header(result: ModelProto, model: ModelProto, *, minimum: int) -> None:
    """The converter drops what it does not know: put back metadata, other domains and the IR version."""
    result.ir_version = max(model.ir_version, 4)
    del result.metadata_props[:]
    result.metadata_props.extend(model.metadata_props)
    del result.opset_import[:]
    for entry in model.opset_import:
        kept = result.opset_import.add(domain=entry.domain, version=entry.version)
        if entry.domain in ("", "ai.onnx"):
            kept.version = minimum
    result.producer_name, result.producer_version = model.producer_name, model.producer_version
    result.doc_string = model.doc_string
    result.graph.doc_string = model.graph.doc_string


def _refuse_unconverted_subgraphs(model: ModelProto, *, found: int, minimum: int) -> None:
    """The converter leaves branches and loop bodies alone, which is right only for ops whose schema stays the same."""
    for node in model.graph.node:
        for graph in subgraphs(node):
            for body in each_graph(graph):
                for inner in body.node:
                    if is_standard(inner) and not _same_meaning(inner, found=found, minimum=minimum):
                        raise ModelError(
                            f"upgrade from opset {found} to {minimum}: node {inner.name!r} ({inner.op_type}) inside "
                            f"{node.name!r} ({node.op_type}) changed its form between these opsets and cannot be "
                            f"converted in a subgraph; export the model with opset {minimum} or newer"
                        )


def _same_meaning(node: NodeProto, *, found: int, minimum: int) -> bool:
    """Whether the op's schema is the same at both opsets, or differs only in the types it takes."""
    try:
        old = onnx.defs.get_schema(node.op_type, found, "")
        new = onnx.defs.get_schema(node.op_type, minimum, "")
    except onnx.defs.SchemaError:
        return False
    if old.since_version == new.since_version:
        return True
    if node.op_type in ("Softmax", "LogSoftmax", "Hardmax", "BatchNormalization", "Resize", "Upsample", "Reshape"):
        return False
    return (
        [item.name for item in old.inputs] == [item.name for item in new.inputs]
        and len(old.outputs) == len(new.outputs)
        and {name: str(item.default_value) for name, item in old.attributes.items()}
        == {name: str(item.default_value) for name, item in new.attributes.items()}
    )


def _compare(before: ModelProto, after: ModelProto, *, where: str) -> None:
    feeds = random_feeds(before, assume_input_shapes(before).shapes)
    errors: tuple[type[Exception], ...] = (ModelError, *runtime_errors())
    try:
        expected = open_session(before, threads=1).run(None, feeds)
    except errors:
        return  # the assumed shapes do not suit this model, so there is nothing to compare with
    try:
        got = open_session(after, threads=1).run(None, feeds)
    except runtime_errors() as error:
        raise ModelError(f"{where}: the converted model does not run: {one_line(error)}") from error
    for item, want, have in zip(before.graph.output, expected, got, strict=True):
        if not is_close(want, have):
            raise ModelError(
                f"{where}: output {item.name!r} changed, so the conversion is not faithful; "
                "export the model with the newer opset instead"
            )
