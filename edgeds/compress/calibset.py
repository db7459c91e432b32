"""Calibration sets: lazily read, content-hashed feeds from images, arrays or a Python iterable.

A set yields feeds (``{input name: array with its batch axis}``) one at a time and never holds more than one sample,
so its size does not matter. Every sample is hashed as it is read; a repeated one is refused, since a set that repeats
one image calibrates to that image only. A set is read afresh by each iteration over it, except for a one-shot iterator.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.errors import CalibrationError, InputError, SpecError
from edgeds.preproc import IMAGE_SUFFIXES, ImagePreprocess, prepare_image, read_image
from edgeds.specs import Resolution, TensorSpec

Feeds = dict[str, np.ndarray]
ARRAY_SUFFIXES = (".npy", ".npz")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One calibration sample before it is fitted to the model's batch size."""

    name: str
    feeds: Feeds


@dataclass
class CalibrationSet:
    """Iterate for feeds. ``digest``, ``samples`` and ``shapes`` describe what the last iteration read.

    Not frozen: it records while it reads.
    """

    source: str
    model_inputs: tuple[TensorSpec, ...]
    preprocess: ImagePreprocess | None
    resolution: Resolution | None
    _read: Any = field(repr=False)
    expected: int | None = None
    """How many samples there will be, where that is known beforehand."""
    samples: int = 0
    shapes: dict[str, int] = field(default_factory=dict)
    """``"images=1x3x320x320"`` -> how many runs had these shapes."""
    _digest: str | None = None

    @property
    def digest(self) -> str:
        """Hex SHA-256 over the content of every sample in order, the preprocessing and the resolution."""
        if self._digest is None:
            for _ in self:
                pass
        assert self._digest is not None
        return self._digest

    def __iter__(self) -> Iterator[Feeds]:
        """Yield feeds that fit the model's batch size; every sample is used once."""
        seen: dict[str, str] = {}
        total = hashlib.sha256()
        if self.preprocess is not None:
            total.update(self.preprocess.digest().encode())
        total.update(str(self.resolution).encode())
        self.samples, self.shapes, self._digest = 0, {}, None
        for feeds in _fit_batch(self._hashed(seen, total), self.model_inputs):
            key = " ".join(f"{name}={'x'.join(map(str, array.shape)) or 'scalar'}" for name, array in feeds.items())
            self.shapes[key] = self.shapes.get(key, 0) + 1
            yield feeds
        if not seen:
            raise CalibrationError(f"calibration set {self.source}: it holds no samples")
        self._digest = total.hexdigest()

    def _hashed(self, seen: dict[str, str], total: Any) -> Iterator[Feeds]:
        for sample in self._read():
            digest = _hash_feeds(sample.feeds)
            if digest in seen:
                raise CalibrationError(
                    f"calibration set {self.source}: {sample.name} has the same content as {seen[digest]}; "
                    "remove one, repeated samples bias the ranges"
                )
            seen[digest] = sample.name
            total.update(digest.encode())
            feeds = {spec.name: _check_array(sample.feeds, spec, where=sample.name) for spec in self.model_inputs}
            self.samples += 1
            yield feeds


def open_calibration(
    source: str | Path | Iterable[Any],
    *,
    model_inputs: Sequence[TensorSpec],
    preprocess: ImagePreprocess | None = None,
    resolution: Resolution | None = None,
    limit: int | None = None,
) -> CalibrationSet:
    """Open a calibration set.

    ``source`` is a folder of images (run through ``preprocess`` at ``resolution``), a folder of ``.npz``/``.npy`` files
    with one feed each (arrays named after the model's inputs, batch axis included), one ``.npz``/``.npy`` whose arrays
    hold samples along the first axis, or an iterable of such feeds, of arrays for the only input, or of HxWx3 uint8
    BGR images. ``limit`` takes that many evenly spaced samples (the first ones of an iterable).

    Raises CalibrationError when the source is missing, empty or does not fit the model, SpecError for a bad limit.
    """
    if limit is not None and limit < 1:
        raise SpecError(f"calibration samples {limit}: must be at least 1")
    inputs = tuple(model_inputs)
    preprocess = preprocess or ImagePreprocess()

    def build(source_name: str, read: Any, expected: int | None, *, images: bool) -> CalibrationSet:
        return CalibrationSet(
            source=source_name,
            model_inputs=inputs,
            preprocess=preprocess if images else None,
            resolution=resolution if images else None,
            _read=read,
            expected=expected,
        )

    if not isinstance(source, str | Path):
        return build("<iterable>", _iterable_reader(source, inputs, preprocess, resolution, limit), None, images=True)
    path = Path(source)
    if path.is_file() and path.suffix.lower() in ARRAY_SUFFIXES:
        arrays = _load_arrays(path, inputs)
        count = _sample_count(arrays, path)
        chosen = _spread(list(range(count)), limit)
        return build(str(path), lambda: _split_arrays(arrays, inputs, path, chosen), len(chosen), images=False)
    if path.is_file():
        raise CalibrationError(
            f"{path}: not a calibration set; give a folder of images, an .npz or .npy file, or a folder of them"
        )
    if not path.is_dir():
        raise CalibrationError(f"{path}: no such file or folder")
    files = _visible_files(path)
    feeds = _spread([item for item in files if item.suffix.lower() in ARRAY_SUFFIXES], limit)
    images = _spread([item for item in files if item.suffix.lower() in IMAGE_SUFFIXES], limit)
    if feeds and images:
        raise CalibrationError(f"{path}: holds both images and array files; keep one kind in a calibration folder")
    if feeds:
        return build(str(path), lambda: _read_feed_files(feeds, inputs), len(feeds), images=False)
    if not images:
        raise CalibrationError(
            f"{path}: no images ({', '.join(sorted(IMAGE_SUFFIXES))}) and no .npz/.npy files below it"
        )
    image_input(inputs, where=str(path))
    return build(str(path), lambda: _read_images(images, inputs, preprocess, resolution), len(images), images=True)


