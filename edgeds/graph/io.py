"""Load and save ONNX models: bad files named, side files kept safe, large weights written beside the model."""

from __future__ import annotations

import ast
import contextlib
import json
import tempfile
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto, ValueInfoProto

from edgeds.engines.plan_file import PLAN_MAGICS, split_engine
from edgeds.errors import ModelError
from edgeds.files import atomic_path, read_regular, refuse_special
from edgeds.graph.external import check_external, load_external, write_external
from edgeds.graph.proto import (
    INLINE_LIMIT_BYTES,
    dims_of,
    dtype_name,
    each_tensor,
    light_copy,
    one_line,
    restore_weights,
    tensor_nbytes,
    weight_bytes,
)
from edgeds.graph.session import open_session
from edgeds.graph.shapes import fill_output_shapes
from edgeds.graph.sniff import ENGINE_SUFFIXES, looks_like, read_head
from edgeds.graph.validate import check_inputs, check_model, check_sizes, check_text, refuse_sparse
from edgeds.graph.versions import check_versions
from edgeds.specs import TensorSpec

__all__ = [
    "input_specs",
    "is_engine_file",
    "load_model",
    "open_session",
    "output_specs",
    "parse_names",
    "read_metadata",
    "save_model",
    "split_engine",
    "verify_model_file",
]

MAX_PROTOBUF_BYTES = (1 << 31) - 1
MAX_NAMES_CHARS = 1 << 20


def load_model(path: str | Path, *, lower_ir: bool = False) -> ModelProto:
    """Read an ONNX model with all weights inline, whatever the working directory.

    Side files are resolved beside the file as named and refused outside it. Local functions are inlined; initializers
    that old exporters also list as graph inputs are taken off the inputs (raising the IR to 4, where that is legal).
    ``lower_ir`` lowers an IR version that is too new where no newer feature is used. Raises ModelError.
    """
    path = Path(path)
    model = _parse(path)
    check_versions(model, where=str(path), lower_ir=lower_ir)
    refuse_sparse(model, where=str(path))
    if model.functions:
        model = _inline_functions(model, where=str(path))
    load_external(model, path)
    _drop_initializer_inputs(model)
    check_inputs(model, where=str(path))
    check_sizes(model, where=str(path))
    check_model(model, full=False, where=str(path))
    fill_output_shapes(model)
    return model


def verify_model_file(path: str | Path) -> None:
    """Check that a file is an ONNX model of a supported version with safe side files, without reading those."""
    path = Path(path)
    model = _parse(path)
    check_versions(model, where=str(path), lower_ir=False)
    check_external(model, path)


