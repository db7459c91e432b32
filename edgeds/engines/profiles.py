"""Optimization profiles: which shapes an engine accepts, one profile per resolution or length bucket.

TensorRT tunes each profile at its ``opt`` shape and accepts everything from ``min`` to ``max``. It reports a wrong
profile late, only in its log, or not at all, so everything that can be known from the inputs is checked here first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgeds.errors import SpecError
from edgeds.specs import Resolution, ShapeRange, TensorSpec

Profile = Mapping[str, ShapeRange]

MAX_PROFILES = 64
MAX_SIZE = 2**31 - 1
"""TensorRT counts dimensions in 64 bits but volumes of one axis beyond this have no kernel."""


@dataclass(frozen=True, kw_only=True)
class DimRange:
    """Sizes of one dynamic dimension: 1 <= min <= opt <= max."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        values = (self.min, self.opt, self.max)
        if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
            raise SpecError(f"dimension range {values}: expected whole numbers")
        if not 1 <= self.min <= self.opt <= self.max <= MAX_SIZE:
            raise SpecError(
                f"dimension range min {self.min}, opt {self.opt}, max {self.max}: need 1 <= min <= opt <= max <= 2^31-1"
            )

    @classmethod
    def fixed(cls, size: int) -> DimRange:
        return cls(min=size, opt=size, max=size)


def choose_range(low: int | None, high: int | None, *, name: str, used: Iterable[int] = ()) -> DimRange:
    """A range for one dimension whose ``opt`` is a size that will really be used.

    ``used`` are sizes that occur, repeated as often as they do: ``opt`` is the most frequent one inside the range, of
    equals the largest. Without any it is ``high``, the size batches and padded lengths are filled up to. A low end
    of 0 or None becomes 1, since a profile with a zero size computes nothing. ``name`` is for the message. Raises
    SpecError for an unbounded or negative range and for low > high.
    """
    if high is None:
        raise SpecError(
            f"dimension {name!r} has no upper bound; an engine is built for a largest size, so give one, for example "
            f"{{{name!r}: DimRange(min=1, opt=8, max=16)}}"
        )
    if (low is not None and low < 0) or high < 1:
        raise SpecError(f"dimension {name!r}: sizes {low} to {high} are not all positive")
    low = max(low or 0, 1)
    if low > high:
        raise SpecError(f"dimension {name!r}: the smallest size {low} is above the largest {high}")
    counts = Counter(size for size in used if low <= size <= high)
    opt = max(counts, key=lambda size: (counts[size], size)) if counts else high
    return DimRange(min=low, opt=opt, max=high)


def plan_profiles(
    inputs: Sequence[TensorSpec],
    buckets: Sequence[Resolution] = (),
    *,
    max_batch: int = 1,
    opt_batch: int | None = None,
    dims: Mapping[str, DimRange | Sequence[DimRange]] | None = None,
) -> tuple[Profile, ...]:
    """One profile per bucket, for every input with a dynamic dimension; none for a model without any.

    Batch (a dynamic axis 0) runs from 1 to ``max_batch``, tuned for ``opt_batch`` (default: ``max_batch``, as the
    batcher fills batches up). Height and width of an image input (rank 4, NCHW or NHWC) are those of each bucket.
    Every other dynamic dimension needs an entry in ``dims``, keyed by its name in the model or by ``input[axis]``
    where it has none; several ranges under one key are length buckets and give one profile each.

    Raises SpecError naming the input and dimension for one without a bound, for buckets or batches that do not fit a
    fixed dimension, for buckets without an image input, and for keys that match nothing.
    """
    _check_batches(max_batch, opt_batch)
    if all(spec.is_static for spec in inputs):
        _check_static(inputs, buckets, max_batch)
        return ()
    given = dict(dims or {})
    groups = {key: (value,) if isinstance(value, DimRange) else tuple(value) for key, value in given.items()}
    for key, ranges in groups.items():
        if not ranges:
            raise SpecError(f"dims[{key!r}] is empty; give at least one range")
    unmatched = set(groups) - {key for spec in inputs for key in _keys_of(spec)}
    if unmatched:
        raise SpecError(
            f"dims: {sorted(unmatched)[0]!r} is no dynamic dimension of the inputs {', '.join(map(str, inputs))}"
        )
    count = max(len(buckets), 1)
    for ranges in groups.values():
        count *= len(ranges)
    if count > MAX_PROFILES:
        raise SpecError(f"{count} profiles asked for, more than the {MAX_PROFILES} allowed; merge buckets")
    batch = DimRange(min=1, opt=opt_batch or max_batch, max=max_batch)
    profiles: list[Profile] = []
    for bucket in buckets or (None,):
        for choice in itertools.product(*groups.values()):
            named = dict(zip(groups, choice, strict=True))
            profile = _one_profile(inputs, bucket, batch=batch, named=named)
            if profile not in profiles:
                profiles.append(profile)
    return tuple(profiles)


