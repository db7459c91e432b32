"""Calibration sets: lazily read, content-hashed feeds from images, arrays or a Python iterable.

A set yields feeds (``{input name: array with its batch axis}``) one at a time and never holds more than one sample,
so its size does not matter. Every sample is hashed as it is read; a repeated one is refused, since a set that repeats
one image calibrates to that image only. A set is read afresh by each iteration over it, except for a one-shot iterator.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.compress.calibread import (
    ARRAY_SUFFIXES,
    Feeds,
    ImageRule,
    Reader,
    image_input,
    read_array_file,
    read_arrays,
    read_feed_files,
    read_image_files,
    read_items,
    spread,
)
from edgeds.errors import CalibrationError, SpecError
from edgeds.preproc import IMAGE_SUFFIXES, ImagePreprocess
from edgeds.specs import Resolution, TensorSpec

__all__ = ["CalibrationSet", "Feeds", "holds_images", "image_input", "open_calibration"]


@dataclass
class CalibrationSet:
    """Iterate for feeds. ``digest``, ``samples`` and ``shapes`` describe what the last iteration read.

    Not frozen: it records while it reads.
    """

    source: str
    model_inputs: tuple[TensorSpec, ...]
    preprocess: ImagePreprocess | None
    resolutions: tuple[Resolution, ...]
    """Sizes that images are brought to, each image to the one ``buckets.pick_bucket`` gives it."""
    _read: Reader = field(repr=False)
    expected: int | None = None
    """How many samples there will be, where that is known beforehand."""
    one_shot: bool = False
    """Whether the source can be read only once (a generator)."""
    samples: int = 0
    shapes: dict[str, int] = field(default_factory=dict)
    """``"images=1x3x320x320"`` -> how many runs had these shapes."""
    _digest: str | None = None

    @property
    def digest(self) -> str:
        """Hex SHA-256 over the content of every sample in order, the preprocessing and the resolutions."""
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
        total.update(",".join(map(str, self.resolutions)).encode())
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
    resolution: Resolution | Sequence[Resolution] | None = None,
    limit: int | None = None,
) -> CalibrationSet:
    """Open a calibration set.

    ``source`` is a folder of images (run through ``preprocess`` at ``resolution``), a folder of ``.npz``/``.npy`` files
    with one feed each (arrays named after the model's inputs, batch axis included), one ``.npz``/``.npy`` (or a mapping
    of arrays) that holds samples along the first axis, or an iterable of such feeds, of arrays for the only input, of
    image paths, or of HxWx3 uint8 BGR images. With several resolutions each image goes to the bucket that serving
    would give it. ``limit`` takes that many evenly spaced samples (the first ones of an iterable).

    Raises CalibrationError when the source is missing, empty or does not fit the model, SpecError for a bad argument.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise SpecError(f"calibration samples {limit!r}: must be a whole number of at least 1")
    inputs = tuple(model_inputs)
    if not inputs:
        raise CalibrationError("the model has no inputs, so there is nothing to calibrate with")
    rule = ImageRule(preprocess=preprocess or ImagePreprocess(), resolutions=_resolutions(resolution))

    def build(name: str, read: Reader, expected: int | None, *, images: bool, one_shot: bool = False) -> CalibrationSet:
        return CalibrationSet(
            source=name,
            model_inputs=inputs,
            preprocess=rule.preprocess if images else None,
            resolutions=rule.resolutions if images else (),
            _read=read,
            expected=expected,
            one_shot=one_shot,
        )

    if isinstance(source, Mapping):
        reader, count = read_arrays(source, inputs, limit)
        return build("<arrays>", reader, count, images=False)
    if not isinstance(source, str | Path):
        if not isinstance(source, Iterable):
            raise SpecError(f"calibration source {source!r}: give a path or an iterable of samples")
        one_shot = iter(source) is source
        return build("<iterable>", read_items(source, inputs, rule, limit), None, images=True, one_shot=one_shot)
    path = Path(source)
    if path.is_file() and path.suffix.lower() in ARRAY_SUFFIXES:
        reader, count = read_array_file(path, inputs, limit)
        return build(str(path), reader, count, images=False)
    if path.is_file():
        raise CalibrationError(
            f"{path}: not a calibration set; give a folder of images, an .npz or .npy file, or a folder of them"
        )
    if not path.is_dir():
        there = path.exists() or path.is_symlink()
        what = (
            "neither a folder nor a regular file (a pipe, device or dead link)" if there else "no such file or folder"
        )
        raise CalibrationError(f"{path}: {what}")
    feeds, images = _folder_files(path, limit)
    if feeds:
        return build(str(path), lambda: read_feed_files(feeds, inputs), len(feeds), images=False)
    image_input(inputs, where=str(path))
    return build(str(path), lambda: read_image_files(images, inputs, rule), len(images), images=True)


def holds_images(source: str | Path) -> bool:
    """Whether a calibration path is a folder of images (rather than arrays, or nothing readable)."""
    path = Path(source)
    return path.is_dir() and any(item.suffix.lower() in IMAGE_SUFFIXES for item in _visible_files(path))


def _resolutions(given: Resolution | Sequence[Resolution] | None) -> tuple[Resolution, ...]:
    if given is None:
        return ()
    listed = (given,) if isinstance(given, Resolution) else tuple(given)
    wrong = [item for item in listed if not isinstance(item, Resolution)]
    if wrong or not listed:
        raise SpecError(f"resolution {given!r}: give a Resolution or a sequence of them")
    return tuple(dict.fromkeys(listed))


