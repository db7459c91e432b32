"""What a build must know of an ONNX file, read from its bytes: weights, side files, operators. No onnx needed.

The device has no onnx package, and TensorRT's parser says little about files: it takes an empty one for an empty
network and any failure over a side file for "Failed to import initializer". The protobuf wire format and the field
numbers are those of the public onnx.proto.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edgeds.errors import ModelError

# onnx.proto field numbers.
GRAPH, NODE, INITIALIZER = 7, 1, 5
OP_TYPE, NODE_DOMAIN, ATTRIBUTE, ATTRIBUTE_TENSOR, ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS = 4, 7, 5, 5, 6, 11
TENSOR_NAME, EXTERNAL_DATA, ENTRY_KEY, ENTRY_VALUE = 8, 13, 1, 2

MAX_DEPTH = 16
"""Nesting of If/Loop bodies that is followed."""


@dataclass(frozen=True, kw_only=True)
class OnnxScan:
    """Size of an ONNX model with its side files, and its operators (subgraphs included)."""

    path: Path
    file_bytes: int
    external_bytes: int
    external_files: tuple[str, ...]
    operators: dict[str, int]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, to the accuracy of a file's overhead."""
        return self.file_bytes + self.external_bytes

    @property
    def is_quantized(self) -> bool:
        return "DequantizeLinear" in self.operators


def scan_onnx(path: str | Path) -> OnnxScan:
    """Scan one file. Raises ModelError for one that is missing, empty or not ONNX, and for side files that are
    missing, too short, or outside the model's folder."""
    path = Path(path)
    try:
        if not path.is_file():
            raise ModelError(f"{path}: no such file; expected an .onnx model")
        size = path.stat().st_size
        if size == 0:
            raise ModelError(f"{path}: the file is empty; export the model again")
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            operators, external = _scan_model(path, data)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    total = 0
    for location, (needed, tensor) in external.items():
        total += _side_file(path, location, tensor=tensor, needed=needed)
    return OnnxScan(
        path=path,
        file_bytes=size,
        external_bytes=total,
        external_files=tuple(sorted(external)),
        operators=dict(operators),
    )


def _scan_model(path: Path, data: mmap.mmap) -> tuple[Counter[str], dict[str, tuple[int, str]]]:
    operators: Counter[str] = Counter()
    external: dict[str, tuple[int, str]] = {}
    graphs = 0
    try:
        for field, start, stop in _fields(data, 0, len(data)):
            if field == GRAPH:
                graphs += 1
                _scan_graph(data, (start, stop), operators=operators, external=external, depth=0)
    except _DamagedError as error:
        raise ModelError(f"{path}: not an ONNX file, or a damaged one ({error}); export the model again") from error
    if not graphs or not operators:
        raise ModelError(f"{path}: holds no graph with operators, so it is not an ONNX model; export it again")
    return operators, external


def _scan_graph(
    data: mmap.mmap,
    span: tuple[int, int],
    *,
    operators: Counter[str],
    external: dict[str, tuple[int, str]],
    depth: int,
) -> None:
    if depth > MAX_DEPTH:
        raise _DamagedError(f"subgraphs are nested more than {MAX_DEPTH} deep")
    for field, start, stop in _fields(data, *span):
        if field == NODE:
            domain, op = "", ""
            for inner, first, last in _fields(data, start, stop):
                if inner == OP_TYPE:
                    op = _text(data, first, last)
                elif inner == NODE_DOMAIN:
                    domain = _text(data, first, last)
                elif inner == ATTRIBUTE:
                    for part, low, high in _fields(data, first, last):
                        if part in (ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS):
                            _scan_graph(data, (low, high), operators=operators, external=external, depth=depth + 1)
                        elif part == ATTRIBUTE_TENSOR:
                            _scan_tensor(data, low, high, external)
            operators[op if domain in ("", "ai.onnx") else f"{domain}.{op}"] += 1
        elif field == INITIALIZER:
            _scan_tensor(data, start, stop, external)


def _scan_tensor(data: mmap.mmap, start: int, stop: int, external: dict[str, tuple[int, str]]) -> None:
    name, entries = "", {}
    for field, first, last in _fields(data, start, stop):
        if field == TENSOR_NAME:
            name = _text(data, first, last)
        elif field == EXTERNAL_DATA:
            key = value = ""
            for inner, low, high in _fields(data, first, last):
                if inner == ENTRY_KEY:
                    key = _text(data, low, high)
                elif inner == ENTRY_VALUE:
                    value = _text(data, low, high)
            entries[key] = value
    if "location" in entries:
        end = _number(entries.get("offset", "0"), name) + _number(entries.get("length", "0"), name)
        known = external.get(entries["location"], (0, name))
        external[entries["location"]] = max(known, (end, name))


def _side_file(path: Path, location: str, *, tensor: str, needed: int) -> int:
    """Size of a side file. It is looked up beside the model as it was named; a link must end inside that folder or,
    where the model itself is a link into a cache, beside the model's own file there."""
    where = f"{path}: tensor {tensor!r} keeps its data in {location!r}"
    parts = PurePosixPath(location)
    if not location or parts.is_absolute() or ".." in parts.parts or "\\" in location or "\0" in location:
        raise ModelError(f"{where}, outside the model's folder; refused")
    side = path.parent / location
    if not side.is_file():
        raise ModelError(f"{where}, which is missing beside the model; copy both files")
    real = side.resolve()
    if not any(real.is_relative_to(folder) for folder in (path.parent.resolve(), path.resolve().parent)):
        raise ModelError(f"{where}, a link that leads out of the model's folder; refused")
    size = real.stat().st_size
    if size < needed:
        raise ModelError(f"{where}: that file has {size} bytes but {needed} are needed; it is cut short, copy it again")
    return size


class _DamagedError(Exception):
    pass


def _fields(data: mmap.mmap, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Length-delimited fields as (number, start, stop); other wire types are stepped over."""
    at = start
    while at < stop:
        tag, at = _varint(data, at, stop)
        wire = tag & 7
        if wire == 2:
            length, at = _varint(data, at, stop)
            if length > stop - at:
                raise _DamagedError(f"a field at byte {at} is longer than what follows")
            yield tag >> 3, at, at + length
            at += length
        elif wire == 0:
            _, at = _varint(data, at, stop)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
            if at > stop:
                raise _DamagedError("the file ends within a number")
        else:
            raise _DamagedError(f"unknown wire type {wire} at byte {at}")


def _varint(data: mmap.mmap, at: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while at < stop and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _DamagedError(f"a number at byte {at} does not end")


def _text(data: mmap.mmap, start: int, stop: int) -> str:
    return data[start:stop].decode("utf-8", "replace")


def _number(text: str, tensor: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise _DamagedError(f"tensor {tensor!r} states {text!r} for the offset or length of its data")
    return int(text)
