"""The choices that no other one beats in everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def pareto_front(items: Sequence[T], *, key: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Items, in their order, whose ``key`` (smaller is better in each place) no other item dominates.

    One item dominates another when it is nowhere worse and somewhere better; of equal ones the first stays.
    """
    kept: list[tuple[tuple[float, ...], T]] = []
    # In order of keys, nothing that comes later can dominate what is kept already.
    for values, item in sorted(((key(item), item) for item in items), key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, values, strict=True)) for other, _ in kept):
            kept.append((values, item))
    chosen = {id(item) for _, item in kept}
    return [item for item in items if id(item) in chosen]
