"""Where guesses for speculative decoding come from: the text itself, or a smaller model.

Checking is the sampler's (``Sampler.judge``), so whatever is guessed here, the tokens that come out are distributed as
without guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeds.engines.base import Array
from edgeds.errors import PoolExhausted
from edgeds.pipelines.llm.drafts import AdaptiveDraft, PromptLookup
from edgeds.pipelines.llm.jobs import Draft
from edgeds.pipelines.llm.runner import Chunk, RunsModel
from edgeds.pipelines.llm.sampling import Sampler
from edgeds.runtime.kv_pool import KvPool
from edgeds.runtime.kv_sequence import KvSequence


class LookupDrafter:
    """What followed the last words before: for summaries, quotes, code, JSON. Costs nothing when it has no guess."""

    def __init__(self, *, max_draft: int = 8) -> None:
        self._lookup = PromptLookup(max_draft=max_draft)
        self._length = AdaptiveDraft(max_draft=max_draft)

    def draft(self, tokens: Sequence[int]) -> Draft:
        """Certain guesses."""
        return Draft(tokens=tuple(self._lookup.draft(tokens, self._length.length())))

    def learn(self, drafted: int, accepted: int) -> None:
        """Adapt the length."""
        self._length.learn(drafted, accepted)

    def close(self) -> None:
        """Nothing is held."""


class ModelDrafter:
    """A smaller model of the same vocabulary with a KV cache of its own. One per request, on the scheduler's thread.

    ``sampler`` is the request's: guesses are drawn from the small model with the request's own settings, which makes
    most of them hold. When the small model's cache is full, nothing is guessed.
    """

    def __init__(self, runner: RunsModel, *, pool: KvPool, sampler: Sampler, max_draft: int = 4) -> None:
        self._runner, self._pool, self._sampler = runner, pool, sampler
        self._length = AdaptiveDraft(max_draft=max_draft, token_cost=0.3)
        self._kv: KvSequence | None = None
        self._random = np.random.default_rng(sampler.options.seed)

    def draft(self, tokens: Sequence[int]) -> Draft:
        """Guesses with the distributions they were drawn from; certain ones for a greedy request."""
        count = self._length.length()
        if count < 1:
            return Draft()
        try:
            return self._draft(list(tokens), count)
        except PoolExhausted:
            self.close()
            return Draft()

    def learn(self, drafted: int, accepted: int) -> None:
        """Adapt the length."""
        self._length.learn(drafted, accepted)

    def close(self) -> None:
        """Give the pages back."""
        if self._kv is not None:
            self._pool.close(self._kv)
            self._kv = None

    def _draft(self, tokens: list[int], count: int) -> Draft:
        kv = self._synchronize(tokens)
        guesses: list[int] = []
        spreads: list[Array] = []
        pending = tokens[kv.position :]
        for _ in range(count):
            spread = self._sampler.probabilities(self._step(kv, pending), guesses)
            if self._sampler.options.is_greedy:
                token = int(spread.argmax())
            else:
                token = int(self._random.choice(len(spread), p=spread / spread.sum()))
                spreads.append(spread)
            guesses.append(token)
            pending = [token]
        return Draft(tokens=tuple(guesses), probabilities=tuple(spreads) if spreads else None)

    def _synchronize(self, tokens: list[int]) -> KvSequence:
        """The small model's sequence, cut back to what it shares with the text; the last token stays to be run."""
        if self._kv is None:
            self._kv = self._pool.open(tokens)
            return self._kv
        known = self._kv.tokens[: self._kv.position]
        limit = min(len(known), len(tokens) - 1)
        same = next((index for index in range(limit) if known[index] != tokens[index]), limit)
        if len(self._kv.tokens) > self._kv.position:
            # Pending tokens of the prompt cannot be rolled back; they are the text's own.
            same = min(same, self._kv.position)
        if self._kv.position > same:
            self._pool.rollback(self._kv, self._kv.position - same)
        return self._kv

    def _step(self, kv: KvSequence, tokens: list[int]) -> Array:
        self._pool.reserve(kv, len(tokens))
        result = self._runner.run([Chunk(kv=kv, tokens=tokens, picks=[len(tokens) - 1])])
        result.keep([len(tokens)])
        self._pool.commit(kv, tokens)
        return result.logits(0)[0]
