"""Guesses for speculative decoding from the text so far, and how many to make."""

from __future__ import annotations

from collections.abc import Sequence

from edgeds.errors import SpecError


class PromptLookup:
    """Guesses that what followed the last few tokens before follows them again (prompt lookup decoding).

    The index of all sequences of ``min_ngram`` to ``max_ngram`` tokens grows with the text, so a guess costs a few
    dictionary look-ups whatever the length. One per request: every text passed continues the one before (one that is
    shorter or differs where that ended is indexed anew).
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1, max_draft: int = 8) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise SpecError(f"prompt lookup: min_ngram {min_ngram} and max_ngram {max_ngram}; need 1 <= min <= max")
        if max_draft < 1:
            raise SpecError(f"prompt lookup: max_draft {max_draft}; need at least 1")
        self._ngrams = range(min_ngram, max_ngram + 1)
        self._max_draft = max_draft
        self._tokens: list[int] = []
        # Per n-gram, where its latest occurrence ends, of those that something follows.
        self._ends: dict[tuple[int, ...], int] = {}

    def draft(self, tokens: Sequence[int], n: int) -> list[int]:
        """Up to ``n`` (and ``max_draft``) tokens that may follow ``tokens``; none when nothing alike came before.

        The longest sequence that occurred before decides, at its latest occurrence. A guess may run over the end of
        the text into itself, as loops do.
        """
        self._index(tokens)
        wanted = min(n, self._max_draft)
        for size in reversed(self._ngrams):
            if wanted < 1 or size > len(self._tokens):
                continue
            start = self._ends.get(tuple(self._tokens[-size:]))
            if start is not None:
                return self._copy(start, wanted)
        return []

    def _copy(self, start: int, count: int) -> list[int]:
        period = len(self._tokens) - start
        return [self._tokens[start + index % period] for index in range(count)]

    def _index(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        if len(tokens) < known or (known and tokens[known - 1] != self._tokens[-1]):
            self._tokens, self._ends, known = [], {}, 0
        self._tokens.extend(tokens[known:])
        # The sequence at the very end is left out: nothing follows it yet, and it would find itself.
        for end in range(max(1, known), len(self._tokens)):
            for size in self._ngrams:
                if size <= end:
                    self._ends[tuple(self._tokens[end - size : end])] = end


class AdaptiveDraft:
    """How many tokens to guess, from how many held.

    With a the running share of guesses that held, k guesses yield 1 + a + ... + a^k tokens for the cost of one run over
    k + 1 tokens; ``length`` is the k with the most tokens per cost, a run over k + 1 tokens costing 1 + k *
    ``token_cost`` of a run over one (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.8). When none is worth it,
    one guess is still tried in every ``retry`` steps, so that a text that turns predictable is noticed.
    """

    def __init__(self, *, max_draft: int = 8, token_cost: float = 0.1, memory: float = 0.9, retry: int = 16) -> None:
        if max_draft < 1 or retry < 1 or not 0 < memory < 1 or not token_cost >= 0:
            raise SpecError(
                f"adaptive draft: max_draft {max_draft}, token_cost {token_cost}, memory {memory}, retry {retry}; "
                "need at least 1, at least 0, between 0 and 1, and at least 1"
            )
        self._max_draft = max_draft
        self._token_cost = token_cost
        self._memory = memory
        self._retry = retry
        # Starts as if half of the guesses had held, with little weight, so that the first runs decide.
        self._held = 0.5
        self._tried = 1.0
        self._idle = 0

    @property
    def acceptance(self) -> float:
        """The running share of guesses that held, 0 to 1."""
        return self._held / self._tried

    def length(self) -> int:
        """Tokens to guess now; 0 for none. Call once per step."""
        best = max(range(self._max_draft + 1), key=self._tokens_per_cost)
        if best:
            self._idle = 0
            return best
        self._idle += 1
        if self._idle < self._retry:
            return 0
        self._idle = 0
        return 1

    def _tokens_per_cost(self, count: int) -> float:
        share = min(self.acceptance, 0.999)
        return (1 - share ** (count + 1)) / (1 - share) / (1 + count * self._token_cost)

    def learn(self, drafted: int, accepted: int) -> None:
        """Take note that ``accepted`` of ``drafted`` guesses held.

        Guesses after the first that failed were never judged, so they count neither way.
        """
        if not 0 <= accepted <= drafted:
            raise SpecError(f"adaptive draft: {accepted} of {drafted} guesses cannot have held")
        judged = min(drafted, accepted + 1)
        decay = self._memory**judged
        self._held = self._held * decay + accepted
        self._tried = self._tried * decay + judged
