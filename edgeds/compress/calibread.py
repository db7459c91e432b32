"""Readers behind a calibration set: one per kind of source, each yields one sample at a time."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from edgeds.buckets import pick_bucket
from edgeds.errors import CalibrationError, InputError, SpecError
from edgeds.preproc import ImagePreprocess, prepare_image, read_image, to_bgr
from edgeds.specs import Resolution, TensorSpec

Feeds = dict[str, np.ndarray]
ARRAY_SUFFIXES = (".npy", ".npz")
READ_ERRORS = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError)
"""What numpy and zipfile raise on damaged, pickled or encrypted array files."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One calibration sample before it is fitted to the model's batch size."""

    name: str
    feeds: Feeds


Reader = Callable[[], Iterator[Sample]]


@dataclass(frozen=True, kw_only=True)
class ImageRule:
    """How images become feeds; the resolutions may be empty while no image is met."""

    preprocess: ImagePreprocess
    resolutions: tuple[Resolution, ...]


def image_input(inputs: Sequence[TensorSpec], *, where: str) -> TensorSpec:
    """The model's single NCHW image input; CalibrationError when images cannot feed this model."""
    if not takes_images(inputs):
        listed = "; ".join(map(str, inputs))
        raise CalibrationError(
            f"{where}: images fit a model with one NCHW float input, this one has: {listed}. "
            "Give an .npz whose arrays are named after the inputs"
        )
    return inputs[0]


def takes_images(inputs: Sequence[TensorSpec]) -> bool:
    return len(inputs) == 1 and len(inputs[0].shape) == 4 and inputs[0].dtype.startswith("float")


