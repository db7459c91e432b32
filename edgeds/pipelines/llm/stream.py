"""One request seen from outside: its text as it comes, in a loop, a coroutine, or all at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from edgeds.errors import EdgedsError
from edgeds.pipelines.llm.jobs import JobFacts
from edgeds.pipelines.llm.output import Delta, TextOutput
from edgeds.pipelines.llm.sampling import Choice


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request. ``tokens_per_s`` counts tokens after the first; None when there was no second one.

    ``stop`` is the end token or stop string that ended it. ``drafted`` and ``accepted`` count guesses of speculative
    decoding, ``cached_tokens`` prompt tokens that were not computed because an earlier request had them.
    ``token_times_s`` are the moments (``time.monotonic``) at which the tokens were chosen.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    stop: int | str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_ms: float | None
    total_ms: float
    tokens_per_s: float | None
    drafted: int
    accepted: int
    preemptions: int
    evicted_tokens: int
    token_times_s: tuple[float, ...] = ()
    logprobs: tuple[Choice, ...] = ()


class Stream:
    """Iterate (also with ``async for``) for ``Delta``s; ``result()`` waits for the whole. Any thread may ``cancel()``.

    Iterating raises the request's error once the text before it was given out. A stream is iterated once.
    """

    def __init__(self, output: TextOutput, *, keep_logprobs: bool) -> None:
        self._output = output
        self._keep_logprobs = keep_logprobs
        self._condition = threading.Condition()
        self._pending: list[Delta] = []
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._times_s: list[float] = []
        self._choices: list[Choice] = []
        self._completion: Completion | None = None
        self._error: EdgedsError | None = None
        self._listeners: list[Callable[[], None]] = []
        self._stop: int | str | None = None
        self._cancel: Callable[[], None] = lambda: None

    def accept(self, choice: Choice) -> str | None:
        """For the scheduler: the next token."""
        self._tokens.append(choice.token)
        self._times_s.append(time.monotonic())
        if self._keep_logprobs:
            self._choices.append(choice)
        delta = self._output.accept(choice.token)
        self._push(delta)
        return delta.finish_reason

    def finish(self, reason: str, error: EdgedsError | None, facts: JobFacts) -> None:
        """For the scheduler: the request is over."""
        if self._output.finish_reason is None:
            self._push(self._output.end(reason))
        first = facts.ttft_ms
        rest_s = 0.0 if first is None else (facts.total_ms - first) / 1e3
        count = facts.completion_tokens
        completion = Completion(
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish_reason=reason,
            stop=self._stop,
            prompt_tokens=facts.prompt_tokens,
            completion_tokens=count,
            cached_tokens=facts.cached_tokens,
            ttft_ms=first,
            total_ms=facts.total_ms,
            tokens_per_s=(count - 1) / rest_s if count > 1 and rest_s > 0 else None,
            drafted=facts.drafted,
            accepted=facts.accepted,
            preemptions=facts.preemptions,
            evicted_tokens=facts.evicted_tokens,
            token_times_s=tuple(self._times_s),
            logprobs=tuple(self._choices),
        )
        with self._condition:
            self._completion, self._error = completion, error
            self._notify()

    def bind(self, cancel: Callable[[], None]) -> None:
        """For the pipeline: what ``cancel`` does."""
        self._cancel = cancel

    def cancel(self) -> None:
        """End the request within two tokens; its reason is ``cancelled``. Nothing happens to a finished one."""
        self._cancel()

    @property
    def is_done(self) -> bool:
        """Whether the request is over."""
        with self._condition:
            return self._completion is not None

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the end. Raises the request's error, or TimeoutError."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._completion is not None, timeout=timeout_s):
                raise TimeoutError(f"the request is not over after {timeout_s} s")
        return self._finished()

    def __iter__(self) -> Iterator[Delta]:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._pending or self._completion is not None)
                deltas, over = self._take()
            yield from deltas
            if over:
                self._finished()
                return

    async def __aiter__(self) -> AsyncIterator[Delta]:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        with self._condition:
            self._listeners.append(wake)
        try:
            while True:
                with self._condition:
                    deltas, over = self._take()
                for delta in deltas:
                    yield delta
                if over:
                    self._finished()
                    return
                await woken.wait()
                woken.clear()
        finally:
            with self._condition:
                self._listeners.remove(wake)

    def _push(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._stop = delta.stop if delta.stop is not None else self._stop
        if delta.text or delta.finish_reason is not None:
            with self._condition:
                self._pending.append(delta)
                self._notify()

    def _take(self) -> tuple[list[Delta], bool]:
        deltas, self._pending = self._pending, []
        return deltas, self._completion is not None

    def _notify(self) -> None:
        self._condition.notify_all()
        for listener in self._listeners:
            listener()

    def _finished(self) -> Completion:
        if self._error is not None:
            raise self._error
        if self._completion is None:
            raise TimeoutError("the request is not over")
        return self._completion
