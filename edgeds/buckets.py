"""A small set of resolutions for images of any size, so that batches form and no shape is ever new in serving.

Images are scaled by letterbox: aspect ratio kept, long side brought to ``long_side_px``, the rest padded. After that
scaling a size is described by its orientation and its short side alone, so covering many sizes is covering points
on two lines (landscape, portrait) that meet at the square. That is solved exactly by dynamic programming.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from edgeds.errors import SpecError
from edgeds.specs import Resolution

Size = Resolution | tuple[int, int]
Cost = Callable[[Resolution], float] | Mapping[Resolution, float]


def cover_resolutions(
    sizes: Iterable[Size],
    *,
    stride: int = 32,
    max_buckets: int = 4,
    long_side_px: int = 640,
    cost: Cost | None = None,
) -> tuple[Resolution, ...]:
    """Choose at most ``max_buckets`` resolutions that hold every size at full scale, at the least total cost.

    ``sizes`` are (height, width) in pixels, repeated as often as they occur. Each bucket is a multiple of
    ``stride`` with its long side at ``long_side_px`` (rounded up to the stride); no size is scaled down further to
    fit. ``cost`` gives the cost of one image in a bucket, as a function or as measured latencies per resolution
    (values between measured ones follow from the pixel count); the default is the area. Sizes whose scaled short
    sides lie within one stride share a bucket. The result is sorted and the same for any order of ``sizes``.

    Raises SpecError for no sizes, sizes that are not positive, and arguments out of range.
    """
    stride = _whole("stride", stride, low=1, high=4096)
    max_buckets = _whole("max_buckets", max_buckets, low=1, high=256)
    long_side = _round_up(_whole("long_side_px", long_side_px, low=1, high=65536 - stride), stride)
    counts = Counter(as_resolution(size) for size in sizes)
    if not counts:
        raise SpecError("sizes: no image sizes given, so there is nothing to cover; pass at least one")
    lines: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    for size, count in counts.items():
        portrait = size.height_px > size.width_px
        lines[portrait][_short_side(size, long_side)] += count
    price = _cost_function(cost)

    groups = [_merge_close(line, stride) for line in lines]
    prices = [lambda short: price(Resolution(short, long_side)), lambda short: price(Resolution(long_side, short))]
    plans: list[tuple[float, int, tuple[Resolution, ...]]] = []
    # The square holds sizes of both orientations: once it is there, either line may send its rest to it.
    for square in ((), (long_side,)):
        top = square[0] if square else None
        wide, tall = (
            _cover_line(group, price=unit, most=max_buckets, top=top)
            for group, unit in zip(groups, prices, strict=True)
        )
        for wide_cost, wide_sides in wide.values():
            for tall_cost, tall_sides in tall.values():
                chosen = {Resolution(short, long_side) for short in (*wide_sides, *square)}
                chosen |= {Resolution(long_side, short) for short in tall_sides}
                plans.append((wide_cost + tall_cost, len(chosen), tuple(sorted(chosen))))
    return min(plan for plan in plans if 1 <= plan[1] <= max_buckets)[2]


def pick_bucket(size: Size, buckets: Sequence[Resolution]) -> Resolution:
    """The bucket for an image: the one that keeps it largest; among those the least padding (smallest area).

    The scaled image is rounded to whole pixels, so half a pixel too many does not call for the next bucket.
    Raises SpecError without buckets.
    """
    if not buckets:
        raise SpecError("buckets: none given; pass at least one resolution")
    image = as_resolution(size)
    gain = max(_gain(image, bucket) for bucket in buckets)
    height, width = image.height_px * gain, image.width_px * gain
    fitting = [
        bucket
        for bucket in buckets
        if (height < bucket.height_px + 0.5 and width < bucket.width_px + 0.5) or _gain(image, bucket) == gain
    ]
    return min(fitting, key=lambda bucket: (bucket.pixels, bucket))


def padding_share(size: Size, bucket: Resolution) -> float:
    """Share of the bucket's pixels that are padding after letterboxing the size into it, in [0, 1)."""
    image = as_resolution(size)
    gain = _gain(image, bucket)
    content = min(image.height_px * gain, bucket.height_px) * min(image.width_px * gain, bucket.width_px)
    return min(max(0.0, 1.0 - content / bucket.pixels), math.nextafter(1.0, 0.0))


