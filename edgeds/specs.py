"""Value types shared by both halves: tensor specs, shape ranges, resolutions, budgets. Frozen, units in names."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from edgeds.errors import SpecError

Dim = int | str | None
"""A dimension: a number, a symbolic name (the same name means the same size), or None when unknown."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, numpy dtype name and shape of one model input or output."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    @property
    def is_static(self) -> bool:
        return all(isinstance(dim, int) for dim in self.shape)

    @property
    def np_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a concrete shape fits: same rank, equal where the dim is a number."""
        return len(shape) == len(self.shape) and all(
            not isinstance(want, int) or want == got for want, got in zip(self.shape, shape, strict=True)
        )

    def __str__(self) -> str:
        dims = "x".join("?" if dim is None else str(dim) for dim in self.shape)
        return f"{self.name}: {self.dtype}[{dims}]"


@dataclass(frozen=True, kw_only=True)
class ShapeRange:
    """Allowed shapes of one input in one bucket: 1 <= min <= opt <= max in every dimension."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.min) == len(self.opt) == len(self.max):
            raise SpecError(f"shape range: min {self.min}, opt {self.opt} and max {self.max} differ in rank")
        for axis, (low, opt, high) in enumerate(zip(self.min, self.opt, self.max, strict=True)):
            if not 1 <= low <= opt <= high:
                raise SpecError(
                    f"shape range: axis {axis} has min {low}, opt {opt}, max {high}; need 1 <= min <= opt <= max"
                )


@dataclass(frozen=True, order=True)
class Resolution:
    """Image height and width in pixels. ``str()`` gives ``HxW``, as the CLI takes it."""

    height_px: int
    width_px: int

    def __post_init__(self) -> None:
        if not (1 <= self.height_px <= 65536 and 1 <= self.width_px <= 65536):
            raise SpecError(f"resolution {self.height_px}x{self.width_px}: both sides must be 1 to 65536 pixels")

    @classmethod
    def parse(cls, text: str | int) -> Resolution:
        """Read ``640`` (square) or ``480x640`` (height x width)."""
        match = re.fullmatch(r"\s*(\d{1,5})(?:\s*[xX]\s*(\d{1,5}))?\s*", str(text))
        if match is None:
            raise SpecError(f"size {text!r}: expected one number (640) or height x width (480x640)")
        height = int(match.group(1))
        return cls(height, int(match.group(2)) if match.group(2) else height)

    @property
    def pixels(self) -> int:
        return self.height_px * self.width_px

    def __str__(self) -> str:
        return f"{self.height_px}x{self.width_px}"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a deployment must keep to; None means no limit.

    ``fps`` is per stream, ``energy_mj`` per frame, ``latency_p99_ms`` what 99 of 100 responses must keep,
    ``min_accuracy`` in points of 100.
    """

    watts: float | None = None
    fps: float | None = None
    latency_ms: float | None = None
    memory_mib: float | None = None
    latency_p99_ms: float | None = None
    energy_mj: float | None = None
    min_accuracy: float | None = None
    streams: int = 1

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise SpecError(f"streams {self.streams}: need at least 1")
        for name in ("watts", "fps", "latency_ms", "memory_mib", "latency_p99_ms", "energy_mj", "min_accuracy"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SpecError(f"{name} {value}: a limit is a finite number above 0")

    @property
    def total_fps(self) -> float | None:
        """Frames per second of all streams together."""
        return None if self.fps is None else self.fps * self.streams


def to_json(value: Any) -> Any:
    """Turn dataclasses, tuples, sets, paths, numpy scalars and Resolutions into plain JSON values."""
    if isinstance(value, Resolution):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return [to_json(item) for item in sorted(value, key=repr)]  # equal sets give equal files
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value


def from_json(cls: type[T], data: Any, *, where: str) -> T:
    """Build a (nested) dataclass from JSON; unknown and missing keys and wrong types are SpecErrors.

    ``where`` names the file or key for the message.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"{where}: expected an object with the fields of {cls.__name__}, got {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise SpecError(f"{where}: unknown key {unknown[0]!r}; known keys: {', '.join(sorted(fields))}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], where=f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SpecError(f"{where}: key {name!r} is missing")
    return cls(**values)


def _convert(hint: Any, value: Any, *, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        errors = []
        for option in args:
            if option is type(None):
                continue
            try:
                return _convert(option, value, where=where)
            except SpecError as error:
                errors.append(str(error))
        raise SpecError(errors[0] if errors else f"{where}: {value!r} is not allowed")
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise SpecError(f"{where}: expected a list, got {value!r}")
        if origin is tuple and args and args[-1] is not Ellipsis:
            if len(value) != len(args):
                raise SpecError(f"{where}: expected {len(args)} values, got {len(value)}")
            return tuple(_convert(arg, item, where=where) for arg, item in zip(args, value, strict=True))
        items = [_convert(args[0], item, where=f"{where}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise SpecError(f"{where}: expected an object, got {value!r}")
        key_type, item_type = args or (str, Any)
        return {
            (_int_key(key, where=where) if key_type is int else key): _convert(item_type, item, where=f"{where}.{key}")
            for key, item in value.items()
        }
    if origin is typing.Literal:
        if value not in args:
            raise SpecError(f"{where}: {value!r} is not one of {', '.join(map(str, args))}")
        return value
    if hint is Resolution:
        return Resolution.parse(value)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, where=where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and (not isinstance(value, hint) or (hint is not bool and isinstance(value, bool))):
        raise SpecError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value


def _int_key(key: Any, *, where: str) -> int:
    # JSON has only text keys. One spelling per number ("01" would hide "1"), and not what int() takes beyond: "1_0".
    if not re.fullmatch(r"0|-?[1-9][0-9]{0,17}", str(key)):
        raise SpecError(f"{where}: key {key!r} is not a whole number")
    return int(key)
