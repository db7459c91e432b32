"""Padded lengths: which ones to serve, and which rows run together, so that few computed tokens are padding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgeds.errors import InputError, SpecError

RUN_TOKENS = 48
"""What starting one more run costs, in tokens of computing (measured: MiniLM on a CPU, docs/bert.md)."""


@dataclass(frozen=True, kw_only=True)
class RowCost:
    """Time of one row by its padded length n: ``fixed_us + token_us n + square_us n^2`` (the last is attention)."""

    fixed_us: float = 0.0
    token_us: float = 1.0
    square_us: float = 0.0

    def of(self, length: int) -> float:
        return self.fixed_us + self.token_us * length + self.square_us * length * length


def fit_row_cost(measured_us: Mapping[int, float]) -> RowCost:
    """Least squares with non-negative terms over measured times by length; relative errors count alike.

    Needs two lengths; the quadratic term needs three. Raises SpecError for fewer and for times that are not positive.
    """
    if len(measured_us) < 2 or any(not (math.isfinite(us) and us > 0) for us in measured_us.values()):
        raise SpecError(f"row cost: expected positive times of at least two lengths, got {dict(measured_us)}")
    lengths = np.array(sorted(measured_us), np.float64)
    times = np.array([measured_us[int(length)] for length in lengths])
    columns = np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1) / times[:, None]
    best: tuple[float, np.ndarray] | None = None
    # Three terms only: every subset is solved, and the best one without a negative term taken.
    for used in ([0, 1, 2], [0, 1], [1, 2], [0, 2], [1], [0], [2]):
        if len(used) > len(lengths):
            continue
        found = np.zeros(3)
        found[used] = np.linalg.lstsq(columns[:, used], np.ones_like(times), rcond=None)[0]
        if (found >= 0).all():
            error = float(((columns @ found - 1) ** 2).sum())
            if best is None or error < best[0] - 1e-12:
                best = (error, found)
    assert best is not None  # a single term with positive columns is never negative
    fixed, token, square = map(float, best[1])
    return RowCost(fixed_us=fixed, token_us=token, square_us=square)


def default_lengths(max_length: int) -> tuple[int, ...]:
    """Two lengths per octave, multiples of 16, up to ``max_length``: at most a third of a row is padding."""
    found, length = [], 16
    while length < max_length:
        found += [size for size in (length, length + length // 2) if size < max_length and size % 16 == 0]
        length *= 2
    return (*found, max_length)


def plan_lengths(
    lengths: Iterable[int], *, max_length: int, max_buckets: int = 8, multiple: int = 8, cost: RowCost | None = None
) -> tuple[int, ...]:
    """The at most ``max_buckets`` padded lengths that make ``lengths`` (tokens of observed texts) cheapest to compute.

    Exact by dynamic programming over the observed lengths, rounded up to ``multiple``; the last one is always
    ``max_length``, so that every text fits. Longer texts count as cut. Raises SpecError for arguments out of range.
    """
    if max_buckets < 1 or multiple < 1 or max_length < 1:
        raise SpecError(f"max_buckets {max_buckets}, multiple {multiple}, max_length {max_length}: all must be >= 1")
    price = cost or RowCost()
    counts: Counter[int] = Counter()
    for length in lengths:
        if length < 1:
            raise SpecError(f"length {length}: a row has at least one token")
        counts[min(max_length, -(-length // multiple) * multiple)] += 1
    sizes = sorted({*counts, max_length})
    below = np.cumsum([0, *(counts[size] for size in sizes)], dtype=np.float64)
    # best[j]: cheapest cover of the first j sizes with the buckets allowed so far; a bucket covers sizes i..j-1.
    best = np.array([0.0, *(below[j] * price.of(sizes[j - 1]) for j in range(1, len(sizes) + 1))])
    choice = [[0] * (len(sizes) + 1)]
    for _ in range(min(max_buckets, len(sizes)) - 1):
        fewer, cuts = best.copy(), [0] * (len(sizes) + 1)
        for j in range(1, len(sizes) + 1):
            totals = fewer[:j] + (below[j] - below[:j]) * price.of(sizes[j - 1])
            cuts[j] = int(np.argmin(totals))
            best[j] = totals[cuts[j]]
        choice.append(cuts)
    chosen, end = [], len(sizes)
    for cuts in reversed(choice):
        if end == 0:
            break
        chosen.append(sizes[end - 1])
        end = cuts[end]
    return tuple(sorted(chosen))


def pick_length(length: int, lengths: Sequence[int]) -> int:
    """The smallest of ``lengths`` (ascending) that holds ``length`` tokens. Raises InputError when none does."""
    for size in lengths:
        if size >= length:
            return size
    raise InputError(f"{length} tokens are more than the longest length served, {lengths[-1]}")


def padding_share(lengths: Iterable[int], buckets: Sequence[int]) -> float:
    """Share of computed tokens that are padding when each row is padded to its own bucket."""
    pairs = [(length, pick_length(length, buckets)) for length in lengths]
    padded = sum(size for _, size in pairs)
    return 1 - sum(length for length, _ in pairs) / padded if padded else 0.0


def group_rows(
    lengths: Sequence[int], *, max_tokens: int, max_rows: int, run_tokens: int = RUN_TOKENS
) -> list[list[int]]:
    """Indices of the rows that run together, longest first.

    A group holds at most ``max_rows`` rows and, padded to its longest, ``max_tokens`` tokens (one row always goes). It
    also ends once its padding has cost as much as starting a run (``run_tokens``): by that rule padding and starts
    together are never above twice what the best split would cost.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    longest = waste = 0
    for index in order:
        length = lengths[index]
        full = not groups or len(groups[-1]) >= max_rows or (len(groups[-1]) + 1) * longest > max_tokens
        if full or waste + longest - length > run_tokens:
            groups.append([])
            longest, waste = length, 0
        groups[-1].append(index)
        waste += longest - length
    return groups
