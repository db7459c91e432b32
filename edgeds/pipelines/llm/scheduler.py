"""Continuous batching: which parts of which requests the model computes next.

Every round runs the decodes (one token each, or a few guessed ones) as one batch, then as much of the waiting prompts
as the token budget leaves. Requests join and leave between rounds; a request without pages gives way to a more
important one and is computed again later. One thread owns a scheduler; ``cancel`` may be called from any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edgeds.engines.base import Array
from edgeds.errors import DeadlineExceeded, EdgedsError, InputError, PoolExhausted, QueueFull, SpecError
from edgeds.pipelines.llm.jobs import Draft, FinishReason, Job
from edgeds.pipelines.llm.runner import Chunk, RunsModel, StepResult
from edgeds.pipelines.llm.sampling import Choice
from edgeds.runtime.kv_evict import TokenScores, evict_tokens
from edgeds.runtime.kv_pool import KvPool

# A batch is padded to its longest row; rows are computed together when at most this share of it is padding.
MAX_PADDING_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class SchedulerPolicy:
    """``token_budget`` is how many tokens one round computes at most, so that decodes never wait long for prompts.

    With ``ttft_goal_ms``, a prompt that has waited half of it is computed before any decode. A request gains one
    priority level per ``aging_ms`` of waiting.
    """

    max_batch: int = 8
    token_budget: int = 512
    max_waiting: int = 256
    ttft_goal_ms: float | None = None
    aging_ms: float = 1000.0

    def __post_init__(self) -> None:
        for name in ("max_batch", "token_budget", "max_waiting"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"{name}: expected a whole number of at least 1, got {value!r}")
        for name in ("ttft_goal_ms", "aging_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SpecError(f"{name}: expected more than 0 ms, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Outcome of one chunk: the tokens it led to, and how many of its own are to be kept in the pages."""

    choices: list[Choice]
    kept: int


