"""Axes: which numbers to write at them, how to write numbers, and where a value lies in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SMALL = 1e-100
"""Below this, and above its inverse, nothing is measured; the arithmetic of scales would leave the floats."""
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Values from ``low`` to ``high`` onto pixels ``start`` to ``end``, linear or by decades."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; what lies outside is put onto the edge."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Values to label: decades (and 2, 5 between few of them), or round steps."""
        return _decades(self.low, self.high) if self.is_log else round_ticks(self.low, self.high)


def linear_scale(values: Sequence[float], *, start: float, end: float, from_zero: bool = True) -> Scale:
    """A scale over the values with round ends; one value alone still gets room around it."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if from_zero:
        low = min(low, 0.0)
    if high - low <= max(1e-12 * max(abs(low), abs(high)), _SMALL):
        room = abs(high) * 0.1 or 1.0
        low, high = (low if from_zero and low == 0 else low - room), high + room
    ticks = round_ticks(low, high)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    return Scale(
        low=math.floor(low / step + 1e-9) * step, high=math.ceil(high / step - 1e-9) * step, start=start, end=end
    )


def log_scale(values: Sequence[float], *, start: float, end: float) -> Scale:
    """A scale by decades over the values above 0, with some room at both ends."""
    known = [min(max(value, _SMALL), 1 / _SMALL) for value in values if value > 0]
    low, high = min(known, default=1.0), max(known, default=10.0)
    room = max((high / low) ** 0.06, 1.25)
    return Scale(low=low / room, high=high * room, start=start, end=end, is_log=True)


def round_ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """About ``count`` multiples of 1, 2 or 5 times a power of ten between two values."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 7))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    exponents = range(first, last + 1, every)
    return [value for e in exponents for factor in factors if low <= (value := factor * 10.0**e) <= high]


def number(value: float) -> str:
    """Three to four digits, from ten thousand up with a letter: 0.0123, 12.3, 123, 4567, 12.3k, 6.7M."""
    for size, letter in _UNITS:
        if abs(value) >= size * 9.995 or (letter != "k" and abs(value) >= size):
            text = f"{value / size:.3g}"
            return f"{value:.2e}" if "e" in text else text + letter
    return f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"
