"""Is an engine right? Its outputs on the bundle's golden inputs against the references that travel with the bundle.

Golden arrays are ``input/<sample>/<name>``, ``float/<sample>/<output>`` and ``int8/<sample>/<output>``: computed on the
workstation by ONNX Runtime from the float and from the quantized model.

One output often mixes values of very different size: a detector puts box pixels beside scores from 0 to 1. Judged
together, wrong scores would hide behind the boxes. So the channels (axis 1) of an output form two groups, those that
reach a twentieth of its largest value and the rest, and each group is judged by itself, relative to its own size:

    rms_error = rms(got - reference) / rms(reference)       max_error = max|got - reference| / max|reference|
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeds.engines.base import Array, Engine, shape_text
from edgeds.errors import BundleError, SpecError

SMALL_GROUP = 1 / 20
FLOOR = 1e-3
"""A group is never judged relative to less than this share of the whole output: noise around zero is not an error."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Limits on both errors (relative, see above). ``of_reference`` times what quantizing itself costs is added.

    That cost is the distance of the quantized reference from the float one: an INT8 engine may be about as far from
    float as the INT8 model is in ONNX Runtime, and not much more.
    """

    max_error: float
    rms_error: float
    of_reference: float = 0.0


# TensorRT runs float32 convolutions in TF32 (10 bits of mantissa) on Ampere, so float32 is not exact either. float16
# has the same mantissa and also rounds between layers. INT8 rounds the same values as the reference but may fuse and
# accumulate in another order, which moves single values by one step of their scale.
TOLERANCES: dict[str, Tolerance] = {
    "float": Tolerance(max_error=0.02, rms_error=0.005),
    "float16": Tolerance(max_error=0.1, rms_error=0.02),
    "int8": Tolerance(max_error=0.1, rms_error=0.02, of_reference=1.5),
    "int4": Tolerance(max_error=0.1, rms_error=0.02, of_reference=1.5),
}
_QUANTIZED = ("int8", "int4")


@dataclass(frozen=True, kw_only=True)
class GoldenOutput:
    """The worst figures of one output over all samples. ``*_float`` are against the float reference.

    ``max_error`` and ``rms_error`` are against the precision's own reference (``reference``: float or int8).
    """

    name: str
    reference: str
    max_error: float
    rms_error: float
    max_error_float: float | None
    rms_error_float: float | None
    ok: bool


@dataclass(frozen=True, kw_only=True)
class GoldenResult:
    """What the check found. ``skipped`` samples have shapes the engine's profiles do not allow."""

    precision: str
    tolerance: Tolerance
    samples: int
    skipped: int
    outputs: tuple[GoldenOutput, ...]

    @property
    def ok(self) -> bool:
        return bool(self.outputs) and all(output.ok for output in self.outputs)

    @property
    def max_error(self) -> float | None:
        """The largest relative error of any output against the precision's own reference; None without samples."""
        return max((output.max_error for output in self.outputs), default=None)

    def failures(self) -> str:
        """The outputs beyond their limits, in words."""
        return "; ".join(
            f"output {output.name!r} is off by {output.max_error:.3g} at most and {output.rms_error:.3g} rms from the "
            f"{output.reference} reference"
            + (f" ({output.rms_error_float:.3g} rms from float)" if output.rms_error_float is not None else "")
            for output in self.outputs
            if not output.ok
        )


def check_golden(
    engine: Engine,
    golden: Mapping[str, Array],
    *,
    precision: str,
    tolerance: Tolerance | None = None,
    fits: Any = None,
) -> GoldenResult:
    """Run the golden inputs through ``engine`` and compare; never raises for outputs that are wrong.

    ``fits(feeds) -> bool`` says whether the engine takes these shapes (default: all). NaN and infinity where the
    reference is finite are an infinite error. Raises BundleError for golden arrays that do not fit each other or the
    engine, SpecError for a precision without tolerances, and whatever the engine raises.
    """
    if tolerance is None:
        if precision not in TOLERANCES:
            raise SpecError(f"golden check: precision {precision!r} is not one of {', '.join(TOLERANCES)}")
        tolerance = TOLERANCES[precision]
    worst: dict[str, list[GoldenOutput]] = {}
    ran = skipped = 0
    for sample, feeds in golden_feeds(golden):
        wanted = {spec.name: feeds[spec.name] for spec in engine.inputs if spec.name in feeds}
        if fits is not None and not fits(wanted):
            skipped += 1
            continue
        outputs = engine.infer(wanted)
        ran += 1
        for name, got in outputs.items():
            result = _judge(name, got, golden, sample=sample, precision=precision, tolerance=tolerance)
            if result is not None:
                worst.setdefault(name, []).append(result)
    if ran and not worst:
        raise BundleError("golden.npz: holds no reference for any output of this model; create the bundle again")
    merged = tuple(_worst_of(results) for results in worst.values())
    return GoldenResult(precision=precision, tolerance=tolerance, samples=ran, skipped=skipped, outputs=merged)


