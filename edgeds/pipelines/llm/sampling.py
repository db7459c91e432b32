"""Choosing the next token: exact distributions, reproducible draws, speculative acceptance.

Every choice goes through ``Sampler.candidates``, so that what ``probabilities`` reports is what ``choose`` draws from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgeds.engines.base import Array
from edgeds.errors import InputError
from edgeds.pipelines.llm.nucleus import Candidates, draw, draw_from, largest, narrow
from edgeds.pipelines.llm.options import SamplingOptions
from edgeds.pipelines.llm.penalties import Penalties


class Constraint(Protocol):
    """Which tokens a grammar allows next (``guided.py``)."""

    def allowed(self, extra_tokens: Sequence[int] = ()) -> Array:
        """Bool [vocab], as if ``extra_tokens`` had been taken as well."""
        ...

    def advance(self, token: int) -> None:
        """Take a token."""
        ...


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen token. Log probabilities (natural, of the model itself) are None and empty unless asked for.

    ``top_logprobs`` holds (token, log probability), likeliest first.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one request. Not for several threads at once.

    Call ``record`` with every token that was added to the output, in order; nothing else changes the state except
    the draws themselves.

    Args:
        options: what the request asked for.
        prompt_tokens: the request's prompt, for ``repetition_penalty``.
        vocab_size: tokens the tokenizer knows. Logits may be longer (padded weights); the rest is never chosen.
        eos_tokens: the model's end tokens.
        constraint: a grammar, for guided decoding.
    """

    def __init__(
        self,
        options: SamplingOptions,
        *,
        prompt_tokens: Sequence[int],
        vocab_size: int,
        eos_tokens: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        for name, tokens in (("prompt", prompt_tokens), ("stop_tokens", options.stop_tokens), ("eos", eos_tokens)):
            wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise InputError(f"{name}: token {wrong} is outside the vocabulary of {vocab_size} tokens")
        self.options = options
        self.rng = np.random.default_rng(options.seed)
        self._vocab_size = vocab_size
        self._penalties = Penalties(options, prompt_tokens=prompt_tokens)
        self._constraint = constraint
        model_ends = () if options.ignore_eos else tuple(eos_tokens)
        self._ends = frozenset((*model_ends, *options.stop_tokens))
        # With ignore_eos too: before min_tokens the model is to say something else than its end.
        self._early_ends = np.array(sorted({*eos_tokens, *options.stop_tokens}), np.int64)
        self._recorded = 0

    def choose(self, logits: Array, *, extra_tokens: Sequence[int] = ()) -> Choice:
        """Draw the next token from ``logits`` float [vocab]. Raises InputError when nothing can be drawn from them."""
        candidates = self.candidates(logits, extra_tokens=extra_tokens)
        return self._choice(draw(candidates, self.rng), logits)

    def probabilities(self, logits: Array, extra_tokens: Sequence[int] = ()) -> Array:
        """Float64 [vocab]: the distribution the next token is drawn from, as if ``extra_tokens`` had been recorded."""
        return self.candidates(logits, extra_tokens=extra_tokens).spread(self._vocab_size)

    def record(self, token: int) -> None:
        """Take note of a token that was added to the output."""
        self._recorded += 1
        self._penalties.record(token)
        if self._constraint is not None:
            self._constraint.advance(token)

    def judge(
        self, tokens: Sequence[int], logits: Array, *, draft_probabilities: Sequence[Array] | None = None
    ) -> tuple[list[Choice], int]:
        """Tokens to add after one run that checked guesses, and how many of the guesses held.

        The tokens are distributed exactly as without guesses; see ``speculative_accept``. The list is one longer than
        the number of guesses that held, or as long when the last one ends the text. Record them one by one.

        Args:
            tokens: the guesses, possibly none.
            logits: float [1 + guesses, vocab]; row i is what follows the first i guesses.
            draft_probabilities: per guess, the float [vocab] it was drawn from; None when guesses are certain.
        """
        end = next((index for index, token in enumerate(tokens) if token in self._ends), len(tokens) - 1)
        checked = list(tokens[: end + 1])
        is_end = bool(checked) and checked[-1] in self._ends

        def targets() -> Iterator[Array]:
            for index in range(len(checked)):
                yield self.probabilities(logits[index], checked[:index])
            # Nothing follows an end; the draw from this one-token distribution is thrown away below.
            yield np.ones(1) if is_end else self.probabilities(logits[len(checked)], checked)

        if self.options.is_greedy:
            held, last = self._follow(checked, logits, is_end=is_end)
        else:
            held, last = speculative_accept(checked, targets(), draft_probs=draft_probabilities, rng=self.rng)
        out = [*checked[:held], last]
        if is_end and held == len(checked):
            out.pop()
        return [self._choice(token, logits[index]) for index, token in enumerate(out)], held

    def _follow(self, tokens: Sequence[int], logits: Array, *, is_end: bool) -> tuple[int, int]:
        """Greedy decoding's share of ``judge``: how many guesses are the likeliest token, and the next such token."""
        for index, token in enumerate(tokens):
            best = int(self.candidates(logits[index], extra_tokens=tokens[:index]).ids[0])
            if best != token:
                return index, best
        if is_end:
            return len(tokens), tokens[-1]
        return len(tokens), int(self.candidates(logits[len(tokens)], extra_tokens=tokens).ids[0])

    def candidates(self, logits: Array, *, extra_tokens: Sequence[int] = ()) -> Candidates:
        """Tokens that may come next with their weights, after penalties, bans, the grammar and all filters."""
        scores = self._scores(logits, extra_tokens)
        temperature = self._penalties.temperature(extra_tokens)
        if temperature == 0:
            return Candidates(ids=np.array([scores.argmax()]), weights=np.ones(1))
        options = self.options
        return narrow(scores, temperature=temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)

    def _scores(self, logits: Array, extra_tokens: Sequence[int]) -> Array:
        raw = _check_logits(logits, self._vocab_size)
        early = self._recorded + len(extra_tokens) < self.options.min_tokens and len(self._early_ends) > 0
        if not (early or self._penalties.are_on or self._constraint is not None):
            return raw
        scores = raw.copy()
        self._penalties.apply(scores, extra_tokens=extra_tokens)
        if self._constraint is not None:
            scores[~self._constraint.allowed(extra_tokens)] = -np.inf
        if early:
            kept = scores[self._early_ends]
            scores[self._early_ends] = -np.inf
            if scores.max() == -np.inf:
                scores[self._early_ends] = kept  # the grammar allows nothing but the end
        if scores.max() == -np.inf:
            raise InputError(
                "no token may come next: the grammar allows only tokens to which the model gives no chance"
            )
        return scores

    def _choice(self, token: int, logits: Array) -> Choice:
        wanted = self.options.logprobs
        if wanted is None:
            return Choice(token=token)
        raw = _check_logits(logits, self._vocab_size)
        top = float(raw.max())
        log_total = top + float(np.log(np.exp(raw - np.float32(top)).sum(dtype=np.float64)))
        best = largest(raw, wanted) if wanted else ()
        pairs = tuple((int(index), float(raw[index]) - log_total) for index in best)
        return Choice(token=token, logprob=float(raw[token]) - log_total, top_logprobs=pairs)


def _check_logits(logits: Array, vocab_size: int) -> Array:
    """Float32 [vocab_size] view or copy; InputError when something is not finite (-inf rules a token out)."""
    if logits.ndim != 1 or logits.shape[0] < vocab_size:
        raise InputError(f"logits: expected [{vocab_size}] or longer, got shape {list(logits.shape)}")
    raw = logits[:vocab_size].astype(np.float32, copy=False)
    # A maximum is NaN as soon as one value is: one pass instead of two.
    top = raw.max()
    if not np.isfinite(top):
        what = "NaN" if np.isnan(top) else "infinite" if top > 0 else "minus infinity everywhere"
        raise InputError(
            f"logits: are {what}; the model's weights or its precision are broken (edgeds compare finds where)"
        )
    return raw


def speculative_accept(
    draft_tokens: Sequence[int],
    target_probs: Iterator[Array] | Sequence[Array],
    *,
    rng: np.random.Generator,
    draft_probs: Sequence[Array] | None = None,
) -> tuple[int, int]:
    """How many guessed tokens hold, and the token after those: rejection sampling that keeps the target's distribution.

    Leviathan et al. 2023 (arXiv:2211.17192): guess x, drawn from q, holds with probability min(1, p(x) / q(x)); the
    first that does not is replaced by a draw from max(0, p - q), rescaled. A certain guess is a q of 1 at one token.

    Args:
        draft_tokens: n guesses.
        target_probs: n + 1 distributions float [vocab]; the i-th follows the first i guesses. Only as many are taken
            from an iterator as are needed.
        rng: where the draws come from.
        draft_probs: n distributions the guesses were drawn from, or None for certain guesses.
    """
    targets = iter(target_probs)
    for index, token in enumerate(draft_tokens):
        target = next(targets)
        guess = 1.0 if draft_probs is None else float(draft_probs[index][token])
        if rng.random() * guess < target[token]:
            continue
        rest = np.array(target, np.float64)
        if draft_probs is None:
            rest[token] = 0
        else:
            rest = np.maximum(rest - draft_probs[index], 0)
        # Rounding may leave nothing where both distributions are the same.
        return index, draw_from(rest if rest.any() else target, rng)
    return len(draft_tokens), draw_from(next(targets), rng)
