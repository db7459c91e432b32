"""What the scheduler knows of one request: its tokens, its pages, who samples and who listens.

Token ids only; text is the listener's business (``TokenSink``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgeds.engines.base import Array
from edgeds.errors import EdgedsError
from edgeds.pipelines.llm.sampling import Choice, Sampler
from edgeds.runtime.kv_evict import EvictionPolicy, TokenScores
from edgeds.runtime.kv_sequence import KvSequence

FinishReason = str
FINISH_REASONS = ("stop", "length", "cancelled", "error")


class TokenSink(Protocol):
    """Listens to one request on the scheduler's thread and says when its text ends."""

    def accept(self, choice: Choice) -> FinishReason | None:
        """Take the next token; ``stop`` when it ends the text (an end token or a stop string), else None."""
        ...

    def finish(self, reason: FinishReason, error: EdgedsError | None, facts: JobFacts) -> None:
        """The request is over; called exactly once."""
        ...


class Drafter(Protocol):
    """Guesses the next tokens of one request for speculative decoding."""

    def draft(self, tokens: Sequence[int]) -> Draft:
        """Up to as many guesses as it thinks worth checking; none is a fine answer."""
        ...

    def learn(self, drafted: int, accepted: int) -> None:
        """How many of the guesses held, to choose the next length."""
        ...

    def close(self) -> None:
        """Give back what the drafter holds."""
        ...


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Guessed tokens; ``probabilities`` [n, vocab] is what each was drawn from, None where the guess was certain."""

    tokens: tuple[int, ...] = ()
    probabilities: tuple[Array, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What one request cost. Times count from its arrival; None where it never came so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_ms: float | None
    total_ms: float
    drafted: int
    accepted: int
    preemptions: int
    evicted_tokens: int


@dataclass(kw_only=True, eq=False)
class Job:
    """One request. ``tokens`` is the prompt and everything generated; ``kv`` is None while it has no pages."""

    number: int
    tokens: list[int]
    prompt_length: int
    max_tokens: int
    sampler: Sampler
    sink: TokenSink
    arrived_s: float
    drafter: Drafter | None = None
    priority: int = 0
    deadline_s: float | None = None
    eviction: EvictionPolicy | None = None
    scores: TokenScores = field(default_factory=TokenScores)
    kv: KvSequence | None = None
    cancelled: bool = False
    finished: bool = False
    first_token_s: float | None = None
    cached_tokens: int | None = None
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    evicted: int = 0

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def computed(self) -> int:
        """Tokens whose keys and values were computed (some of them may have been evicted since)."""
        return self.kv.position if self.kv is not None else 0

    @property
    def pending(self) -> int:
        """Tokens that still have to go through the model before the next one can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def is_decoding(self) -> bool:
        """One token away from the next choice, with pages: the cheap kind of step."""
        return self.kv is not None and self.pending == 1 and self.computed > 0

    def facts(self, now_s: float) -> JobFacts:
        """Counts and times until now."""
        first = self.first_token_s
        return JobFacts(
            prompt_tokens=self.prompt_length,
            completion_tokens=self.generated,
            cached_tokens=self.cached_tokens or 0,
            ttft_ms=None if first is None else (first - self.arrived_s) * 1e3,
            total_ms=(now_s - self.arrived_s) * 1e3,
            drafted=self.drafted,
            accepted=self.accepted,
            preemptions=self.preemptions,
            evicted_tokens=self.evicted,
        )