def check_profiles(profiles: Sequence[Profile], inputs: Sequence[TensorSpec], *, values: Iterable[str] = ()) -> None:
    """Raise SpecError when profiles do not fit the inputs, as TensorRT would only tell in its log.

    Checked per profile: every dynamic input has a range, no unknown input, rank, fixed dimensions, and that dimensions
    of the same name have the same size in all inputs. ``values`` names inputs whose entry gives values (TensorRT's
    shape tensors), not shapes.
    """
    specs = {spec.name: spec for spec in inputs}
    by_value = set(values)
    dynamic = [spec for spec in inputs if not spec.is_static or spec.name in by_value]
    if dynamic and not profiles:
        raise SpecError(
            f"input {dynamic[0]} has dynamic dimensions, so the build needs at least one profile; plan_profiles makes "
            "them from buckets and a largest batch"
        )
    for index, profile in enumerate(profiles):
        where = f"profile {index}"
        for name in profile:
            if name not in specs:
                raise SpecError(f"{where}: input {name!r} is unknown; the model's inputs are {', '.join(specs)}")
        for spec in dynamic:
            if spec.name not in profile:
                raise SpecError(f"{where}: input {spec} has dynamic dimensions but no range")
        seen: dict[str, tuple[tuple[int, int, int], str]] = {}
        for name, shapes in profile.items():
            if name not in by_value:
                _check_input(specs[name], shapes, where=where, seen=seen)


def _check_input(
    spec: TensorSpec, shapes: ShapeRange, *, where: str, seen: dict[str, tuple[tuple[int, int, int], str]]
) -> None:
    if len(shapes.min) != len(spec.shape):
        raise SpecError(f"{where}: input {spec} has {len(spec.shape)} dimensions, its range has {len(shapes.min)}")
    for axis, dim in enumerate(spec.shape):
        sizes = (shapes.min[axis], shapes.opt[axis], shapes.max[axis])
        if isinstance(dim, int) and sizes != (dim, dim, dim):
            raise SpecError(f"{where}: input {spec}: axis {axis} is fixed at {dim}, the range says {sizes}")
        if isinstance(dim, str) and dim:
            first, owner = seen.setdefault(dim, (sizes, spec.name))
            if first != sizes:
                raise SpecError(
                    f"{where}: dimension {dim!r} is {sizes} in input {spec.name!r} but {first} in {owner!r}; "
                    "dimensions of one name have one size"
                )


