"""Weights in side files: resolve them safely beside the model, read them bounded, write them tensor by tensor."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

import onnx
from onnx import ModelProto, TensorProto, numpy_helper

from edgeds.errors import ModelError
from edgeds.files import real_path
from edgeds.graph.proto import each_tensor, element_bits, tensor_nbytes
from edgeds.progress import track

ALIGN_BYTES = 4096
"""Large tensors start on a page, so that a runtime can map them."""


@dataclass(frozen=True, kw_only=True)
class ExternalSlice:
    """Where one tensor's bytes lie: a real file inside the allowed folder, offset and length within its size."""

    path: Path
    offset_bytes: int
    length_bytes: int


def has_external_data(model: ModelProto) -> bool:
    """Whether any tensor, subgraphs included, keeps its values in a side file."""
    return any(tensor.data_location == TensorProto.EXTERNAL for _, tensor in each_tensor(model.graph))


def check_external(model: ModelProto, model_path: Path) -> None:
    """Verify every side-file reference without reading the data. Raises ModelError naming tensor and path."""
    for name, tensor in each_tensor(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            locate(tensor, name=name, model_path=model_path)


def load_external(model: ModelProto, model_path: Path) -> None:
    """Bring all side-file tensors inline, in place. Every reference is verified before the first byte is read."""
    pending = [
        (tensor, locate(tensor, name=name, model_path=model_path))
        for name, tensor in each_tensor(model.graph)
        if tensor.data_location == TensorProto.EXTERNAL
    ]
    for tensor, piece in track(pending, what="reading weights", unit="tensor"):
        tensor.raw_data = _read(piece, name=tensor.name, model_path=model_path)
        del tensor.external_data[:]
        tensor.data_location = TensorProto.DEFAULT


def locate(tensor: TensorProto, *, name: str, model_path: Path) -> ExternalSlice:
    """Resolve one tensor's side file relative to the model file as named and check that it may be read.

    The file must lie, links resolved, inside the model's folder; or, where the model file itself is a link into a
    content-addressed cache, inside that cache (the blob's folder, or the folder above when the link lives there too).
    """
    where = f"{model_path}: tensor {name!r}"
    fields: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key in fields:
            raise ModelError(f"{where}: external data names {entry.key!r} twice; the model is damaged")
        fields[entry.key] = entry.value
    location = fields.get("location", "")
    relative = Path(location)
    if not location or "\0" in location:
        raise ModelError(f"{where}: external data has no usable location; the model is damaged")
    if relative.is_absolute() or PureWindowsPath(location).drive or ".." in PureWindowsPath(location).parts:
        raise ModelError(
            f"{where}: external data at {location!r} lies outside the model's folder; refused. "
            "Put the side file beside the model and use a relative location"
        )
    named = model_path.parent / relative
    real = _real_path(named, where=where, location=location)
    if not any(real.is_relative_to(root) for root in _allowed_roots(model_path)):
        raise ModelError(
            f"{where}: external data {location!r} is a link to {real}, outside the model's folder and its cache; "
            "refused. Copy the side file beside the model"
        )
    return _checked_slice(tensor, real, fields=fields, where=where, location=location)


def _real_path(named: Path, *, where: str, location: str) -> Path:
    try:
        real = named.resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a loop of links"
        raise ModelError(
            f"{where}: its side file {location!r} cannot be read ({named}: {reason}); "
            "move or fetch it together with the model"
        ) from error
    if not stat.S_ISREG(mode):
        raise ModelError(f"{where}: its side file {location!r} ({real}) is not a regular file; refused")
    return real


def _allowed_roots(model_path: Path) -> list[Path]:
    folder = real_path(model_path.parent)
    roots = [folder]
    if model_path.is_symlink():
        blobs = real_path(model_path).parent
        roots.append(blobs)
        above = blobs.parent
        # <cache>/blobs/<hash> with links in <cache>/snapshots/...: one cache root holds both. Never the disk's root.
        if above != above.parent and folder.is_relative_to(above):
            roots.append(above)
    return roots


def _checked_slice(
    tensor: TensorProto, real: Path, *, fields: dict[str, str], where: str, location: str
) -> ExternalSlice:
    numbers = {}
    for key in ("offset", "length"):
        text = fields.get(key, "")
        if text and not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise ModelError(f"{where}: external data {key} {text!r} is not a whole number >= 0; the model is damaged")
        numbers[key] = int(text) if text else None
    if element_bits(tensor.data_type) is None:
        raise ModelError(f"{where}: tensors of this type (number {tensor.data_type}) cannot have external data")
    if any(dim < 0 for dim in tensor.dims):
        raise ModelError(f"{where}: negative dimension in {list(tensor.dims)}; the model is damaged")
    offset, expected = numbers["offset"] or 0, tensor_nbytes(tensor)
    length = expected if numbers["length"] is None else numbers["length"]
    size = real.stat().st_size
    if length != expected:
        raise ModelError(
            f"{where}: external data length {length} does not match shape {list(tensor.dims)}, "
            f"which needs {expected} bytes; the model is damaged"
        )
    if offset + length > size:
        raise ModelError(
            f"{where}: external data ends at byte {offset + length}, but {location!r} ({real}) has {size} bytes; "
            "the side file is cut short or belongs to another model"
        )
    return ExternalSlice(path=real, offset_bytes=offset, length_bytes=length)


def _read(piece: ExternalSlice, *, name: str, model_path: Path) -> bytes:
    if piece.length_bytes == 0:
        return b""
    try:
        # The path is already resolved: a link that appears here now was swapped in after the check.
        descriptor = os.open(piece.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "rb") as stream:
            stream.seek(piece.offset_bytes)
            data = stream.read(piece.length_bytes)
    except OSError as error:
        raise ModelError(f"{model_path}: tensor {name!r}: {piece.path} cannot be read: {error.strerror}") from error
    if len(data) != piece.length_bytes:
        raise ModelError(f"{model_path}: tensor {name!r}: {piece.path} ended early; it changed while being read")
    return data


def write_external(model: ModelProto, skeleton: ModelProto, *, data_path: Path, location: str) -> None:
    """Write the initializers of ``model`` that ``skeleton`` lacks to ``data_path``, one at a time, and reference them.

    ``skeleton`` gains one external initializer each, pointing at ``location``; ``model`` is only read.
    """
    present = {tensor.name for tensor in skeleton.graph.initializer}
    heavy = [tensor for tensor in model.graph.initializer if tensor.name not in present]
    with data_path.open("wb") as stream:
        for tensor in track(heavy, what="writing weights", unit="tensor"):
            data = tensor.raw_data if tensor.HasField("raw_data") else _raw_bytes(tensor)
            if len(data) >= ALIGN_BYTES:
                stream.seek(-stream.tell() % ALIGN_BYTES, os.SEEK_CUR)
            entry = skeleton.graph.initializer.add()
            entry.name, entry.data_type, entry.doc_string = tensor.name, tensor.data_type, tensor.doc_string
            entry.dims.extend(tensor.dims)
            entry.data_location = TensorProto.EXTERNAL
            for key, value in (("location", location), ("offset", stream.tell()), ("length", len(data))):
                entry.external_data.add(key=key, value=str(value))
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _raw_bytes(tensor: TensorProto) -> bytes:
    """Values kept in typed fields (float_data, ...), as raw little-endian bytes."""
    return onnx.numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
