"""A language model to talk to from any thread or coroutine, many requests at once.

with LlmPipeline.from_bundle("smollm.bundle") as llm:
    print(llm.generate("The capital of France is", max_tokens=8).text)
    for delta in llm.stream([{"role": "user", "content": "Hello"}], temperature=0.7, seed=1):
        print(delta.text, end="")
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.engines.base import Engine
from edgeds.errors import InputError, ModelError, SessionClosed, SpecError
from edgeds.pipelines.llm.jobs import Drafter, Job
from edgeds.pipelines.llm.model import LlmModel, eviction_policy
from edgeds.pipelines.llm.options import SamplingOptions
from edgeds.pipelines.llm.output import TextOutput
from edgeds.pipelines.llm.sampling import Sampler
from edgeds.pipelines.llm.scheduler import Scheduler
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.pipelines.llm.speculate import LookupDrafter, ModelDrafter
from edgeds.pipelines.llm.stream import Completion, Stream
from edgeds.pipelines.llm.text import LlmText
from edgeds.runtime.kv_layout import KvLayout

if TYPE_CHECKING:
    from edgeds.bundle import Bundle

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Plain text, token ids, or messages (``{"role": ..., "content": ...}``) for the model's chat template."""


class LlmPipeline:
    """Generates text. One thread of its own runs the model; everything else may be called from anywhere.

    ``draft``: the engine of a smaller model with the same vocabulary, for speculative decoding. The engines stay the
    caller's to close unless they are among ``owned``. Raises ModelError for an engine that is no decoder of
    ``graph/decoder.py`` or a tokenizer of another model.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        text: LlmText,
        settings: LlmSettings | None = None,
        draft: Engine | None = None,
        owned: Sequence[Callable[[], None]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or LlmSettings()
        self.text = text
        self.engine = engine
        self._model = LlmModel(engine, self.settings)
        text.check_vocab(self._model.vocab)
        self._draft = None if draft is None else LlmModel(draft, self.settings)
        if self._draft is not None and self._draft.vocab != self._model.vocab:
            raise ModelError(
                f"the draft model has {self._draft.vocab} tokens, the model {self._model.vocab}; guesses need the same"
            )
        if self.settings.kv_budget is not None and (not self._model.has_mass or self._model.is_windowed):
            raise SpecError("kv_budget: needs a model built with attention_mass=True and without a sliding window")
        self._clock = clock
        self._owned = list(owned)
        self._numbers = itertools.count(1)
        self._wake = threading.Condition()
        self._closed = False
        self._scheduler = Scheduler(
            self._model.runner,
            pool=self._model.pool,
            policy=self.settings.policy,
            clock=clock,
            context=self._model.context,
        )
        self._thread = threading.Thread(target=self._work, name="edgeds-llm", daemon=True)
        self._thread.start()

    @classmethod
    def from_bundle(cls, source: str | Path | Bundle, **options: Any) -> LlmPipeline:
        """Open a bundle of task ``generate``. Options: ``backend``, ``precision``, ``threads``, ``settings``, ``draft``
        (another bundle). Raises BundleError, SpecError, ModelError."""
        from edgeds.pipelines.llm.opening import open_bundle_pipeline

        return open_bundle_pipeline(source, **options)

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together: the model's limit, or the cache where that holds less."""
        if self.settings.kv_budget is not None:
            return self._model.context
        return min(self._model.context, self._model.pool.stats().pages * self._model.layout.page)

    @property
    def layout(self) -> KvLayout:
        """How keys and values lie in the cache."""
        return self._model.layout

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises InputError for what is none."""
        if isinstance(prompt, str):
            return self.text.encode(prompt)
        items = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return self.text.encode_chat(items)  # type: ignore[arg-type]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise InputError("prompt: expected text, token ids, or messages with role and content")
        tokens = [int(item) for item in items]  # type: ignore[call-overload]
        wrong = next((token for token in tokens if not 0 <= token < self.text.token_count), None)
        if wrong is not None:
            raise InputError(f"prompt: token {wrong} is outside the vocabulary of {self.text.token_count} tokens")
        return tokens

    def stream(
        self,
        prompt: Prompt,
        *,
        options: SamplingOptions | None = None,
        priority: int = 0,
        deadline_ms: float | None = None,
        speculate: bool | None = None,
        **changes: Any,
    ) -> Stream:
        """Start a request; iterate the stream for its text. ``changes`` are fields of ``SamplingOptions``.

        Raises at once: InputError for a prompt that is empty or too long, SpecError for options, QueueFull,
        SessionClosed.
        """
        chosen = _options(options, changes)
        tokens = self.encode(prompt)
        if not tokens:
            raise InputError("the prompt is empty; give at least one word")
        ends = self._ends()
        sampler = Sampler(
            chosen,
            prompt_tokens=tokens,
            vocab_size=self.text.token_count,
            eos_tokens=ends,
            constraint=self.text.guide.constraint(chosen) if chosen.is_guided else None,
        )
        output = TextOutput(chosen, table=self.text.table, eos_tokens=ends)
        stream = Stream(output, keep_logprobs=chosen.logprobs is not None)
        now = self._clock()
        budget = self.settings.kv_budget
        job = Job(
            number=next(self._numbers),
            tokens=tokens,
            prompt_length=len(tokens),
            max_tokens=chosen.max_tokens,
            sampler=sampler,
            sink=stream,
            arrived_s=now,
            drafter=self._drafter(sampler, speculate),
            priority=priority,
            deadline_s=None if deadline_ms is None else now + deadline_ms / 1e3,
            eviction=None if budget is None else eviction_policy(budget),
        )
        stream.bind(lambda: self._cancel(job))
        with self._wake:
            if self._closed:
                raise SessionClosed("the pipeline is closed; open it again")
            self._scheduler.add(job)
            self._wake.notify()
        return stream

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """One request to its end; arguments and errors as those of ``stream``. Ctrl-C cancels it."""
        stream = self.stream(prompt, **options)
        try:
            return stream.result()
        except KeyboardInterrupt:
            stream.cancel()
            raise

    def generate_all(self, prompts: Sequence[Prompt], **options: Any) -> list[Completion]:
        """Several requests at once, answers in the order of the prompts."""
        return [stream.result() for stream in [self.stream(prompt, **options) for prompt in prompts]]

    async def generate_async(self, prompt: Prompt, **options: Any) -> Completion:
        """``generate`` in a coroutine; cancelling the coroutine cancels the request."""
        stream = self.stream(prompt, **options)
        try:
            async for _ in stream:
                pass
        finally:
            stream.cancel()
        return stream.result()

    def stats(self) -> dict[str, Any]:
        """Requests waiting and running, and the use of the KV cache."""
        waiting, running = self._scheduler.counts
        pool = self._model.pool.stats()
        return {"waiting": waiting, "running": running, "kv": pool, "context": self.context}

    def close(self) -> None:
        """End all requests (with SessionClosed) and free the model. Safe to call twice."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for model in (self._model, self._draft):
            if model is not None:
                model.close()
        for free in self._owned:
            free()
        self._owned.clear()

    def __enter__(self) -> LlmPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ends(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys([*self.text.eos_tokens, *self._model.ends]))

    def _drafter(self, sampler: Sampler, speculate: bool | None) -> Drafter | None:
        wanted = self.settings.speculate != "off" or self._draft is not None if speculate is None else speculate
        # A grammar follows one text only: guesses would have to be taken back from it.
        if not wanted or sampler.options.is_guided:
            return None
        if self._draft is not None:
            model = self._draft
            limit = min(self.settings.max_draft, 4)
            return ModelDrafter(model.runner, pool=model.pool, sampler=sampler, max_draft=limit)
        return LookupDrafter(max_draft=self.settings.max_draft)

    def _cancel(self, job: Job) -> None:
        self._scheduler.cancel(job)
        with self._wake:
            self._wake.notify()

    def _work(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or not self._scheduler.is_idle)
                    if self._closed:
                        break
                self._scheduler.step()
        finally:
            # Also when a step failed in a way nobody foresaw: no caller may wait for ever.
            with self._wake:
                self._closed = True
            self._scheduler.fail_all(SessionClosed("the pipeline was closed before the request was over"))


def _options(options: SamplingOptions | None, changes: Mapping[str, Any]) -> SamplingOptions:
    unknown = sorted(set(changes) - set(SamplingOptions.__dataclass_fields__))
    if unknown:
        known = ", ".join(SamplingOptions.__dataclass_fields__)
        raise SpecError(f"{unknown[0]}: no such option; known are {known}")
    return replace(options, **changes) if options is not None else SamplingOptions(**changes)
