"""Top-k, top-p and min-p over a large vocabulary without sorting it, and draws from what is left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeds.engines.base import Array

# Rows of the fold that bounds the k-th largest value from below; see ``largest``.
_FOLD = 32
_TOP_P_STEPS = (64, 1024, 16384)


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Tokens and weights, not normalised: likeliest first and above 0, or of the whole vocabulary in its order."""

    ids: Array
    weights: Array

    def spread(self, vocab_size: int) -> Array:
        """Float64 [vocab_size] probabilities; 0 for every other token."""
        out = np.zeros(vocab_size)
        out[self.ids] = self.weights
        out /= out.sum()
        return out


def largest(values: Array, count: int) -> Array:
    """Indices of the ``count`` largest of float [n], largest first; of equal values the lowest index first.

    Folding the vocabulary into rows gives n / 32 maxima, each another element; the count-th largest of these is at most
    the count-th largest of all, so whatever lies below it is out. Ten times faster than argpartition over 150k values.
    """
    size = len(values)
    count = min(count, size)
    if count * _FOLD < size:
        width = size // _FOLD
        maxima = values[: width * _FOLD].reshape(_FOLD, width).max(axis=0)
        bound = np.partition(maxima, width - count)[width - count]
        ids = np.flatnonzero(values >= bound)
    else:
        ids = np.arange(size)
    if len(ids) > 4 * count + 64:
        kept = np.partition(values[ids], len(ids) - count)[len(ids) - count]
        ids = ids[values[ids] >= kept]
    # flatnonzero is ascending and the sort stable: ties keep the order of the vocabulary.
    order = np.argsort(-values[ids], kind="stable")[:count]
    return ids[order]


def narrow(scores: Array, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Candidates:
    """Apply temperature, then top-k, top-p and min-p, each to what the one before left.

    Args:
        scores: float32 [vocab], finite or -inf, at least one finite.
        temperature: above 0.
        top_k: tokens kept, 0 or less for all.
        top_p: the fewest likeliest tokens whose probabilities reach this sum are kept; 1 keeps all.
        min_p: tokens below this share of the likeliest one's probability are dropped.
    """
    if 0 < top_k < len(scores):
        ids = largest(scores, top_k)
        weights = _weights(scores[ids], scores[ids[0]], temperature)
        if top_p < 1:
            ids, weights = _cut(ids, weights, top_p * weights.sum())
    elif top_p < 1:
        ids, weights = _nucleus(scores, temperature=temperature, top_p=top_p)
    elif min_p > 0:
        top = scores.max()
        ids = np.flatnonzero(scores >= top + temperature * np.log(min_p) - 1e-3)
        ids = ids[np.argsort(-scores[ids], kind="stable")]
        weights = _weights(scores[ids], top, temperature)
    else:
        return Candidates(ids=np.arange(len(scores)), weights=_fast_weights(scores, temperature))
    kept = (weights > 0) & (weights >= min_p * weights.max())
    return Candidates(ids=ids[kept], weights=weights[kept]) if not kept.all() else Candidates(ids=ids, weights=weights)


def _nucleus(scores: Array, *, temperature: float, top_p: float) -> tuple[Array, Array]:
    goal = top_p * float(_fast_weights(scores, temperature).sum(dtype=np.float64))
    top = scores.max()
    for count in (*_TOP_P_STEPS, len(scores)):
        ids = largest(scores, count)
        weights = _weights(scores[ids], top, temperature)
        if count >= len(scores) or weights.sum() >= goal:
            break
    return _cut(ids, weights, goal)


def _cut(ids: Array, weights: Array, goal: float) -> tuple[Array, Array]:
    """The fewest leading candidates whose weights reach ``goal``."""
    count = int(np.searchsorted(np.cumsum(weights), goal)) + 1
    return ids[:count], weights[:count]


def _weights(scores: Array, top: Array, temperature: float) -> Array:
    with np.errstate(over="ignore", under="ignore"):  # a small temperature drives all but the best to exp(-inf) = 0
        return np.exp((scores.astype(np.float64) - np.float64(top)) / temperature)


def _fast_weights(scores: Array, temperature: float) -> Array:
    """Float32 over the whole vocabulary: fifteen times faster than float64, rounded to about 1e-7 of each weight."""
    with np.errstate(over="ignore", under="ignore"):
        inverse = np.float32(min(1 / temperature, 1e30))
        return np.exp((scores - scores.max()) * inverse)


def draw(candidates: Candidates, rng: np.random.Generator) -> int:
    """One token, by its weight. A single candidate costs no random number."""
    if len(candidates.ids) == 1:
        return int(candidates.ids[0])
    return int(candidates.ids[draw_from(candidates.weights, rng)])


def draw_from(weights: Array, rng: np.random.Generator) -> int:
    """An index, with probability proportional to float [n] ``weights``, of which at least one is above 0."""
    size = len(weights)
    start = 0
    point = rng.random()
    if size > 8192:
        # Two steps, since a running sum over the whole vocabulary takes ten times as long as sums of blocks.
        width = int(size**0.5)
        whole = size - size % width
        blocks = weights[:whole].reshape(-1, width).sum(axis=1, dtype=np.float64)
        blocks = np.append(blocks, weights[whole:].sum(dtype=np.float64))
        block, point = _place(blocks, point)
        start = block * width
        weights = weights[start : start + width]
    return start + _place(weights, point)[0]


def _place(weights: Array, point: float) -> tuple[int, float]:
    """The index at share ``point`` of the running sum, and where inside that index's own share it falls, 0 to 1."""
    sums = np.cumsum(weights, dtype=np.float64)
    goal = point * sums[-1]
    # "right" passes over zero weights; rounding at the far end must not run past the last that has any.
    index = min(int(np.searchsorted(sums, goal, side="right")), int(np.flatnonzero(weights)[-1]))
    before = sums[index - 1] if index else 0.0
    return index, min(1.0, float((goal - before) / (sums[index] - before)))
