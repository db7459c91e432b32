"""Which cached tokens to forget when a sequence may only keep so many: those that little attention went to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeds.errors import InputError, SpecError
from edgeds.runtime.kv_pool import KvPool
from edgeds.runtime.kv_sequence import KvSequence


@dataclass(frozen=True, kw_only=True)
class EvictionPolicy:
    """Keep at most ``budget`` cached tokens: the first ``sinks``, the last ``recent`` and the best scored between them.

    ``slack``: once over budget, this many tokens more are forgotten, so that the pages are not moved at every step.
    Sinks after Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023); accumulated scores after
    Zhang et al., "H2O: Heavy-Hitter Oracle" (2023).
    """

    budget: int
    sinks: int = 4
    recent: int = 64
    slack: int = 16

    def __post_init__(self) -> None:
        for name in ("budget", "sinks", "recent", "slack"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise SpecError(f"KV eviction: {name} must be a whole number from 0, got {value!r}")
        if self.budget < max(1, self.sinks + self.recent + self.slack):
            raise SpecError(
                f"KV eviction: a budget of {self.budget} tokens cannot hold {self.sinks} sinks, {self.recent} recent "
                f"tokens and a slack of {self.slack}"
            )


class TokenScores:
    """The attention that every cached token of one sequence received so far. Owned by the thread that steps it.

    ``decay``: what earlier scores are multiplied by at every addition, above 0 up to 1; 1 only accumulates.
    """

    def __init__(self, *, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise SpecError(f"KV eviction: decay must be above 0 up to 1, got {decay!r}")
        self.decay = decay
        self._values = np.zeros(0)

    def add(self, mass: np.ndarray, *, length: int) -> None:
        """``mass``: float [blocks, page], one row of the graph's ``attention_mass``, for the ``length`` tokens it saw.

        ``length`` is the sequence's before the step is committed. Raises SpecError for too few places, InputError for
        NaN, infinities and negative weights.
        """
        flat = mass.reshape(-1)[:length].astype(np.float64)
        if len(flat) < length:
            raise SpecError(f"attention_mass has {len(flat)} places for {length} cached tokens")
        if length and not (np.isfinite(flat).all() and flat.min() >= 0):
            raise InputError(
                "attention_mass holds NaN, infinity or a negative weight: the model overflows on this input"
            )
        self._values = self.values(length) * self.decay + flat

    def values(self, length: int) -> np.ndarray:
        """float64 [length]; tokens that no step has seen yet have 0, tokens rolled back are forgotten."""
        known = self._values[:length]
        return np.concatenate([known, np.zeros(length - len(known))])

    def keep(self, indices: np.ndarray, *, length: int) -> None:
        """Follow an eviction from ``length`` tokens down to ``indices``."""
        self._values = self.values(length)[indices]

    def copy(self) -> TokenScores:
        """Scores of a forked sequence."""
        twin = TokenScores(decay=self.decay)
        twin._values = self._values.copy()
        return twin


def choose_kept(scores: np.ndarray, policy: EvictionPolicy) -> np.ndarray:
    """Rising int64 indices of the tokens to keep of ``scores`` [tokens]: all of them up to the budget.

    Among equal scores the later token is kept.
    """
    length = len(scores)
    if length <= policy.budget:
        return np.arange(length)
    middle = np.arange(policy.sinks, length - policy.recent)
    count = policy.budget - policy.slack - policy.sinks - policy.recent
    order = np.lexsort((-middle, -scores[middle]))
    chosen = np.sort(middle[order[:count]])
    return np.concatenate([np.arange(policy.sinks), chosen, np.arange(length - policy.recent, length)])


def evict_tokens(pool: KvPool, sequence: KvSequence, *, scores: TokenScores, policy: EvictionPolicy) -> int:
    """Bring a sequence within its budget after a commit and return how many tokens it forgot (mostly 0).

    Raises PoolExhausted where shared pages have to be replaced and none is left; nothing has changed then.
    """
    length = sequence.length
    if length <= policy.budget:
        return 0
    kept = choose_kept(scores.values(length), policy)
    gone = pool.compact(sequence, kept)
    scores.keep(kept, length=length)
    return gone
