"""How far two arrays that should be equal are apart, added up over samples, and what counts as too far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgeds.errors import SpecError

Array = np.ndarray[Any, np.dtype[Any]]

SHOWN_POSITIONS = 5


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest allowed difference: ``absolute`` in units of the tensor, ``relative`` to its largest magnitude.

    What is None is not judged. For inner tensors, whose magnitudes differ widely, ``absolute`` is taken times the
    tensor's largest magnitude where that is above 1.
    """

    absolute: float | None = None
    relative: float | None = None

    def __post_init__(self) -> None:
        for name in ("absolute", "relative"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise SpecError(f"{name} tolerance {value!r}: must be a finite number of at least 0")

    def allows(self, difference: Difference) -> bool:
        """Whether an output is close enough; NaN or infinity on one side only never is."""
        if difference.non_finite_mismatch or difference.problem:
            return False
        if self.absolute is not None and difference.max_abs > self.absolute:
            return False
        return self.relative is None or difference.max_abs <= self.relative * difference.peak

    def allows_layer(self, difference: Difference) -> bool:
        """The same for an inner tensor."""
        scaled = None if self.absolute is None else self.absolute * max(1.0, difference.peak)
        return Tolerance(absolute=scaled, relative=self.relative).allows(difference)

    def __str__(self) -> str:
        parts = [f"{self.absolute:g}"] if self.absolute is not None else []
        parts += [f"{self.relative:g} of the largest magnitude"] if self.relative is not None else []
        return " and ".join(parts) or "any"


@dataclass(kw_only=True)
class Difference:
    """Running comparison of ``got`` with ``want``, in float64. Positions where both hold NaN, or the same infinity,
    are equal; where only one does they count as ``non_finite_mismatch`` and enter no other figure.
    """

    max_abs: float = 0.0
    peak: float = 0.0
    """Largest finite magnitude of ``want``."""
    samples: int = 0
    worst_sample: int | None = None
    nan_want: int = 0
    nan_got: int = 0
    non_finite_mismatch: int = 0
    positions: list[tuple[int, ...]] = field(default_factory=list)
    """The first places (sample, index...) where only one side is finite."""
    problem: str | None = None
    """Why the arrays could not be compared."""
    _elements: int = 0
    _sum_abs: float = 0.0
    _error: float = 0.0
    _want: float = 0.0
    _got: float = 0.0
    _product: float = 0.0

    def add(self, want: Array, got: Array) -> None:
        """Add one sample. Arrays of different shape or without numbers are noted as a problem."""
        index, self.samples = self.samples, self.samples + 1
        if want.shape != got.shape:
            self.problem = self.problem or f"shapes differ: {list(want.shape)} and {list(got.shape)}"
            return
        if want.dtype.kind == "O" or got.dtype.kind == "O":
            if not np.array_equal(want, got):
                self.problem = self.problem or "text differs"
            return
        a, b = np.asarray(want, np.float64), np.asarray(got, np.float64)
        with np.errstate(invalid="ignore"):
            agree = np.isfinite(a) & np.isfinite(b)
            odd = ~agree & ~((a == b) | (np.isnan(a) & np.isnan(b)))
        self.nan_want += int(np.isnan(a).sum())
        self.nan_got += int(np.isnan(b).sum())
        self._note(odd, index)
        a, b = np.where(agree, a, 0.0), np.where(agree, b, 0.0)
        gap = np.abs(a - b)
        worst = float(gap.max(initial=0.0))
        if worst > self.max_abs or self.worst_sample is None:
            self.worst_sample = index
        self.max_abs = max(self.max_abs, worst)
        self.peak = max(self.peak, float(np.abs(a).max(initial=0.0)))
        self._elements += int(agree.sum())
        with np.errstate(over="ignore", invalid="ignore"):  # float64 values beyond 1e154: the figures become None
            self._sum_abs += float(gap.sum())
            self._error += float(np.square(gap).sum())
            self._want += float(np.square(a).sum())
            self._got += float(np.square(b).sum())
            self._product += float((a * b).sum())

    def _note(self, odd: np.ndarray[Any, np.dtype[np.bool_]], sample: int) -> None:
        count = int(odd.sum())
        self.non_finite_mismatch += count
        if count:
            places = np.argwhere(odd)[: SHOWN_POSITIONS - len(self.positions)]
            self.positions += [(sample, *(int(axis) for axis in place)) for place in places]

    @property
    def mean_abs(self) -> float:
        return self._sum_abs / self._elements if self._elements else 0.0

    @property
    def relative(self) -> float | None:
        """``max_abs`` over the largest magnitude; None where that is zero and the difference is not."""
        if self.max_abs == 0.0:
            return 0.0
        return self.max_abs / self.peak if self.peak > 0 else None

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both as vectors, -1 to 1; None when only one is all zeros."""
        if self._want == 0.0 and self._got == 0.0:
            return 1.0
        if self._want == 0.0 or self._got == 0.0 or not math.isfinite(self._want + self._got + self._product):
            return None
        return max(-1.0, min(1.0, self._product / (math.sqrt(self._want) * math.sqrt(self._got))))

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal power / error power); None when there is no error, or no signal to relate it to."""
        if self._error == 0.0 or self._want == 0.0 or not math.isfinite(self._want + self._error):
            return None
        return 10.0 * math.log10(self._want / self._error)