def save_model(model: ModelProto, path: str | Path, *, inline_limit_bytes: int = INLINE_LIMIT_BYTES) -> Path:
    """Write a model atomically and return its path.

    Below ``inline_limit_bytes`` of weights: one file. Otherwise ``<name>.data`` beside it holds the weights, written
    one tensor at a time; model and side file appear together or not at all, and an older pair stays until then.
    IR and opset are written as they are in ``model``. Raises ModelError when the place cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise ModelError(f"{path}: is a directory; name a file, for example {path / 'model.onnx'}")
    refuse_special(path)
    try:
        if weight_bytes(model) < inline_limit_bytes:
            with atomic_path(path) as temporary:
                temporary.write_bytes(model.SerializeToString())
        else:
            _save_pair(model, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def read_metadata(path: str | Path) -> dict[str, str]:
    """Metadata of an ONNX file (metadata_props) or of a TensorRT engine (its JSON header; {} for a bare plan)."""
    path = Path(path)
    if is_engine_file(path):
        return split_engine(path)[0]
    return {entry.key: entry.value for entry in _parse(path).metadata_props}


def is_engine_file(path: str | Path) -> bool:
    """Whether a file is a TensorRT engine: by its first bytes, or by the suffix .engine, .plan or .trt."""
    path = Path(path)
    head = read_head(path, 4)
    return head in PLAN_MAGICS or path.suffix.lower() in ENGINE_SUFFIXES


def parse_names(text: str) -> dict[int, str]:
    """Class names from metadata: a Python dict or list literal (as Ultralytics writes it) or JSON.

    Raises ModelError for anything else; at most 1 MiB of text is looked at.
    """
    if len(text) > MAX_NAMES_CHARS:
        raise ModelError(f"class names in the metadata: {len(text)} characters are more than {MAX_NAMES_CHARS}")
    value: object
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
            raise ModelError(f"class names in the metadata are neither JSON nor a literal: {text[:60]!r}") from error
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        raise ModelError(f"class names in the metadata: expected a list or a mapping, got {text[:60]!r}")
    names: dict[int, str] = {}
    for key, name in value.items():
        if isinstance(key, bool) or not str(key).strip().isdecimal() or not isinstance(name, str | int | float):
            raise ModelError(f"class names in the metadata: {key!r}: {name!r} is not a class number and its name")
        names[int(str(key))] = str(name)
    return names


def input_specs(model: ModelProto) -> tuple[TensorSpec, ...]:
    """Graph inputs that a caller feeds (initializers listed as inputs are left out)."""
    stored = {tensor.name for tensor in model.graph.initializer}
    return tuple(_spec(item) for item in model.graph.input if item.name not in stored)


def output_specs(model: ModelProto) -> tuple[TensorSpec, ...]:
    """Graph outputs."""
    return tuple(_spec(item) for item in model.graph.output)


def _spec(item: ValueInfoProto) -> TensorSpec:
    kind = item.type.WhichOneof("value")
    if kind not in (None, "tensor_type"):
        raise ModelError(f"graph input or output {item.name!r} is a {kind.removesuffix('_type')}, not a tensor")
    return TensorSpec(name=item.name, dtype=dtype_name(item.type.tensor_type.elem_type), shape=dims_of(item.type) or ())


def _parse(path: Path) -> ModelProto:
    """Parse the protobuf alone and make sure that it is a model; side files are not touched."""
    head = read_head(path, 16)
    looks = looks_like(path, head)
    if looks:
        raise ModelError(f"{path}: not an ONNX model: {looks}")
    size = path.stat().st_size
    if size > MAX_PROTOBUF_BYTES:
        raise ModelError(f"{path}: {size >> 20} MiB in one protobuf; above 2 GiB weights must be in a side file")
    model = ModelProto()
    try:
        model.ParseFromString(read_regular(path))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DecodeError as error:
        raise ModelError(
            f"{path}: not an ONNX model, or cut short: its {size} bytes do not parse; export or copy it again"
        ) from error
    if not model.HasField("graph") or not (model.graph.node or model.graph.output) or not model.ir_version:
        raise ModelError(f"{path}: not an ONNX model: it holds no graph; export or copy it again")
    if not model.opset_import or not model.graph.output:
        what = "operator set versions" if model.graph.output else "graph outputs"
        raise ModelError(f"{path}: the model has no {what}; it was cut short or written wrongly, export it again")
    check_text(model, where=str(path))
    return model


def _inline_functions(model: ModelProto, *, where: str) -> ModelProto:
    from onnx import inliner

    try:
        inlined = inliner.inline_local_functions(light_copy(model))
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError(f"{where}: its local functions cannot be inlined: {one_line(error)}") from error
    return restore_weights(inlined, model)


def _drop_initializer_inputs(model: ModelProto) -> None:
    stored = {tensor.name for tensor in model.graph.initializer}
    kept = [item for item in model.graph.input if item.name not in stored]
    if len(kept) < len(model.graph.input):
        del model.graph.input[:]
        model.graph.input.extend(kept)
    if stored and model.ir_version < 4:
        model.ir_version = 4


def _save_pair(model: ModelProto, path: Path) -> None:
    """Write side file and model under temporary names, set an older pair aside, then put the new one in place."""
    data = path.with_name(path.name + ".data")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:
        new_data, new_model = Path(folder) / "new.data", Path(folder) / "new.onnx"
        skeleton = light_copy(model)
        heavy = {t.name for t in model.graph.initializer} - {t.name for t in skeleton.graph.initializer}
        listed = {item.name for item in model.graph.input}
        kept = [item for item in skeleton.graph.input if item.name not in heavy or item.name in listed]
        del skeleton.graph.input[:]
        skeleton.graph.input.extend(kept)
        write_external(model, skeleton, data_path=new_data, location=data.name)
        _refuse_oversize(skeleton, path)
        new_model.write_bytes(skeleton.SerializeToString())
        with contextlib.ExitStack() as undo:
            # The old model goes first: a process killed between the renames leaves no model rather than a mixed pair.
            for place, kept_name in ((path, "old.onnx"), (data, "old.data")):
                if place.exists() or place.is_symlink():
                    place.rename(Path(folder) / kept_name)
                    undo.callback((Path(folder) / kept_name).replace, place)
            new_data.rename(data)
            undo.callback(data.unlink, missing_ok=True)
            new_model.rename(path)
            undo.pop_all()


def _refuse_oversize(skeleton: ModelProto, path: Path) -> None:
    rest = sum(tensor_nbytes(t) for _, t in each_tensor(skeleton.graph) if t.data_location != TensorProto.EXTERNAL)
    if rest > INLINE_LIMIT_BYTES:
        raise ModelError(f"{path}: {rest >> 20} MiB of constants sit in nodes or subgraphs; run fold_constants first")