def spread(items: list[Any], limit: int | None) -> list[Any]:
    """Up to ``limit`` evenly spaced items, so that a sorted folder is covered from end to end."""
    if limit is None or limit >= len(items):
        return items
    return [items[(2 * i + 1) * len(items) // (2 * limit)] for i in range(limit)]


def read_image_files(files: list[Path], inputs: tuple[TensorSpec, ...], rule: ImageRule) -> Iterator[Sample]:
    """One sample per image file; CalibrationError names a file that is not a readable image."""
    for path in files:
        yield _image_file_sample(path, inputs, rule)


def _image_file_sample(path: Path, inputs: tuple[TensorSpec, ...], rule: ImageRule) -> Sample:
    try:
        image = read_image(path)
    except InputError as error:
        raise CalibrationError(f"calibration image {error}; remove it from the set") from error
    return _image_sample(str(path), image, inputs, rule)


def _image_sample(name: str, image: np.ndarray, inputs: tuple[TensorSpec, ...], rule: ImageRule) -> Sample:
    spec = image_input(inputs, where=name)
    if not rule.resolutions:
        raise SpecError(f"{name}: calibrating from images needs a size; pass --size HxW")
    try:
        pixels = to_bgr(image, where=name)
        bucket = pick_bucket((pixels.shape[0], pixels.shape[1]), rule.resolutions)
        array, _ = prepare_image(pixels, rule.preprocess, bucket, where=name)
    except InputError as error:
        raise CalibrationError(f"calibration {error}; remove it from the set") from error
    return Sample(name=name, feeds={spec.name: array[None].astype(spec.np_dtype, copy=False)})


def read_items(items: Iterable[Any], inputs: tuple[TensorSpec, ...], rule: ImageRule, limit: int | None) -> Reader:
    """Samples from a Python iterable, each taken only when it is needed and never one more than ``limit``."""
    used = False

    def read() -> Iterator[Sample]:
        nonlocal used
        if used and iter(items) is items:
            raise CalibrationError("the calibration iterator is used up; pass a list or an object that iterates afresh")
        used = True
        for index, item in enumerate(itertools.islice(items, limit)):
            yield _item_sample(f"calibration sample {index}", item, inputs, rule)

    return read


def _item_sample(name: str, item: Any, inputs: tuple[TensorSpec, ...], rule: ImageRule) -> Sample:
    if isinstance(item, Mapping):
        return Sample(name=name, feeds={str(key): _as_array(value, where=name) for key, value in item.items()})
    if isinstance(item, str | Path):
        return _image_file_sample(Path(item), inputs, rule)
    if isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim in (2, 3) and takes_images(inputs):
        return _image_sample(name, item, inputs, rule)
    if isinstance(item, np.ndarray | np.generic) and len(inputs) == 1:
        return Sample(name=name, feeds={inputs[0].name: _with_batch(np.asarray(item), inputs[0])})
    raise CalibrationError(
        f"{name}: expected a dict of arrays, an array for the only input, an image path or a uint8 image, "
        f"got {type(item).__name__}"
    )


def _as_array(value: Any, *, where: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise CalibrationError(f"{where}: its values do not form an array: {error}") from error


def _with_batch(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    return array[None] if array.ndim == len(spec.shape) - 1 else array


def read_feed_files(files: list[Path], inputs: tuple[TensorSpec, ...]) -> Iterator[Sample]:
    """One feed per file: an .npz with arrays by input name, or an .npy for the model's only input."""
    for path in files:
        try:
            loaded = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                feeds = {_only_input(path, inputs).name: _with_batch(loaded, inputs[0])}
            else:
                with loaded:
                    feeds = {name: loaded[name] for name in loaded.files}
        except READ_ERRORS as error:
            raise _unreadable(path, error) from error
        yield Sample(name=str(path), feeds=feeds)


def _only_input(path: Path, inputs: tuple[TensorSpec, ...]) -> TensorSpec:
    if len(inputs) != 1:
        names = ", ".join(spec.name for spec in inputs)
        raise CalibrationError(f"{path}: one .npy fits a model with one input, this one has {names}; use .npz")
    return inputs[0]


def _unreadable(path: Path, error: Exception) -> CalibrationError:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "allow_pickle" in text or "Python objects" in text:
        text = "it holds pickled Python objects, which are not loaded; save plain numbers"
    return CalibrationError(f"{path}: cannot be read as numpy arrays: {text}")


def read_arrays(arrays: Mapping[str, Any], inputs: tuple[TensorSpec, ...], limit: int | None) -> tuple[Reader, int]:
    """Samples along the first axis of arrays in memory, and how many there are."""
    stored = {str(name): _as_array(value, where=f"calibration array '{name}'") for name, value in arrays.items()}
    shapes = {name: array.shape for name, array in stored.items()}
    count = _sample_count(shapes, inputs, where="calibration arrays")
    chosen = spread(list(range(count)), limit)

    def read() -> Iterator[Sample]:
        for index in chosen:
            feeds = {s.name: _row(stored[s.name][index], s, rank=stored[s.name].ndim) for s in inputs}
            yield Sample(name=f"calibration arrays[{index}]", feeds=feeds)

    return read, len(chosen)


def read_array_file(path: Path, inputs: tuple[TensorSpec, ...], limit: int | None) -> tuple[Reader, int]:
    """Samples along the first axis of one .npz or .npy, and how many there are. Rows are read as they are needed."""
    try:
        if path.suffix.lower() == ".npy":
            array = np.load(path, allow_pickle=False, mmap_mode="r")
            shapes = {_only_input(path, inputs).name: array.shape}
            if array.ndim == len(inputs[0].shape) - 1:
                raise CalibrationError(f"{path}: has shape {array.shape}; samples lie along a first axis of their own")
        else:
            with zipfile.ZipFile(path) as archive:
                names = {s.name for s in inputs} & {item.removesuffix(".npy") for item in archive.namelist()}
                shapes = {name: _Rows(archive, name).shape for name in names}
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error
    chosen = spread(list(range(_sample_count(shapes, inputs, where=str(path)))), limit)
    rows = _memory_rows(path, inputs, chosen) if path.suffix.lower() == ".npy" else _zip_rows(path, inputs, chosen)

    def read() -> Iterator[Sample]:
        try:
            yield from rows()
        except READ_ERRORS as error:
            raise _unreadable(path, error) from error

    return read, len(chosen)


def _memory_rows(path: Path, inputs: tuple[TensorSpec, ...], chosen: list[int]) -> Reader:
    def read() -> Iterator[Sample]:
        array = np.load(path, allow_pickle=False, mmap_mode="r")
        for index in chosen:
            row = _row(np.array(array[index]), inputs[0], rank=array.ndim)
            yield Sample(name=f"{path}[{index}]", feeds={inputs[0].name: row})

    return read


def _zip_rows(path: Path, inputs: tuple[TensorSpec, ...], chosen: list[int]) -> Reader:
    def read() -> Iterator[Sample]:
        with zipfile.ZipFile(path) as archive:
            streams = {spec.name: _Rows(archive, spec.name) for spec in inputs}
            for index in chosen:
                feeds = {s.name: _row(streams[s.name].take(index), s, rank=len(streams[s.name].shape)) for s in inputs}
                yield Sample(name=f"{path}[{index}]", feeds=feeds)

    return read


def _row(row: np.ndarray, spec: TensorSpec, *, rank: int) -> np.ndarray:
    # A sample of an input without a batch axis (a scalar flag, say) is one rank less than the stack of samples.
    return np.asarray(row) if rank == len(spec.shape) + 1 else np.asarray(row)[None]


class _Rows:
    """Rows of one array inside an .npz, read forwards without unpacking the array as a whole."""

    def __init__(self, archive: zipfile.ZipFile, name: str) -> None:
        self._stream: IO[bytes] = archive.open(f"{name}.npy")
        version = np.lib.format.read_magic(self._stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        self.shape, self._fortran, self._dtype = read(self._stream)
        self._next = 0
        self._whole: np.ndarray | None = None
        if self._dtype.hasobject:
            raise ValueError("Python objects in the array")

    def take(self, index: int) -> np.ndarray:
        """Row ``index``; indexes must not decrease."""
        if self._fortran:  # rows are scattered over the file
            if self._whole is None:
                flat = np.frombuffer(self._stream.read(), self._dtype)
                self._whole = flat.reshape(self.shape[::-1]).transpose()
            return np.ascontiguousarray(self._whole[index])
        size = int(np.prod(self.shape[1:], dtype=np.int64)) * self._dtype.itemsize
        while self._next < index:
            self._read(size)
        return np.frombuffer(self._read(size), self._dtype).reshape(self.shape[1:])

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) != size:
            raise EOFError("the file ends before its arrays do")
        self._next += 1
        return data


def _sample_count(shapes: Mapping[str, tuple[int, ...]], inputs: tuple[TensorSpec, ...], *, where: str) -> int:
    missing = next((spec.name for spec in inputs if spec.name not in shapes), None)
    if missing is not None:
        names = ", ".join(spec.name for spec in inputs)
        raise CalibrationError(f"{where}: no array for input '{missing}'; name the arrays after the inputs: {names}")
    counts = {spec.name: (shapes[spec.name][0] if shapes[spec.name] else 0) for spec in inputs}
    if 0 in counts.values():
        empty = next(name for name, count in counts.items() if not count)
        raise CalibrationError(f"{where}: '{empty}' holds no samples along its first axis")
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise CalibrationError(f"{where}: arrays hold different numbers of samples ({listed})")
    return next(iter(counts.values()))
