"""How a language-model pipeline uses memory and shares the model among requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeds.errors import SpecError
from edgeds.pipelines.llm.scheduler import SchedulerPolicy
from edgeds.runtime.kv_layout import KvLayout

DEFAULT_KV_MIB = 512
SPECULATION = ("off", "lookup")


@dataclass(frozen=True, kw_only=True)
class LlmSettings:
    """``kv_tokens``: tokens the KV cache holds (None: what 512 MiB take, at most ``max_batch`` full contexts).

    ``speculate``: ``lookup`` guesses from the text itself, ``off`` does not; a draft model is given to the pipeline.
    ``watermark``: share of the cache kept free for requests that run. ``kv_budget``: tokens that one request may keep
    cached, the rest is evicted by attention (needs a model built with ``attention_mass``).
    """

    policy: SchedulerPolicy = field(default_factory=SchedulerPolicy)
    kv_tokens: int | None = None
    speculate: str = "off"
    max_draft: int = 8
    watermark: float = 0.05
    prefix_cache: bool = True
    kv_budget: int | None = None

    def __post_init__(self) -> None:
        if self.speculate not in SPECULATION:
            raise SpecError(f"speculate {self.speculate!r}: choose one of {', '.join(SPECULATION)}")
        for name in ("kv_tokens", "max_draft", "kv_budget"):
            value = getattr(self, name)
            if value is None and name != "max_draft":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"{name}: expected a whole number from 1, got {value!r}")

    def pages(self, layout: KvLayout, *, context: int) -> int:
        """Pages of the KV cache."""
        if self.kv_tokens is not None:
            return layout.pages_for(self.kv_tokens)
        fitting = max(1, DEFAULT_KV_MIB * 2**20 // layout.page_bytes)
        return min(fitting, layout.pages_for(context) * self.policy.max_batch)