def _one_profile(
    inputs: Sequence[TensorSpec], bucket: Resolution | None, *, batch: DimRange, named: Mapping[str, DimRange]
) -> Profile:
    known = dict(named)
    if bucket is not None:
        known = {**_bucket_dims(inputs, bucket), **known}
    first = next((spec.shape[0] for spec in inputs if spec.shape and not isinstance(spec.shape[0], int)), None)
    if isinstance(first, str):
        known.setdefault(first, batch)
    profile: dict[str, ShapeRange] = {}
    for spec in inputs:
        if spec.is_static:
            continue
        ranges = [_range_of(spec, axis, known=known, batch=batch) for axis in range(len(spec.shape))]
        profile[spec.name] = ShapeRange(
            min=tuple(item.min for item in ranges),
            opt=tuple(item.opt for item in ranges),
            max=tuple(item.max for item in ranges),
        )
    return profile


def _range_of(spec: TensorSpec, axis: int, *, known: Mapping[str, DimRange], batch: DimRange) -> DimRange:
    dim = spec.shape[axis]
    if isinstance(dim, int):
        return DimRange.fixed(dim)
    for key in (dim or "", _key(spec, axis)):
        if key in known:
            return known[key]
    if axis == 0:
        return batch
    return choose_range(1, None, name=dim or _key(spec, axis))


def _bucket_dims(inputs: Sequence[TensorSpec], bucket: Resolution) -> dict[str, DimRange]:
    """Ranges of the height and width of every image input, by dimension name or ``input[axis]``."""
    found: dict[str, DimRange] = {}
    images = [(spec, axes) for spec in inputs if (axes := _image_axes(spec)) is not None]
    if not images:
        raise SpecError(
            "buckets were given, but no input looks like an image (rank 4, NCHW or NHWC): "
            + ", ".join(map(str, inputs))
        )
    for spec, axes in images:
        for axis, size in zip(axes, (bucket.height_px, bucket.width_px), strict=True):
            dim = spec.shape[axis]
            if isinstance(dim, int):
                if dim != size:
                    raise SpecError(
                        f"bucket {bucket} does not fit input {spec}: axis {axis} is fixed at {dim}; export the model "
                        "with dynamic height and width or use that size only"
                    )
                continue
            key = dim or _key(spec, axis)
            if found.setdefault(key, DimRange.fixed(size)) != DimRange.fixed(size):
                raise SpecError(
                    f"bucket {bucket} does not fit input {spec}: height and width are the same dimension {key!r}"
                )
    return found


def _image_axes(spec: TensorSpec) -> tuple[int, int] | None:
    """Axes of height and width: NHWC when only the last dimension is a channel count, else NCHW."""
    if len(spec.shape) != 4:
        return None
    channels_first, channels_last = spec.shape[1], spec.shape[3]
    last = isinstance(channels_last, int) and channels_last <= 4
    first = isinstance(channels_first, int) and channels_first <= 4
    return (1, 2) if last and not first else (2, 3)


def _check_static(inputs: Sequence[TensorSpec], buckets: Sequence[Resolution], max_batch: int) -> None:
    for bucket in buckets:
        _bucket_dims(inputs, bucket)
    batches = {spec.shape[0] for spec in inputs if spec.shape}
    if batches and max_batch > max(size for size in batches if isinstance(size, int)):
        raise SpecError(
            f"max_batch {max_batch} does not fit input {inputs[0]}, whose batch is fixed; export the model with a "
            "dynamic batch or use that batch only"
        )


def _check_batches(max_batch: int, opt_batch: int | None) -> None:
    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or not 1 <= max_batch <= 65536:
        raise SpecError(f"max_batch: expected a whole number from 1 to 65536, got {max_batch!r}")
    if opt_batch is not None and (isinstance(opt_batch, bool) or not 1 <= opt_batch <= max_batch):
        raise SpecError(f"opt_batch: expected a whole number from 1 to max_batch ({max_batch}), got {opt_batch!r}")


def _keys_of(spec: TensorSpec) -> list[str]:
    return [
        key
        for axis, dim in enumerate(spec.shape)
        if not isinstance(dim, int)
        for key in (dim or "", _key(spec, axis))
        if key
    ]


def _key(spec: TensorSpec, axis: int) -> str:
    return f"{spec.name}[{axis}]"
