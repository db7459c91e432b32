"""Read Hugging Face checkpoints: config.json and safetensors, one file or shards, without torch.

The format (8 bytes of header length, a JSON header, raw little-endian data) is read straight from memory-mapped files:
the safetensors package needs torch for bfloat16, which most language models come in.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from edgeds.errors import ModelError, SpecError
from edgeds.files import open_regular, read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100 * 2**20
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2"}
_DTYPES |= {"I8": "i1", "U8": "u1", "BOOL": "?"}


@dataclass(frozen=True, kw_only=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Checkpoint:
    """A model folder. ``config`` is its config.json; tensors are read when asked for. Close it, or use ``with``."""

    def __init__(self, folder: Path, config: dict[str, Any], entries: dict[str, _Entry]) -> None:
        self.folder = folder
        self.config = config
        self._entries = entries
        self._maps: dict[Path, mmap.mmap] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it. Raises ModelError when it is missing."""
        return self._entry(name).shape

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A fresh array: float32 for every float type, integers as they are.

        Raises ModelError for a missing tensor, and for one of another shape than ``shape``.
        """
        entry = self._entry(name)
        if shape is not None and entry.shape != shape:
            raise ModelError(
                f"{entry.file}: tensor '{name}' is {list(entry.shape)}, but config.json makes it {list(shape)}"
            )
        data = self._map(entry.file)
        raw = np.frombuffer(data, _DTYPES[entry.dtype], count=int(np.prod(entry.shape)), offset=entry.start)
        raw = raw.reshape(entry.shape)
        if entry.dtype == "BF16":  # the upper half of a float32
            return np.asarray(raw.astype(np.uint32) << 16).view(np.float32)
        if raw.dtype.kind != "f":
            return raw.copy()
        with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinity, which readers refuse by name
            return raw.astype(np.float32)

    def close(self) -> None:
        """Unmap the files."""
        for data in self._maps.values():
            data.close()
        self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            near = [known for known in self._entries if known.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]][:2]
            hint = f"; it has {', '.join(near)}, ..." if near else ""
            raise ModelError(f"{self.folder}: the checkpoint has no tensor '{name}'{hint}")
        return self._entries[name]

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with open_regular(path) as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[path]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a model folder as Hugging Face writes it.

    Raises ModelError for a missing or damaged config.json or weight file, and for weights that are pickles
    (pytorch_model.bin), which run code when they are read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; give one with config.json and model.safetensors")
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ModelError(f"{folder}: has no config.json; give the model's folder as it was downloaded")
    config = _read_json(config_path)
    if not isinstance(config, dict):
        raise ModelError(f"{config_path}: expected an object, got {type(config).__name__}")
    entries: dict[str, _Entry] = {}
    for path in _weight_files(folder):
        for name, entry in _read_header(path):
            if name in entries:
                raise ModelError(f"{path}: tensor '{name}' is also in {entries[name].file}")
            entries[name] = entry
    return Checkpoint(folder, config, entries)


def _read_json(path: Path) -> Any:
    """As ``read_json``; a model's own file that is damaged is no wrong use of a command."""
    try:
        return read_json(path)
    except SpecError as error:
        raise ModelError(f"{error}; download the model again") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        listed = _read_json(index)
        shards = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelError(f"{index}: has no weight_map of tensor names to files")
        names = sorted(set(shards.values()))
        for name in names:
            if Path(name).name != name:
                raise ModelError(f"{index}: {name!r} is not a file name in the same folder")
            if not (folder / name).is_file():
                raise ModelError(f"{folder / name}: is missing, but {INDEX_NAME} lists it")
        return [folder / name for name in names]
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    pickles = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt")) + sorted(folder.glob("*.pth"))
    if pickles:
        raise ModelError(
            f"{pickles[0]}: is a pickle, which runs code when it is read; save the model with "
            "save_pretrained(..., safe_serialization=True) and give that folder"
        )
    raise ModelError(f"{folder}: has no {SINGLE_NAME} and no {INDEX_NAME}")


def _read_header(path: Path) -> Iterator[tuple[str, _Entry]]:
    size = path.stat().st_size
    with open_regular(path) as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{path}: not a safetensors file, or cut off ({size} bytes); download it again")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: its header is not JSON ({error}); download it again") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: its header is not an object")
    for name, found in header.items():
        if name != "__metadata__":
            yield name, _entry(path, name, found, data=8 + length, size=size)


def _entry(path: Path, name: str, found: Any, *, data: int, size: int) -> _Entry:
    try:
        dtype, shape, (start, stop) = found["dtype"], tuple(found["shape"]), found["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: tensor '{name}' has no dtype, shape and data_offsets") from error
    if dtype not in _DTYPES:
        raise ModelError(f"{path}: tensor '{name}' is of type {dtype!r}; known are {', '.join(_DTYPES)}")
    if not all(isinstance(dim, int) and dim >= 0 for dim in (*shape, start, stop)):
        raise ModelError(f"{path}: tensor '{name}' has the shape {list(shape)}")
    if stop - start != int(np.prod(shape, dtype=object)) * np.dtype(_DTYPES[dtype]).itemsize or data + stop > size:
        raise ModelError(f"{path}: the data of tensor '{name}' is cut off or does not fit its shape; download it again")
    return _Entry(file=path, dtype=dtype, shape=shape, start=data + start, stop=data + stop)
