"""Golden samples: inputs and reference outputs in one ``.npz``, read without pickle and within bounds."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from edgeds.errors import BundleError
from edgeds.files import ZIP_ERRORS

MAX_GOLDEN_BYTES = 1 << 30


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
    version = npy_format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise BundleError(f"{where} has .npy format {version}; save it with numpy.savez")
    read_header = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    shape, fortran, dtype = read_header(stream)
    if dtype.hasobject or dtype.kind not in "biufc":
        raise BundleError(f"{where} has dtype {dtype}; only plain numbers and booleans are read")
    count = 1
    for dim in shape:  # Python integers: a product in int64 could wrap around
        count *= dim
    data = stream.read(size)
    if min((0, *shape)) < 0 or count * dtype.itemsize != len(data):
        raise BundleError(f"{where} holds {len(data)} bytes, its header asks for {shape} of {dtype}")
    array: np.ndarray[Any, Any] = np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if fortran else "C")
    return array.copy()  # frombuffer gives a read-only view
