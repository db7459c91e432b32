"""Feeds to compare engines on: the samples a bundle carries, or seeded random ones."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeds.engines.base import Engine
from edgeds.errors import BundleError, SpecError
from edgeds.specs import TensorSpec

if TYPE_CHECKING:
    from edgeds.bundle import Bundle

Array = np.ndarray[Any, np.dtype[Any]]

_DEFAULT_IMAGE_PX, _DEFAULT_LENGTH = 640, 128
MAX_FEED_BYTES = 1 << 31


def golden_feeds(bundle: Bundle, *, limit: int | None = None) -> list[dict[str, Array]]:
    """The input samples that a bundle carries (``input/<sample>/<name>``); [] when it has none."""
    if not bundle.has_golden():
        return []
    samples: dict[int, dict[str, Array]] = {}
    for key, array in bundle.golden().items():
        kind, _, rest = key.partition("/")
        number, _, name = rest.partition("/")
        if kind == "input":
            if not number.isdecimal() or not name:
                raise BundleError(f"{bundle.source}: golden array {key!r} is not named input/<sample>/<name>")
            samples.setdefault(int(number), {})[name] = array
    return [samples[number] for number in sorted(samples)][:limit]


def random_feeds(
    engine: Engine, *, samples: int = 1, seed: int = 0, shapes: Mapping[str, Sequence[int]] | None = None
) -> Iterable[dict[str, Array]]:
    """Seeded feeds: normal values for floats, 0 or 1 for integers (valid as masks and small indices).

    Open dims: ``shapes`` by input, else batch 1, the model's image size (metadata ``imgsz``) or 640, length 128.
    Raises SpecError for an unknown input, a shape that does not fit, or one of more than 2 GiB.
    """
    if samples < 1:
        raise SpecError(f"samples {samples}: must be at least 1")
    given = dict(shapes or {})
    names = [spec.name for spec in engine.inputs]
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise SpecError(f"input {unknown!r}: the model has no such input; it has {', '.join(names)}")
    image = _image_size(engine.metadata)
    sizes: dict[str, int] = {}
    chosen = {spec.name: _shape(spec, given.get(spec.name), sizes, image) for spec in engine.inputs}

    def generate() -> Iterable[dict[str, Array]]:
        generator = np.random.default_rng(seed)
        for _ in range(samples):
            yield {spec.name: _random(spec, chosen[spec.name], generator) for spec in engine.inputs}

    return generate()


def _shape(
    spec: TensorSpec, given: Sequence[int] | None, sizes: dict[str, int], image: tuple[int, int]
) -> tuple[int, ...]:
    if given is not None and not spec.accepts(tuple(given)):
        raise SpecError(f"input {spec.name!r}: shape {'x'.join(map(str, given))} does not fit {spec}")
    shape = []
    for axis, dim in enumerate(spec.shape):
        if given is not None:
            size = int(given[axis])
        elif isinstance(dim, int):
            size = dim
        elif axis == 0:
            size = 1
        elif len(spec.shape) == 4:
            size = 3 if axis == 1 else image[axis - 2]
        else:
            size = _DEFAULT_LENGTH
        if isinstance(dim, str):
            size = sizes.setdefault(dim, size)
        shape.append(size)
    total = max(1, spec.np_dtype.itemsize)
    for size in shape:
        total *= size
    if total > MAX_FEED_BYTES:
        raise SpecError(
            f"input {spec.name!r}: shape {'x'.join(map(str, shape))} is more than 2 GiB; give a smaller one"
        )
    return tuple(shape)


def _random(spec: TensorSpec, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    dtype = spec.np_dtype
    if dtype.kind == "O":
        return np.full(shape, "", dtype)
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(0, 2, shape).astype(dtype)


def _image_size(metadata: Mapping[str, str]) -> tuple[int, int]:
    text = metadata.get("imgsz", "")
    try:
        value = ast.literal_eval(text) if 0 < len(text) < 100 else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        value = None
    sides = [value, value] if isinstance(value, int) else value
    if isinstance(sides, list | tuple) and len(sides) == 2 and all(type(s) is int and 1 <= s <= 65536 for s in sides):
        return sides[0], sides[1]
    return _DEFAULT_IMAGE_PX, _DEFAULT_IMAGE_PX
