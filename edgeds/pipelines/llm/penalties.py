"""What a request's own tokens do to the next choice: penalties, and heat against loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from edgeds.engines.base import Array
from edgeds.pipelines.llm.options import SamplingOptions

HEAT_WINDOW = 64
HEAT_NGRAM = 3


class Penalties:
    """Counts one request's tokens. Not for several threads at once.

    Costs grow with the number of different tokens of the request, not with the vocabulary.
    """

    def __init__(self, options: SamplingOptions, *, prompt_tokens: Sequence[int]) -> None:
        self._options = options
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.empty(64, np.float32)
        self._recent: list[int] = []
        self._counting = options.repetition_penalty != 1 or bool(options.presence_penalty or options.frequency_penalty)
        if options.repetition_penalty != 1:
            for token in prompt_tokens:
                self._add(token, 0)

    @property
    def are_on(self) -> bool:
        """Whether ``apply`` may change anything."""
        return self._counting

    def record(self, token: int) -> None:
        """Count one generated token."""
        if self._counting:
            self._add(token, 1)
        if self._options.dynamic_temperature:
            self._recent = [*self._recent[1 - HEAT_WINDOW :], token]

    def _add(self, token: int, count: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.resize(self._ids, 2 * slot)
                self._counts = np.resize(self._counts, 2 * slot)
            self._ids[slot] = token
            self._counts[slot] = 0
        self._counts[slot] += count

    def apply(self, scores: Array, *, extra_tokens: Sequence[int] = ()) -> None:
        """Change ``scores`` float32 [vocab] in place, as if ``extra_tokens`` had been generated as well."""
        if not self._counting:
            return
        ids, counts = self._with(extra_tokens)
        options = self._options
        picked = scores[ids]
        if options.repetition_penalty != 1:
            factor = np.float32(options.repetition_penalty)
            picked = np.where(picked > 0, picked / factor, picked * factor)
        picked = picked - np.float32(options.presence_penalty) * (counts > 0)
        picked = picked - np.float32(options.frequency_penalty) * counts
        scores[ids] = picked

    def _with(self, extra_tokens: Sequence[int]) -> tuple[Array, Array]:
        used = len(self._slots)
        ids, counts = self._ids[:used], self._counts[:used]
        if not extra_tokens:
            return ids, counts
        counts = counts.copy()
        new: Counter[int] = Counter()
        for token in extra_tokens:
            slot = self._slots.get(token)
            if slot is None:
                new[token] += 1
            else:
                counts[slot] += 1
        fresh = np.fromiter(new.keys(), np.int64, len(new))
        return np.concatenate([ids, fresh]), np.concatenate([counts, np.fromiter(new.values(), np.float32, len(new))])

    def temperature(self, extra_tokens: Sequence[int] = ()) -> float:
        """The temperature of the next token; see ``SamplingOptions.dynamic_temperature``."""
        options = self._options
        if not options.dynamic_temperature:
            return options.temperature
        recent = [*self._recent, *extra_tokens][-HEAT_WINDOW:]
        return options.temperature + options.dynamic_temperature * repetition(recent)


def repetition(tokens: Sequence[int]) -> float:
    """Share of the three-token sequences of ``tokens`` that occurred before among them, 0 to 1.

    The measure seq-rep-n of Welleck et al. 2019 (arXiv:1908.04319) with n = 3.
    """
    grams = list(zip(*(tokens[start:] for start in range(HEAT_NGRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