def _folder_files(path: Path, limit: int | None) -> tuple[list[Path], list[Path]]:
    """(array files, image files) of a folder, one of them empty."""
    files = _visible_files(path)
    feeds = [item for item in files if item.suffix.lower() in ARRAY_SUFFIXES]
    images = [item for item in files if item.suffix.lower() in IMAGE_SUFFIXES]
    if feeds and images:
        raise CalibrationError(f"{path}: holds both images and array files; keep one kind in a calibration folder")
    if not feeds and not images:
        raise CalibrationError(
            f"{path}: no images ({', '.join(sorted(IMAGE_SUFFIXES))}) and no .npz/.npy files below it"
        )
    return spread(feeds, limit), spread(images, limit)


def _visible_files(folder: Path) -> list[Path]:
    """Files below a folder, hidden ones and hidden folders left out. CalibrationError for a folder that is locked."""

    def fail(error: OSError) -> None:
        raise CalibrationError(f"{error.filename}: cannot be listed: {error.strerror or error}") from error

    found: list[Path] = []
    for place, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in files if not name.startswith(".") and Path(place, name).is_file()]
    return sorted(found)


def _hash_feeds(feeds: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(feeds):
        array = np.ascontiguousarray(feeds[name])
        digest.update(f"{name}:{array.dtype.str}:{array.shape};".encode())
        if array.dtype.kind == "O":
            digest.update(repr(array.tolist()).encode())
        elif array.size:
            digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _check_array(feeds: Mapping[str, np.ndarray], spec: TensorSpec, *, where: str) -> np.ndarray:
    """The array for one input with the model's dtype; refuses what would calibrate something else than is served."""
    if spec.name not in feeds:
        raise CalibrationError(
            f"{where}: no array for input '{spec.name}'; it has {', '.join(sorted(feeds)) or 'none'}"
        )
    array = feeds[spec.name]
    # The batch axis may differ: samples are split or stacked to the model's.
    if array.ndim != len(spec.shape) or any(
        isinstance(want, int) and want != got for want, got in zip(spec.shape[1:], array.shape[1:], strict=False)
    ):
        raise CalibrationError(f"{where}: input '{spec.name}' has shape {array.shape}, the model wants {spec}")
    # A zero-length axis is right only where the model leaves the axis open (an empty key/value cache).
    if array.size == 0 and (0 in array.shape[:1] or array.ndim < 3):
        raise CalibrationError(f"{where}: input '{spec.name}' is empty (shape {array.shape})")
    array = _as_model_dtype(array, spec, where=where)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise CalibrationError(f"{where}: input '{spec.name}' holds NaN or infinity (as {array.dtype})")
    return array


def _as_model_dtype(array: np.ndarray, spec: TensorSpec, *, where: str) -> np.ndarray:
    """Convert between widths of one kind, never silently between kinds or past a range."""
    wanted = spec.np_dtype
    if array.dtype == wanted:
        return array
    if wanted.kind == "f" and array.dtype.kind in "iub":
        raise CalibrationError(
            f"{where}: input '{spec.name}' is {array.dtype}, the model wants {wanted}; raw pixels must go "
            "through the preprocessing first: give the folder of images instead"
        )
    both_integers = wanted.kind in "iu" and array.dtype.kind in "iu"
    both_text = wanted.kind == "O" and array.dtype.kind in "OU"
    if wanted.kind != array.dtype.kind and not both_integers and not both_text:
        raise CalibrationError(f"{where}: input '{spec.name}' is {array.dtype}, the model wants {wanted}")
    with np.errstate(over="ignore"):  # what overflows becomes infinity and is refused by the caller
        converted = array.astype(wanted)
    if both_integers and not np.array_equal(converted, array):
        raise CalibrationError(f"{where}: input '{spec.name}' holds values that do not fit {wanted}")
    return converted


def _fit_batch(samples: Iterator[Feeds], inputs: tuple[TensorSpec, ...]) -> Iterator[Feeds]:
    """Split or stack samples to the model's fixed batch size; a short last batch repeats its own last row.

    A model with a free batch axis takes samples as they come. Samples of one shape wait for each other, so a mix of
    sizes is not padded more than once per size.
    """
    batched = [spec for spec in inputs if spec.shape]
    fixed = {spec.shape[0] for spec in batched if isinstance(spec.shape[0], int)}
    if len(fixed) != 1 or len(batched) != len(inputs) or fixed == {0}:
        yield from samples
        return
    batch = int(next(iter(fixed)))
    waiting: dict[tuple[tuple[int, ...], ...], Feeds] = {}
    names = [spec.name for spec in inputs]
    for feeds in samples:
        key = tuple(feeds[name].shape[1:] for name in names)
        earlier = waiting.pop(key, None)
        held = {name: np.concatenate([earlier[name], feeds[name]]) for name in names} if earlier else feeds
        rows = {held[name].shape[0] for name in names}
        if len(rows) != 1:
            listed = ", ".join(f"{name}: {feeds[name].shape[0]}" for name in names)
            raise CalibrationError(f"a calibration sample has inputs with different batch sizes ({listed})")
        done = rows.pop() // batch * batch
        for start in range(0, done, batch):
            yield {name: held[name][start : start + batch] for name in names}
        if done < held[names[0]].shape[0]:
            waiting[key] = {name: held[name][done:] for name in names}
    for held in waiting.values():
        yield _pad_rows(held, batch)


def _pad_rows(feeds: Feeds, batch: int) -> Feeds:
    return {
        name: np.concatenate([array, np.repeat(array[-1:], batch - array.shape[0], axis=0)])
        for name, array in feeds.items()
    }