def as_resolution(size: Size) -> Resolution:
    """A Resolution, or a (height, width) pair of whole numbers, as a Resolution; SpecError for anything else."""
    if isinstance(size, Resolution):
        return size
    try:
        height, width = size
        return Resolution(operator.index(height), operator.index(width))
    except (TypeError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"size {size!r}: expected (height, width) as two whole numbers of pixels") from error


def _gain(image: Resolution, bucket: Resolution) -> float:
    return min(bucket.height_px / image.height_px, bucket.width_px / image.width_px)


def _short_side(size: Resolution, long_side: int) -> int:
    """The short side in whole pixels (half up, at least 1) once the long side is ``long_side``."""
    short, long = sorted((size.height_px, size.width_px))
    return max(1, (2 * short * long_side + long) // (2 * long))


def _merge_close(line: Counter[int], stride: int) -> list[tuple[int, int]]:
    """(bucket short side, image count), ascending. From the top down, everything within one stride is one group.

    Without this, images of nearly equal size on both sides of a multiple of the stride would get two buckets.
    """
    groups: list[tuple[int, int]] = []
    top = 0
    for short in sorted(line, reverse=True):
        if groups and top - short < stride:
            groups[-1] = (groups[-1][0], groups[-1][1] + line[short])
        else:
            top = short
            groups.append((_round_up(short, stride), line[short]))
    merged: Counter[int] = Counter()
    for short, count in groups:
        merged[short] += count
    return sorted(merged.items())


def _cover_line(
    groups: Sequence[tuple[int, int]], *, price: Callable[[int], float], most: int, top: int | None
) -> dict[int, tuple[float, tuple[int, ...]]]:
    """Cheapest cover of one orientation for each number of buckets: {count: (cost, short sides)}.

    Each group goes to the smallest chosen short side that holds it. ``top`` is a short side that is there anyway
    (the square), at no count. Ties prefer the smaller tuple, so that the result does not depend on order.
    """
    # state[k]: best cost and choice for the groups seen so far, the last of them being a chosen bucket.
    states: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]
    for end in range(1, len(groups) + 1):
        unit = price(groups[end - 1][0])
        state: dict[int, tuple[float, tuple[int, ...]]] = {}
        images = 0
        for start in range(end - 1, -1, -1):
            images += groups[start][1]
            for used, (cost, chosen) in states[start].items():
                if used < most:
                    option = (cost + unit * images, (*chosen, groups[end - 1][0]))
                    state[used + 1] = min(state.get(used + 1, option), option)
        states.append(state)
    if top is None:
        return states[-1]
    final: dict[int, tuple[float, tuple[int, ...]]] = {}
    images = 0
    unit = price(top)
    for start in range(len(groups), -1, -1):
        for used, (cost, chosen) in states[start].items():
            option = (cost + unit * images, chosen)
            final[used] = min(final.get(used, option), option)
        images += groups[start - 1][1] if start else 0
    return final


def _cost_function(cost: Cost | None) -> Callable[[Resolution], float]:
    if cost is None:
        return lambda resolution: float(resolution.pixels)
    function = _interpolate(cost) if isinstance(cost, Mapping) else cost

    def checked(resolution: Resolution) -> float:
        value = float(function(resolution))
        if not (math.isfinite(value) and value > 0):
            raise SpecError(f"cost of {resolution}: expected a finite number above 0, got {value!r}")
        return value

    return checked


def _interpolate(table: Mapping[Resolution, float]) -> Callable[[Resolution], float]:
    """Measured value where there is one, else linear in the pixel count, and in proportion outside the range."""
    if not table:
        raise SpecError("cost: the table is empty; measure at least one resolution or leave it out")
    points = sorted((resolution.pixels, float(value)) for resolution, value in table.items())

    def estimate(resolution: Resolution) -> float:
        if resolution in table:
            return float(table[resolution])
        pixels = resolution.pixels
        if pixels <= points[0][0] or pixels >= points[-1][0]:
            nearest = points[0] if pixels <= points[0][0] else points[-1]
            return nearest[1] * pixels / nearest[0]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if x0 <= pixels <= x1:
                return y0 if x0 == x1 else y0 + (y1 - y0) * (pixels - x0) / (x1 - x0)
        return points[-1][1]

    return estimate


def _round_up(value: int, stride: int) -> int:
    return -(-value // stride) * stride


def _whole(name: str, value: int, *, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SpecError(f"{name}: expected a whole number from {low} to {high}, got {value!r}")
    return value