class Scheduler:
    """Runs requests (``Job``) on a runner over a pool. Call ``step`` until ``is_idle``."""

    def __init__(
        self, runner: RunsModel, *, pool: KvPool, policy: SchedulerPolicy, clock: Callable[[], float], context: int
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._policy = policy
        self._clock = clock
        self._context = context
        stats = pool.stats()
        self._capacity = stats.pages * pool.layout.page
        self._lock = threading.Lock()
        self._arrived: list[Job] = []
        self._waiting: list[Job] = []
        self._running: list[Job] = []

    @property
    def is_idle(self) -> bool:
        """No request waits or runs."""
        with self._lock:
            return not (self._arrived or self._waiting or self._running)

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that wait, and that have pages."""
        with self._lock:
            return len(self._arrived) + len(self._waiting), len(self._running)

    def add(self, job: Job) -> None:
        """Queue a request; any thread. Raises InputError for one that can never fit, QueueFull when too many wait."""
        if not job.tokens:
            raise InputError("the prompt has no tokens; give at least one")
        total = job.prompt_length + job.max_tokens
        # With eviction the cache holds a part only, but positions still may not pass what the model was trained for.
        limit = self._context if job.eviction is not None else min(self._context, self._capacity)
        if total > limit:
            what = "the model's context" if limit == self._context else "the KV cache"
            room = max(0, limit - job.prompt_length)
            raise InputError(
                f"the prompt has {job.prompt_length} tokens and max_tokens is {job.max_tokens}, together {total}, but "
                f"{what} holds {limit}; shorten the prompt or ask for at most {room} tokens"
            )
        with self._lock:
            if len(self._arrived) + len(self._waiting) >= self._policy.max_waiting:
                raise QueueFull(f"{self._policy.max_waiting} requests are waiting already; try again later")
            self._arrived.append(job)

    def cancel(self, job: Job) -> None:
        """End a request at the next round, at most one token later. Any thread; a finished one is left as it is."""
        job.cancelled = True

    def step(self) -> None:
        """One round: drop what is over, admit, decode, prefill. An engine's error ends the requests it was run for."""
        with self._lock:
            self._waiting += self._arrived
            self._arrived.clear()
        now = self._clock()
        self._drop(now)
        self._admit(now)
        budget = self._policy.token_budget
        if not self._prompt_is_urgent(now):
            budget -= self._decode()
        self._prefill(budget)

    def fail_all(self, error: EdgedsError) -> None:
        """End every request with this error; for a scheduler that cannot go on."""
        with self._lock:
            jobs = [*self._arrived, *self._waiting, *self._running]
        for job in jobs:
            self._end(job, "error", error=error)

    def _drop(self, now_s: float) -> None:
        for job in [*self._waiting, *self._running]:
            if job.cancelled:
                self._end(job, "cancelled")
            elif job.deadline_s is not None and now_s >= job.deadline_s:
                late = f"the deadline passed after {job.generated} of at most {job.max_tokens} tokens"
                self._end(job, "error", error=DeadlineExceeded(late))
            elif job.max_tokens == 0:
                self._end(job, "length")

    def _admit(self, now_s: float) -> None:
        aging_s = self._policy.aging_ms / 1e3

        def rank(job: Job) -> tuple[float, int]:
            return -(job.priority + (now_s - job.arrived_s) // aging_s), job.number

        for job in sorted(self._waiting, key=rank):
            if len(self._running) >= self._policy.max_batch:
                return
            first = min(len(job.tokens), self._policy.token_budget)
            if self._running and not self._pool.can_admit(first, prompt=job.tokens):
                return
            job.kv = self._pool.open(job.tokens, priority=job.priority)
            if job.cached_tokens is None:
                job.cached_tokens = job.kv.length
            self._waiting.remove(job)
            self._running.append(job)

    def _prompt_is_urgent(self, now_s: float) -> bool:
        goal = self._policy.ttft_goal_ms
        if goal is None:
            return False
        waits = [now_s - job.arrived_s for job in self._running if job.first_token_s is None]
        return bool(waits) and max(waits) * 1e3 >= goal / 2

    def _decode(self) -> int:
        """Run the requests that are one token from their next; returns how many tokens that took."""
        parts: list[tuple[Job, Draft]] = []
        for job in [job for job in self._running if job.is_decoding]:
            room = job.max_tokens - job.generated - 1
            draft = job.drafter.draft(job.tokens) if job.drafter is not None and room > 0 else Draft()
            draft = Draft(tokens=draft.tokens[:room], probabilities=draft.probabilities)
            if self._reserve(job, 1 + len(draft.tokens)):
                parts.append((job, draft))
        spent = 0
        for group in _group(parts, size=lambda part: 1 + len(part[1].tokens), limit=self._policy.max_batch):
            # Making room for a later request may have taken the pages of an earlier one.
            live = [part for part in group if part[0].kv is not None]
            chunks = [
                _chunk(job, [job.tokens[-1], *draft.tokens], picks=range(1 + len(draft.tokens))) for job, draft in live
            ]
            spent += sum(len(chunk.tokens) for chunk in chunks)
            self._run([job for job, _ in live], chunks, [draft for _, draft in live])
        return spent

    def _prefill(self, budget: int) -> None:
        budget = max(budget, 1)
        parts: list[tuple[Job, int]] = []
        for job in [job for job in self._running if not job.is_decoding]:
            count = min(job.pending, budget)
            if count < 1:
                break
            if self._reserve(job, count):
                parts.append((job, count))
                budget -= count
        for group in _group(parts, size=lambda part: part[1], limit=self._policy.max_batch):
            live = [part for part in group if part[0].kv is not None]
            chunks = [
                _chunk(job, job.tokens[job.computed : job.computed + count], picks=[count - 1]) for job, count in live
            ]
            self._run([job for job, _ in live], chunks, [Draft()] * len(live))

    def _reserve(self, job: Job, count: int) -> bool:
        """Get pages for ``count`` more tokens, taking those of less important requests if need be."""
        while job.kv is not None:
            try:
                self._pool.reserve(job.kv, count)
            except PoolExhausted as error:
                victim = self._victim(job)
                if victim is None:
                    self._end(job, "error", error=error)
                    return False
                self._preempt(victim)
            else:
                return True
        return False

    def _victim(self, job: Job) -> Job | None:
        """The least important request with pages; the youngest of those. The asking one itself when it is that."""
        others = [other for other in self._running if other.kv is not None]
        if len(others) < 2:
            return None
        return min(others, key=lambda other: (other.priority, -other.number))

    def _preempt(self, job: Job) -> None:
        if job.kv is not None:
            self._pool.preempt(job.kv)
        self._release(job)
        job.scores = TokenScores()
        job.preemptions += 1
        self._running.remove(job)
        self._waiting.append(job)

    def _run(self, jobs: Sequence[Job], chunks: Sequence[Chunk], drafts: Sequence[Draft]) -> None:
        if not chunks:
            return
        try:
            result = self._runner.run(chunks)
            steps = [
                self._judge(job, chunk, draft, result, index)
                for index, (job, chunk, draft) in enumerate(zip(jobs, chunks, drafts, strict=True))
            ]
            result.keep([0 if step is None else step.kept for step in steps])
        except EdgedsError as error:
            for job in jobs:
                self._end(job, "error", error=error)
            return
        for index, (job, chunk, step) in enumerate(zip(jobs, chunks, steps, strict=True)):
            if step is None:
                continue
            try:
                self._take(job, chunk, step, mass=result.attention_mass(index))
            except EdgedsError as error:
                self._end(job, "error", error=error)

    def _judge(self, job: Job, chunk: Chunk, draft: Draft, result: StepResult, index: int) -> _Step | None:
        """The tokens that follow a chunk, and how much of it stays; None (and the job ended) for broken logits."""
        known = len(chunk.tokens) - len(draft.tokens)
        if job.computed + known < len(job.tokens):
            return _Step(choices=[], kept=known)
        logits = result.logits(index)
        try:
            if not draft.tokens:
                return _Step(choices=[job.sampler.choose(logits[0])], kept=known)
            choices, held = job.sampler.judge(draft.tokens, logits, draft_probabilities=draft.probabilities)
        except EdgedsError as error:
            self._end(job, "error", error=error)
            return None
        job.drafted += len(draft.tokens)
        job.accepted += held
        if job.drafter is not None:
            job.drafter.learn(len(draft.tokens), held)
        return _Step(choices=choices, kept=known + len(choices) - 1)

    def _take(self, job: Job, chunk: Chunk, step: _Step, *, mass: Array | None) -> None:
        """Book what was written and hand out the new tokens."""
        if job.kv is None:
            return
        before = job.kv.length
        self._pool.commit(job.kv, chunk.tokens[: step.kept])
        if job.eviction is not None and mass is not None:
            job.scores.add(mass, length=before)
            job.evicted += evict_tokens(self._pool, job.kv, scores=job.scores, policy=job.eviction)
        for choice in step.choices:
            if self._emit(job, choice):
                return

    def _emit(self, job: Job, choice: Choice) -> bool:
        """Add one token; True when the request is over."""
        if job.first_token_s is None:
            job.first_token_s = self._clock()
        job.tokens.append(choice.token)
        job.sampler.record(choice.token)
        reason = job.sink.accept(choice)
        if reason is None and job.generated >= job.max_tokens:
            reason = "length"
        if reason is not None:
            self._end(job, reason)
        return reason is not None

    def _end(self, job: Job, reason: FinishReason, *, error: EdgedsError | None = None) -> None:
        if job.finished:
            return
        job.finished = True
        self._release(job)
        with self._lock:
            for queue in (self._arrived, self._waiting, self._running):
                if job in queue:
                    queue.remove(job)
        if job.drafter is not None:
            job.drafter.close()
        job.sink.finish(reason, error, job.facts(self._clock()))

    def _release(self, job: Job) -> None:
        if job.kv is not None:
            self._pool.close(job.kv)
            job.kv = None


def _chunk(job: Job, tokens: Sequence[int], *, picks: Sequence[int]) -> Chunk:
    if job.kv is None:
        raise SpecError(f"request {job.number} has no pages to compute in")
    return Chunk(kv=job.kv, tokens=tokens, picks=picks)


def _group(parts: Iterable[tuple[Job, object]], *, size: Callable[..., int], limit: int) -> list[list]:
    """Batches of similar size, so that little of each is padding; the order inside a batch does not matter."""
    groups: list[list] = []
    for part in sorted(parts, key=size, reverse=True):
        largest = size(groups[-1][0]) if groups else 0
        if groups and len(groups[-1]) < limit and size(part) >= largest * (1 - MAX_PADDING_SHARE):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups
