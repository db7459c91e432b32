"""Continuous batching (issue 7 part 5): together as alone, joins, leaves, preemption, budgets, failures, no leak."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toyllm import VOCAB, ToyEngine, greedy

from edgeds.errors import DeadlineExceeded, DeviceError, InputError, ModelError, QueueFull, SpecError
from edgeds.pipelines.llm.drafts import PromptLookup
from edgeds.pipelines.llm.jobs import Draft, Job
from edgeds.pipelines.llm.options import SamplingOptions
from edgeds.pipelines.llm.runner import ModelRunner
from edgeds.pipelines.llm.sampling import Sampler
from edgeds.pipelines.llm.scheduler import Scheduler, SchedulerPolicy
from edgeds.runtime.kv_evict import EvictionPolicy
from edgeds.runtime.kv_pool import KvPool
from edgeds.runtime.kv_store import KvStore


class Sink:
    def __init__(self, ends=()):
        self.tokens, self.reason, self.error, self.facts, self.calls = [], None, None, None, 0
        self.ends = set(ends)

    def accept(self, choice):
        self.tokens.append(choice.token)
        return "stop" if choice.token in self.ends else None

    def finish(self, reason, error, facts):
        self.calls += 1
        self.reason, self.error, self.facts = reason, error, facts


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class World:
    def __init__(self, *, pages=40, page=4, context=200, engine=None, **policy):
        self.engine = engine or ToyEngine(page=page)
        store = KvStore(self.engine.layout, pages, memory_mib=100)
        self.pool = KvPool(self.engine.layout, pages=pages, store=store)
        self.clock = Clock()
        self.scheduler = Scheduler(
            ModelRunner(self.engine, store=store),
            pool=self.pool,
            policy=SchedulerPolicy(**policy),
            clock=self.clock,
            context=context,
        )
        self.count = 0

    def add(self, prompt, max_tokens=6, *, ends=(), options=None, **more):
        self.count += 1
        options = options or SamplingOptions(max_tokens=max_tokens)
        sampler = Sampler(options, prompt_tokens=prompt, vocab_size=VOCAB, eos_tokens=tuple(ends))
        job = Job(
            number=self.count,
            tokens=list(prompt),
            prompt_length=len(prompt),
            max_tokens=max_tokens,
            sampler=sampler,
            sink=Sink(ends),
            arrived_s=self.clock.now,
            **more,
        )
        self.scheduler.add(job)
        return job

    def run(self, limit=2000):
        for _ in range(limit):
            if self.scheduler.is_idle:
                return
            self.scheduler.step()
            self.clock.now += 0.01
        raise AssertionError("the scheduler does not come to an end")

    def check_empty(self):
        stats = self.pool.stats()
        assert stats.used == 0
        assert stats.sequences == 0
        assert stats.free + stats.cached == stats.pages


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_one_request_says_what_the_model_says():
    world = World()
    job = world.add(prompt(1, 11), 9)
    world.run()
    assert job.sink.tokens == greedy(prompt(1, 11), 9)
    assert job.sink.reason == "length"
    assert job.sink.calls == 1
    facts = job.sink.facts
    assert (facts.prompt_tokens, facts.completion_tokens) == (11, 9)
    assert facts.ttft_ms is not None
    world.check_empty()


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(10, 40), st.integers(2, 12))
@settings(max_examples=40, deadline=None)
def test_requests_served_together_say_what_they_say_alone(seed, batch, pages, budget):
    """B112: any lengths, joining mid-way, few pages (so that some are preempted), small token budgets."""
    rng = np.random.default_rng(seed)
    world = World(pages=pages, max_batch=batch, token_budget=budget)
    jobs = []
    for index in range(int(rng.integers(1, 9))):
        text = prompt(int(rng.integers(0, 3)) if rng.random() < 0.4 else 100 + index, int(rng.integers(1, 20)))
        jobs.append(world.add(text, int(rng.integers(1, 12)), priority=int(rng.integers(0, 3))))
        for _ in range(int(rng.integers(0, 4))):
            world.scheduler.step()
    world.run()
    for job in jobs:
        assert job.sink.reason == "length", job.sink.error
        assert job.sink.tokens == greedy(job.tokens[: job.prompt_length], job.max_tokens)
        assert job.sink.calls == 1
    world.check_empty()


def test_seeded_sampling_does_not_depend_on_who_else_is_served():
    """B112: random numbers are per request."""
    options = SamplingOptions(max_tokens=12, temperature=1.0, top_k=8, seed=5)
    alone = World()
    first = alone.add(prompt(1, 5), 12, options=options)
    alone.run()
    crowd = World()
    jobs = [
        crowd.add(prompt(9 + i, 3 + i), 12, options=SamplingOptions(max_tokens=12, temperature=1.0)) for i in range(5)
    ]
    again = crowd.add(prompt(1, 5), 12, options=options)
    crowd.run()
    assert again.sink.tokens == first.sink.tokens
    assert len({tuple(job.sink.tokens) for job in jobs}) == 5


def test_a_long_prompt_is_computed_in_chunks_while_others_go_on():
    world = World(pages=80, token_budget=8)
    short = world.add(prompt(1, 3), 30)
    for _ in range(3):
        world.scheduler.step()
    long = world.add(prompt(2, 60), 2)
    before = len(short.sink.tokens)
    while not long.sink.tokens:
        world.scheduler.step()
    assert len(short.sink.tokens) - before >= 7, "it got a token in every round of the long prompt"
    assert max(rows * width for rows, width in world.engine.rows) <= 8
    world.run()
    assert long.sink.tokens == greedy(prompt(2, 60), 2)


def test_a_waiting_prompt_comes_first_when_its_goal_is_near():
    world = World(pages=80, token_budget=8, ttft_goal_ms=50)
    short = world.add(prompt(1, 3), 100)
    for _ in range(3):
        world.scheduler.step()
    long = world.add(prompt(2, 60), 2)
    world.clock.now += 0.03
    before = len(short.sink.tokens)
    while not long.sink.tokens:
        world.scheduler.step()
    assert len(short.sink.tokens) - before <= 1
    world.run()
    assert short.sink.tokens == greedy(prompt(1, 3), 100)


def test_a_shared_prefix_is_computed_once():
    world = World(pages=80)
    text = prompt(3, 40)
    world.add(text, 2)
    world.run()
    computed = sum(rows * width for rows, width in world.engine.rows)
    second = world.add([*text, 7], 2)
    world.run()
    more = sum(rows * width for rows, width in world.engine.rows) - computed
    assert second.sink.facts.cached_tokens == 40
    assert more <= 3
    assert second.sink.tokens == greedy([*text, 7], 2)


def test_the_whole_prompt_in_the_cache_still_gives_logits():
    world = World()
    for _ in range(2):
        job = world.add(prompt(3, 8), 3)
        world.run()
        assert job.sink.tokens == greedy(prompt(3, 8), 3)


def test_preempted_requests_are_computed_again_to_the_same_end():
    world = World(pages=8, max_batch=4)
    jobs = [world.add(prompt(i, 9), 14, priority=i % 2) for i in range(4)]
    world.run()
    assert sum(job.preemptions for job in jobs) > 0
    for job in jobs:
        assert job.sink.tokens == greedy(job.tokens[:9], 14)
    important = [job for job in jobs if job.priority == 1]
    assert sum(job.preemptions for job in important) <= sum(job.preemptions for job in jobs if job.priority == 0)
    world.check_empty()


def test_higher_priorities_are_served_first_and_waiting_counts():
    world = World(max_batch=1, aging_ms=1000)
    running = world.add(prompt(0, 2), 4)
    world.scheduler.step()
    low = world.add(prompt(1, 2), 1)
    world.clock.now += 5.0
    high = world.add(prompt(2, 2), 1, priority=3)
    order = []
    for job in (low, high, running):
        job.sink.finish = lambda *_, job=job: order.append(job)
    world.run()
    assert order == [running, low, high], "five seconds of waiting are worth more than three levels"


def test_end_tokens_end_and_are_not_followed_by_anything():
    text = greedy(prompt(1, 6), 20)
    world = World()
    job = world.add(prompt(1, 6), 20, ends=[text[4]])
    world.run()
    assert job.sink.reason == "stop"
    assert job.sink.tokens == text[: text.index(text[4]) + 1]
    world.check_empty()


def test_cancelling_takes_effect_within_two_tokens_and_frees_the_pages():
    """B108, B111."""
    world = World()
    job = world.add(prompt(1, 6), 100)
    for _ in range(5):
        world.scheduler.step()
    count = len(job.sink.tokens)
    world.scheduler.cancel(job)
    world.run()
    assert job.sink.reason == "cancelled"
    assert len(job.sink.tokens) <= count + 2
    world.check_empty()
    waiting = World(max_batch=1)
    waiting.add(prompt(1, 3), 5)
    second = waiting.add(prompt(2, 3), 5)
    waiting.scheduler.cancel(second)
    waiting.run()
    assert second.sink.reason == "cancelled"
    assert second.sink.tokens == []


def test_deadlines_end_requests_that_wait_and_that_run():
    world = World(max_batch=1)
    first = world.add(prompt(1, 3), 50, deadline_s=0.1)
    second = world.add(prompt(2, 3), 5, deadline_s=0.05)
    world.run()
    for job in (first, second):
        assert job.sink.reason == "error"
        assert isinstance(job.sink.error, DeadlineExceeded)
    assert first.sink.tokens
    assert second.sink.tokens == []
    world.check_empty()


def test_what_can_never_fit_is_refused_at_once():
    """B101: nothing is capped silently; the sentence says which limit, and what would fit."""
    world = World(pages=4, page=4, context=200)
    with pytest.raises(InputError, match=r"KV cache holds 16.*at most 6"):
        world.add(prompt(1, 10), 7)
    with pytest.raises(InputError, match=r"context holds 20"):
        World(context=20).add(prompt(1, 19), 2)
    with pytest.raises(InputError, match="no tokens"):
        world.add([], 2)
    fits = world.add(prompt(1, 10), 6)
    world.run()
    assert fits.sink.reason == "length"


def test_too_many_waiting_requests_are_refused():
    world = World(max_waiting=2)
    world.add(prompt(1, 3))
    world.add(prompt(2, 3))
    with pytest.raises(QueueFull):
        world.add(prompt(3, 3))
    world.run()


def test_an_engine_that_fails_ends_its_requests_and_nothing_else():
    world = World()
    job = world.add(prompt(1, 3))
    world.scheduler.step()
    world.engine.fail = "the device is gone"
    world.run()
    assert isinstance(job.sink.error, DeviceError)
    world.check_empty()
    world.engine.fail = None
    later = world.add(prompt(1, 3), 4)
    world.run()
    assert later.sink.tokens == greedy(prompt(1, 3), 4)


def test_logits_that_are_not_finite_are_an_error_and_no_token():
    world = World(engine=ToyEngine(say=lambda tokens, places: np.full(VOCAB, np.nan, np.float32)))
    job = world.add(prompt(1, 3))
    world.run()
    assert job.sink.reason == "error"
    assert "finite" in str(job.sink.error)
    assert job.sink.tokens == []


def test_an_engine_that_is_no_language_model_is_refused():
    engine = ToyEngine()
    engine.inputs = engine.inputs[1:]
    with pytest.raises(ModelError, match="input_ids"):
        ModelRunner(engine, store=KvStore(engine.layout, 2, memory_mib=10))


class Guess:
    """A drafter that is right with a given chance; keeps what it is told."""

    def __init__(self, prompt, count, chance, seed=0):
        self.truth = [*prompt, *greedy(prompt, count + 20)]
        self.rng, self.chance, self.learned, self.closed = np.random.default_rng(seed), chance, [], 0

    def draft(self, tokens):
        ahead = self.truth[len(tokens) : len(tokens) + 4]
        return Draft(tokens=tuple(t if self.rng.random() < self.chance else (t + 1) % VOCAB for t in ahead))

    def learn(self, drafted, accepted):
        self.learned.append((drafted, accepted))

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_speculation_says_the_same_in_fewer_runs(chance):
    """Issue 7 part 6: greedy identical, whatever the guesses are worth."""
    world, text = World(), prompt(4, 9)
    guess = Guess(text, 30, chance)
    job = world.add(text, 30, drafter=guess)
    world.run()
    assert job.sink.tokens == greedy(text, 30)
    assert guess.closed == 1
    assert job.sink.facts.drafted == sum(drafted for drafted, _ in guess.learned)
    assert job.sink.facts.accepted == sum(accepted for _, accepted in guess.learned)
    if chance == 1.0:
        assert world.engine.runs <= 8
        assert job.sink.facts.accepted == job.sink.facts.drafted
    if chance == 0.0:
        assert job.sink.facts.accepted == 0
    world.check_empty()


def test_speculation_of_many_requests_at_once_with_few_pages():
    world = World(pages=14, max_batch=4, token_budget=6)
    jobs = []
    for index in range(6):
        text = prompt(index, 5 + index)
        jobs.append(world.add(text, 12, drafter=Guess(text, 12, 0.7, seed=index)))
    world.run()
    for job in jobs:
        assert job.sink.tokens == greedy(job.tokens[: job.prompt_length], 12)
    world.check_empty()


def test_prompt_lookup_on_a_text_that_repeats():
    class Lookup:
        def __init__(self):
            self.inner = PromptLookup()

        def draft(self, tokens):
            return Draft(tokens=tuple(self.inner.draft(tokens, 6)))

        def learn(self, drafted, accepted):
            pass

        def close(self):
            pass

    def parrot(tokens, places):
        """Says its prompt again and again."""
        logits = np.zeros(VOCAB, np.float32)
        logits[(int(tokens[-1]) + 1) % 8] = 5.0
        return logits

    world = World(engine=ToyEngine(say=parrot))
    job = world.add([0, 1, 2, 3, 4, 5, 6, 7, 0, 1], 40, drafter=Lookup())
    world.run()
    assert job.sink.tokens == [(2 + i) % 8 for i in range(40)]
    assert world.engine.runs < 12


def test_eviction_keeps_a_budget_and_goes_on_past_the_cache():
    """Selective caching: 12 tokens of cache serve 60, positions stay absolute."""
    world = World(pages=6, engine=ToyEngine(mass=True), token_budget=4)
    policy = EvictionPolicy(budget=12, sinks=2, recent=4, slack=2)
    job = world.add(prompt(1, 30), 30, eviction=policy)
    longest = 0
    while not world.scheduler.is_idle:
        world.scheduler.step()
        if job.kv is not None:
            longest = max(longest, job.kv.length)
    assert job.sink.reason == "length", job.sink.error
    assert len(job.sink.tokens) == 30
    assert longest <= 12
    assert job.sink.facts.evicted_tokens >= 60 - 12 - 1
    world.check_empty()


def test_random_traffic_leaks_nothing():
    """The soak in miniature: joins, cancels, deadlines, preemptions; every page comes back."""
    rng = np.random.default_rng(0)
    world = World(pages=24, max_batch=5, token_budget=10, max_waiting=1000)
    jobs = []
    for index in range(300):
        jobs.append(
            world.add(
                prompt(int(rng.integers(0, 20)), int(rng.integers(1, 20))),
                int(rng.integers(1, 10)),
                priority=int(rng.integers(0, 3)),
                deadline_s=world.clock.now + 0.03 if rng.random() < 0.1 else None,
            )
        )
        if rng.random() < 0.2:
            world.scheduler.cancel(jobs[int(rng.integers(0, index + 1))])
        for _ in range(int(rng.integers(0, 5))):
            world.scheduler.step()
            world.clock.now += 0.01
    world.run(20_000)
    assert all(job.sink.calls == 1 for job in jobs)
    for job in jobs:
        if job.sink.reason == "length":
            assert job.sink.tokens == greedy(job.tokens[: job.prompt_length], job.max_tokens)
    assert {job.sink.reason for job in jobs} == {"length", "cancelled", "error"}
    world.check_empty()


@pytest.mark.parametrize(
    "policy", [{"max_batch": 0}, {"token_budget": 1.5}, {"max_waiting": -1}, {"ttft_goal_ms": 0}, {"aging_ms": -1}]
)
def test_policies_are_checked(policy):
    with pytest.raises(SpecError, match=next(iter(policy))):
        SchedulerPolicy(**policy)
