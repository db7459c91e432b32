"""Made-up feeds for trying a model, and comparison of what comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from edgeds.errors import ModelError
from edgeds.graph.io import input_specs
from edgeds.specs import TensorSpec

MAX_FEED_BYTES = 1 << 31


def refuse_huge(spec: TensorSpec, shape: Sequence[int]) -> None:
    """Raise ModelError for an input of more than 2 GiB, before anything is allocated."""
    if math.prod(shape) * max(1, spec.np_dtype.itemsize) > MAX_FEED_BYTES:
        raise ModelError(f"input {spec.name!r} of shape {list(shape)} is more than 2 GiB; too large to try here")


def random_feeds(
    model: ModelProto, shapes: Mapping[str, Sequence[int]], *, seed: int = 0
) -> dict[str, NDArray[np.generic]]:
    """One feed per input: normal values for floats, 0 or 1 for integers (valid as masks and small indices)."""
    generator = np.random.default_rng(seed)
    feeds: dict[str, NDArray[np.generic]] = {}
    for spec in input_specs(model):
        shape, dtype = tuple(shapes[spec.name]), spec.np_dtype
        refuse_huge(spec, shape)
        if dtype.kind == "O":
            feeds[spec.name] = np.full(shape, "", dtype)
        elif dtype.kind == "f":
            feeds[spec.name] = generator.standard_normal(shape).astype(dtype)
        else:
            feeds[spec.name] = generator.integers(0, 2, shape).astype(dtype)
    return feeds


def is_close(want: object, have: object) -> bool:
    """Equal shape and dtype, and equal values to float rounding relative to the largest one."""
    if not isinstance(want, np.ndarray) or not isinstance(have, np.ndarray):
        return type(want) is type(have)
    if want.shape != have.shape or want.dtype != have.dtype:
        return False
    if want.dtype.kind != "f":
        return bool(np.array_equal(want, have))
    size = float(np.max(np.abs(want[np.isfinite(want)]), initial=0.0))
    loose = 1e-2 if want.dtype == np.float16 else 1e-4
    return bool(np.allclose(want, have, rtol=loose, atol=loose * max(size, 1e-6), equal_nan=True))
