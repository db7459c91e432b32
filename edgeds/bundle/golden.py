"""Golden samples: inputs and reference outputs in one ``.npz``, read without pickle and within bounds."""

from __future__ import annotations

import ast
import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from edgeds.errors import BundleError
from edgeds.files import ZIP_ERRORS

MAX_GOLDEN_BYTES = 1 << 30
MAX_HEADER_BYTES = 10_000
MAX_RANK = 32
MAGIC = b"\x93NUMPY"


def read_golden(path: Path, *, max_bytes: int = MAX_GOLDEN_BYTES) -> dict[str, np.ndarray]:
    """Read all arrays of an ``.npz``; the caller owns them.

    Raises BundleError for anything but plain numeric arrays (object arrays would run code when unpickled), for
    headers that promise more data than the file holds, and above ``max_bytes`` unpacked.
    """
    arrays: dict[str, np.ndarray] = {}
    left = max_bytes
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                if name in arrays or name == entry.filename:
                    raise BundleError(f"{path}: entry {entry.filename!r} is not a distinct .npy array")
                left -= entry.file_size
                if left < 0:
                    raise BundleError(f"{path}: arrays unpack to more than the {max_bytes:,} bytes allowed")
                with archive.open(entry) as stream:
                    arrays[name] = _read_array(stream, entry.file_size, where=f"{path}: array {name!r}")
    except ZIP_ERRORS as error:
        raise BundleError(f"{path}: cannot be read: {error}") from error
    return arrays


def _read_array(stream: IO[bytes], size: int, *, where: str) -> np.ndarray:
    dtype, shape, order = _read_header(stream, where=where)
    data = stream.read(size)
    if math.prod(shape) * dtype.itemsize != len(data):  # Python integers: the product cannot wrap around
        raise BundleError(f"{where} holds {len(data)} bytes, its header asks for {shape} of {dtype}")
    array: np.ndarray[Any, Any] = np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if order else "C")
    return array.copy()  # frombuffer gives a read-only view


def _read_header(stream: IO[bytes], *, where: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Read a ``.npy`` header of format 1 or 2: magic, version, length, a Python dict literal.

    Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. numpy's own reader is not used:
    what it raises and warns about damaged headers differs between versions of numpy and Python.
    """
    start = stream.read(8)
    length_bytes = {1: 2, 2: 4}.get(start[6] if len(start) == 8 and start.startswith(MAGIC) else 0)
    if length_bytes is None:
        raise BundleError(f"{where} is not a .npy array of format 1 or 2; save it with numpy.savez")
    length = int.from_bytes(stream.read(length_bytes), "little")
    text = stream.read(min(length, MAX_HEADER_BYTES)).decode("latin-1")
    try:
        header = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise BundleError(f"{where} has a damaged header: {error}") from error
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise BundleError(f"{where} has a damaged header: it must give descr, fortran_order and shape")
    shape, descr = header["shape"], header["descr"]
    if not isinstance(shape, tuple) or len(shape) > MAX_RANK or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise BundleError(f"{where} has a damaged header: shape is {shape!r}")
    try:
        dtype = np.dtype(descr) if isinstance(descr, str) else None
    except (TypeError, ValueError, SyntaxError) as error:
        raise BundleError(f"{where} has an unknown dtype {descr!r}") from error
    if dtype is None or dtype.kind not in "biufc":
        raise BundleError(f"{where} has dtype {descr!r}; only plain numbers and booleans are read")
    return dtype, shape, header["fortran_order"] is True