def golden_feeds(golden: Mapping[str, Array]) -> Iterator[tuple[str, dict[str, Array]]]:
    """(sample, inputs) in order. Raises BundleError when there is not one input."""
    samples: dict[str, dict[str, Array]] = {}
    for key, array in golden.items():
        kind, _, rest = key.partition("/")
        sample, _, name = rest.partition("/")
        if kind == "input" and name:
            samples.setdefault(sample, {})[name] = array
    if not samples:
        raise BundleError("golden.npz: holds no arrays named input/<sample>/<name>; create the bundle again")
    yield from sorted(samples.items(), key=lambda item: (len(item[0]), item[0]))


def _judge(
    name: str, got: Array, golden: Mapping[str, Array], *, sample: str, precision: str, tolerance: Tolerance
) -> GoldenOutput | None:
    floats = golden.get(f"float/{sample}/{name}")
    quantized = golden.get(f"{precision}/{sample}/{name}") if precision in _QUANTIZED else None
    own, label = (quantized, precision) if quantized is not None else (floats, "float")
    if own is None:
        return None
    if got.shape != own.shape:
        raise BundleError(
            f"golden sample {sample}: output {name!r} has shape {shape_text(got.shape)}, its reference "
            f"{shape_text(own.shape)}; the engine and the bundle do not belong together"
        )
    max_error, rms_error = compare(got, own)
    against_float = compare(got, floats) if floats is not None and floats.shape == got.shape else None
    extra_max = extra_rms = 0.0
    if label in _QUANTIZED and floats is not None and floats.shape == own.shape:
        extra_max, extra_rms = (tolerance.of_reference * cost for cost in compare(own, floats))
    limits = (tolerance.max_error + extra_max, tolerance.rms_error + extra_rms)
    ok = max_error <= limits[0] and rms_error <= limits[1]
    if against_float is not None and label in _QUANTIZED:
        # Judged by what counts in the end: no further from float than quantizing explains.
        ok = ok and against_float[1] <= limits[1]
    return GoldenOutput(
        name=name,
        reference=label,
        max_error=max_error,
        rms_error=rms_error,
        max_error_float=against_float[0] if against_float else None,
        rms_error_float=against_float[1] if against_float else None,
        ok=ok,
    )


def compare(got: Array, reference: Array) -> tuple[float, float]:
    """(max_error, rms_error) of the worst group of channels; infinity for values that are NaN or infinite by mistake.

    Integer and boolean outputs (labels, ids): both are the share of elements that differ.
    """
    if got.size == 0:
        return 0.0, 0.0
    if reference.dtype.kind in "biu":
        share = float(np.mean(got != reference))
        return share, share
    left, right = got.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(right)
    same = ~finite & ((left == right) | (np.isnan(left) & np.isnan(right)))
    if not np.all(np.isfinite(left) | same):
        return float("inf"), float("inf")
    if not finite.all():
        left, right = np.where(finite, left, 0.0), np.where(finite, right, 0.0)
    pairs = [_relative(left[:, group], right[:, group], right) for group in _channel_groups(right)] or [
        _relative(left, right, right)
    ]
    return max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)


def _channel_groups(reference: Array) -> list[Array]:
    """Masks over axis 1: channels that reach a share of the largest value, and the rest. Empty below rank 3."""
    if reference.ndim < 3 or reference.shape[1] < 2:
        return []
    axes = tuple(axis for axis in range(reference.ndim) if axis != 1)
    peaks = np.abs(reference).max(axis=axes)
    large = peaks >= SMALL_GROUP * peaks.max()
    return [group for group in (large, ~large) if group.any()]


def _relative(got: Array, reference: Array, whole: Array) -> tuple[float, float]:
    error = np.abs(got - reference)
    peak = max(float(np.abs(reference).max()), FLOOR * float(np.abs(whole).max()))
    rms = max(_rms(reference), FLOOR * _rms(whole))
    max_error, rms_error = float(error.max()), _rms(error)
    return _share(max_error, peak), _share(rms_error, rms)


def _share(error: float, size: float) -> float:
    if error == 0.0:
        return 0.0
    return error / size if size > 0 else float("inf")


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _worst_of(results: Sequence[GoldenOutput]) -> GoldenOutput:
    first = results[0]

    def most(values: Sequence[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        return max(numbers) if numbers else None

    return GoldenOutput(
        name=first.name,
        reference=first.reference,
        max_error=max(result.max_error for result in results),
        rms_error=max(result.rms_error for result in results),
        max_error_float=most([result.max_error_float for result in results]),
        rms_error_float=most([result.rms_error_float for result in results]),
        ok=all(result.ok for result in results),
    )
