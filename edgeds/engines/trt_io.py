"""What a deserialized TensorRT engine takes and gives: tensors, their types and places, and its profiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeds.engines.base import shape_text
from edgeds.engines.trt_load import LoadedPlan
from edgeds.errors import InputError, ModelError
from edgeds.specs import Dim, TensorSpec

Shape = tuple[int, ...]

# TensorRT's type names -> numpy's. BF16, FP8 and 4-bit types have none.
DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One input or output. ``shape`` has -1 where it is dynamic; ``on_host`` tensors hold shapes, read by the CPU."""

    name: str
    is_input: bool
    dtype: str
    shape: Shape
    on_host: bool


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Smallest and largest value of each axis of one input in one profile; for ``on_host`` inputs of their values."""

    min: Shape
    max: Shape

    def admits(self, shape: Shape) -> bool:
        return len(shape) == len(self.min) and all(
            low <= dim <= high for low, dim, high in zip(self.min, shape, self.max, strict=True)
        )

    def __str__(self) -> str:
        pairs = zip(self.min, self.max, strict=True)
        return "[" + ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in pairs) + "]"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One optimization profile: allowed shapes by input, and allowed values of shape inputs."""

    index: int
    shapes: Mapping[str, Allowed]
    values: Mapping[str, Allowed]

    @property
    def volume(self) -> int:
        """Elements of the largest inputs, to compare profiles by size."""
        return sum(math.prod(allowed.max) for allowed in self.shapes.values())


def read_tensors(loaded: LoadedPlan, *, where: str) -> tuple[TensorInfo, ...]:
    """All inputs and outputs in the engine's order.

    Raises ModelError for a type numpy cannot hold and for vectorised I/O formats, naming the tensor.
    """
    found = []
    for index in range(loaded.engine.num_io_tensors):
        name = str(loaded.engine.get_tensor_name(index))
        mode = loaded.engine.get_tensor_mode(name).name
        kind = "input" if mode == "INPUT" else "output"
        type_name = loaded.engine.get_tensor_dtype(name).name
        if type_name not in DTYPES:
            raise ModelError(
                f"{where}: {kind} {name!r} has type {type_name}, which numpy cannot hold; build the engine with "
                "float32 or float16 inputs and outputs"
            )
        layout = loaded.engine.get_tensor_format(name).name
        if layout != "LINEAR":
            raise ModelError(
                f"{where}: {kind} {name!r} has the memory format {layout}; only LINEAR is read; build the engine "
                "without I/O formats"
            )
        found.append(
            TensorInfo(
                name=name,
                is_input=mode == "INPUT",
                dtype=DTYPES[type_name],
                shape=tuple(int(dim) for dim in loaded.engine.get_tensor_shape(name)),
                on_host=loaded.engine.get_tensor_location(name).name == "HOST",
            )
        )
    if not any(not info.is_input for info in found):
        raise ModelError(f"{where}: the engine has no outputs; build it again from its ONNX")
    return tuple(found)


def read_profiles(loaded: LoadedPlan, tensors: Sequence[TensorInfo]) -> tuple[Profile, ...]:
    """All optimization profiles; an engine with fixed shapes has one that admits just them."""
    profiles = []
    for index in range(max(1, int(loaded.engine.num_optimization_profiles))):
        shapes: dict[str, Allowed] = {}
        values: dict[str, Allowed] = {}
        for info in tensors:
            if not info.is_input:
                continue
            if -1 in info.shape:
                low, _, high = loaded.engine.get_tensor_profile_shape(info.name, index)
                shapes[info.name] = Allowed(min=tuple(map(int, low)), max=tuple(map(int, high)))
            else:
                shapes[info.name] = Allowed(min=info.shape, max=info.shape)
            limits = _profile_values(loaded, info.name, index) if info.on_host else None
            if limits:
                values[info.name] = Allowed(min=tuple(map(int, limits[0])), max=tuple(map(int, limits[2])))
        profiles.append(Profile(index=index, shapes=shapes, values=values))
    return tuple(profiles)


def _profile_values(loaded: LoadedPlan, name: str, index: int) -> Any:
    # The bindings label the two arguments the wrong way round: by position it is (profile, name).
    return loaded.engine.get_tensor_profile_values(index, name)


def choose_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape], values: Mapping[str, Shape]) -> Profile:
    """The smallest profile that admits these input shapes and shape values, as it was tuned closest to them.

    Raises InputError naming the input, its shape and what the profiles allow.
    """
    fitting = [
        profile
        for profile in profiles
        if all(profile.shapes[name].admits(shape) for name, shape in shapes.items())
        and all(profile.values[name].admits(value) for name, value in values.items() if name in profile.values)
    ]
    if fitting:
        return min(fitting, key=lambda profile: (profile.volume, profile.index))
    raise InputError(_misfit(profiles, shapes, values))


def _misfit(profiles: Sequence[Profile], shapes: Mapping[str, Shape], values: Mapping[str, Shape]) -> str:
    for kind, given in (("shape", shapes), ("values", values)):
        for name, shape in given.items():
            table = [profile.shapes if kind == "shape" else profile.values for profile in profiles]
            ranges = [allowed[name] for allowed in table if name in allowed]
            if ranges and not any(allowed.admits(shape) for allowed in ranges):
                texts = list(dict.fromkeys(map(str, ranges)))
                return (
                    f"input {name!r}: {kind} {shape_text(shape)} is outside what the engine was built for "
                    f"({' or '.join(texts)}); use one of these sizes or build the engine with a profile for it"
                )
    text = ", ".join(f"{name} {shape_text(shape)}" for name, shape in shapes.items())
    return (
        f"inputs {text}: each is allowed by some profile of the engine, but no profile allows them together; "
        "build the engine with a profile that does"
    )


def max_batch(profiles: Sequence[Profile]) -> int | None:
    """Most rows of one run, when axis 0 of every input is the batch and can vary; None when it is fixed."""
    best: int | None = None
    for profile in profiles:
        axes = [(allowed.min[0], allowed.max[0]) for allowed in profile.shapes.values() if allowed.max]
        if axes and any(low < high for low, high in axes):
            best = max(best or 1, min(high for _, high in axes))
    return best


def make_specs(
    tensors: Sequence[TensorInfo], profiles: Sequence[Profile], *, named: Sequence[TensorSpec], batched: frozenset[str]
) -> dict[str, TensorSpec]:
    """TensorSpecs by name: dims of engines have no names, so they come from ``named`` (the bundle's specs).

    A dim that is the same in all profiles becomes that number. ``batched`` names tensors whose axis 0 was seen to
    follow the batch.
    """
    names = {spec.name: spec for spec in named}
    specs = {}
    for info in tensors:
        known = names.get(info.name)
        dims: list[Dim] = []
        for axis, size in enumerate(info.shape):
            dim: Dim = size if size >= 0 else None
            if dim is None and info.is_input:
                sizes = {
                    size
                    for profile in profiles
                    for size in (profile.shapes[info.name].min[axis], profile.shapes[info.name].max[axis])
                }
                dim = sizes.pop() if len(sizes) == 1 else None
            if dim is None and known is not None and len(known.shape) == len(info.shape):
                name = known.shape[axis]
                dim = name if isinstance(name, str) else None
            if dim is None and axis == 0 and info.name in batched:
                dim = "batch"
            dims.append(dim)
        specs[info.name] = TensorSpec(name=info.name, dtype=info.dtype, shape=tuple(dims))
    return specs