def holds_images(source: str | Path) -> bool:
    """Whether a calibration path is a folder of images (rather than arrays, or nothing readable)."""
    path = Path(source)
    return path.is_dir() and any(item.suffix.lower() in IMAGE_SUFFIXES for item in _visible_files(path))


def _visible_files(folder: Path) -> list[Path]:
    return sorted(item for item in folder.rglob("*") if item.is_file() and not item.name.startswith("."))


def image_input(inputs: Sequence[TensorSpec], *, where: str) -> TensorSpec:
    """The model's single NCHW image input; CalibrationError when images cannot feed this model."""
    spec = inputs[0] if len(inputs) == 1 else None
    if spec is None or len(spec.shape) != 4 or not spec.dtype.startswith("float"):
        listed = "; ".join(map(str, inputs))
        raise CalibrationError(
            f"{where}: images fit a model with one NCHW float input, this one has: {listed}. "
            "Give an .npz whose arrays are named after the inputs"
        )
    return spec


def _spread(items: list[Any], limit: int | None) -> list[Any]:
    """Up to ``limit`` evenly spaced items, so that a sorted folder is covered from end to end."""
    if limit is None or limit >= len(items):
        return items
    return [items[(2 * i + 1) * len(items) // (2 * limit)] for i in range(limit)]


def _hash_feeds(feeds: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(feeds):
        array = np.ascontiguousarray(feeds[name])
        digest.update(f"{name}:{array.dtype.str}:{array.shape};".encode())
        digest.update(array.data.cast("B") if array.size else b"")
    return digest.hexdigest()


def _check_array(feeds: Mapping[str, np.ndarray], spec: TensorSpec, *, where: str) -> np.ndarray:
    """The array for one input with the model's dtype; refuses what would calibrate something else than is served."""
    if spec.name not in feeds:
        raise CalibrationError(
            f"{where}: no array for input '{spec.name}'; it has {', '.join(sorted(feeds)) or 'none'}"
        )
    array = feeds[spec.name]
    if array.ndim != len(spec.shape):
        raise CalibrationError(f"{where}: input '{spec.name}' has shape {array.shape}, the model wants {spec}")
    for axis, (want, got) in enumerate(zip(spec.shape, array.shape, strict=True)):
        if axis and isinstance(want, int) and want != got:
            raise CalibrationError(f"{where}: input '{spec.name}' has shape {array.shape}, the model wants {spec}")
    if array.size == 0:
        raise CalibrationError(f"{where}: input '{spec.name}' is empty (shape {array.shape})")
    want_dtype = spec.np_dtype
    if array.dtype != want_dtype:
        if want_dtype.kind == "f" and array.dtype.kind in "iub":
            raise CalibrationError(
                f"{where}: input '{spec.name}' is {array.dtype}, the model wants {want_dtype}; raw pixels must go "
                "through the preprocessing first: give the folder of images instead"
            )
        if want_dtype.kind != array.dtype.kind and not (want_dtype.kind in "iu" and array.dtype.kind in "iu"):
            raise CalibrationError(f"{where}: input '{spec.name}' is {array.dtype}, the model wants {want_dtype}")
        array = array.astype(want_dtype)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise CalibrationError(f"{where}: input '{spec.name}' holds NaN or infinity")
    return array


def _fit_batch(samples: Iterator[Feeds], inputs: tuple[TensorSpec, ...]) -> Iterator[Feeds]:
    """Split or stack samples to the model's fixed batch size; a short last batch repeats its own last row.

    A model with a free batch axis takes samples as they come.
    """
    batched = [spec for spec in inputs if spec.shape]
    fixed = {spec.shape[0] for spec in batched if isinstance(spec.shape[0], int)}
    if len(fixed) != 1 or len(batched) != len(inputs):
        yield from samples
        return
    batch = int(next(iter(fixed)))
    held: Feeds = {}
    names = [spec.name for spec in inputs]
    for feeds in samples:
        same = bool(held) and all(held[name].shape[1:] == feeds[name].shape[1:] for name in names)
        if held and not same:
            yield _pad_rows(held, batch)
            held = {}
        held = {name: np.concatenate([held[name], feeds[name]]) if held else feeds[name] for name in names}
        rows = min(array.shape[0] for array in held.values())
        while rows >= batch:
            yield {name: held[name][:batch] for name in names}
            held = {name: held[name][batch:] for name in names}
            rows -= batch
        if rows == 0:
            held = {}
    if held:
        yield _pad_rows(held, batch)


def _pad_rows(feeds: Feeds, batch: int) -> Feeds:
    return {
        name: np.concatenate([array, np.repeat(array[-1:], batch - array.shape[0], axis=0)])
        for name, array in feeds.items()
    }


def _load_arrays(path: Path, inputs: tuple[TensorSpec, ...]) -> Feeds:
    """Arrays of an .npz or .npy without pickle; a lone .npy belongs to the model's only input."""
    try:
        loaded = np.load(path, allow_pickle=False, mmap_mode="r" if path.suffix.lower() == ".npy" else None)
        if isinstance(loaded, np.ndarray):
            if len(inputs) != 1:
                names = ", ".join(spec.name for spec in inputs)
                raise CalibrationError(f"{path}: one .npy fits a model with one input, this one has {names}; use .npz")
            return {inputs[0].name: loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        raise CalibrationError(f"{path}: cannot be read as numpy arrays: {error}") from error


def _sample_count(arrays: Feeds, path: Path) -> int:
    counts = {name: (array.shape[0] if array.ndim else 0) for name, array in arrays.items()}
    if not counts or 0 in counts.values():
        empty = next((name for name, count in counts.items() if not count), "the file")
        raise CalibrationError(f"{path}: '{empty}' holds no samples along its first axis")
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise CalibrationError(f"{path}: arrays hold different numbers of samples ({listed})")
    return next(iter(counts.values()))


def _split_arrays(arrays: Feeds, inputs: tuple[TensorSpec, ...], path: Path, chosen: list[int]) -> Iterator[Sample]:
    ranks = {spec.name: len(spec.shape) for spec in inputs}
    for index in chosen:
        feeds = {
            # A sample of an input without a batch axis (a scalar flag, say) is one row less.
            name: np.asarray(
                array[index] if array.ndim == ranks.get(name, array.ndim) + 1 else array[index : index + 1]
            )
            for name, array in arrays.items()
        }
        yield Sample(name=f"{path}[{index}]", feeds=feeds)


def _read_feed_files(files: list[Path], inputs: tuple[TensorSpec, ...]) -> Iterator[Sample]:
    for path in files:
        yield Sample(name=str(path), feeds=_load_arrays(path, inputs))


def _read_images(
    files: list[Path], inputs: tuple[TensorSpec, ...], preprocess: ImagePreprocess, resolution: Resolution | None
) -> Iterator[Sample]:
    for path in files:
        try:
            image = read_image(path)
        except InputError as error:
            raise CalibrationError(f"calibration image {error}; remove it from the set") from error
        yield _image_sample(str(path), image, inputs, preprocess, resolution)


def _image_sample(
    name: str,
    image: np.ndarray,
    inputs: tuple[TensorSpec, ...],
    preprocess: ImagePreprocess,
    resolution: Resolution | None,
) -> Sample:
    spec = image_input(inputs, where=name)
    if resolution is None:
        raise SpecError(f"{name}: calibrating from images needs a size; pass --size HxW")
    array, _ = prepare_image(image, preprocess, resolution)
    return Sample(name=name, feeds={spec.name: array[None].astype(spec.np_dtype, copy=False)})


def _iterable_reader(
    items: Iterable[Any],
    inputs: tuple[TensorSpec, ...],
    preprocess: ImagePreprocess,
    resolution: Resolution | None,
    limit: int | None,
) -> Any:
    used = False

    def read() -> Iterator[Sample]:
        nonlocal used
        if used and iter(items) is items:
            raise CalibrationError("the calibration iterator is used up; pass a list or an object that iterates afresh")
        used = True
        for index, item in enumerate(items):
            if limit is not None and index >= limit:
                return
            name = f"calibration sample {index}"
            if isinstance(item, Mapping):
                yield Sample(name=name, feeds={str(key): np.asarray(value) for key, value in item.items()})
            elif isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim in (2, 3):
                yield _image_sample(name, item, inputs, preprocess, resolution)
            elif isinstance(item, np.ndarray) and len(inputs) == 1:
                batched = item if item.ndim == len(inputs[0].shape) else item[None]
                yield Sample(name=name, feeds={inputs[0].name: batched})
            else:
                raise CalibrationError(
                    f"{name}: expected a dict of arrays, an array for the only input or a uint8 image, "
                    f"got {type(item).__name__}"
                )

    return read
