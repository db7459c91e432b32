"""A day in miniature (issue 7): thousands of requests that join, end, are cancelled and run out of time."""

import threading
import time

import numpy as np
import pytest
from toyllm import ToyEngine, write_tokenizer

from edgeds.errors import DeadlineExceeded, EdgedsError, InputError, PoolExhausted, QueueFull
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.pipelines.llm.scheduler import SchedulerPolicy
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.pipelines.llm.text import open_text

pytest.importorskip("tokenizers")
CALLERS = 6


def resident_kib():
    with open("/proc/self/status") as stream:  # noqa: PTH123
        return next(int(line.split()[1]) for line in stream if line.startswith("VmRSS:"))


def ask(llm, rng, shared):
    """One random request; (what it ended with, the completion or None)."""
    own = rng.integers(0, 37, rng.integers(1, 30)).tolist()
    prompt = [*shared[rng.integers(len(shared))], *own] if rng.random() < 0.4 else own
    options = {"max_tokens": int(rng.integers(1, 40)), "temperature": float(rng.choice([0.0, 1.5])), "seed": 1}
    kind = rng.random()
    if kind < 0.05:
        options["regex"] = "[0-9]{1,6}"
    elif kind < 0.1:
        options["stop"] = ("a",)
    deadline = float(rng.uniform(0, 20)) if rng.random() < 0.1 else None
    stream = llm.stream(
        prompt,
        priority=int(rng.integers(3)),
        deadline_ms=deadline,
        speculate=bool(rng.random() < 0.5),
        **options,
    )
    if rng.random() < 0.15:
        for number, _ in enumerate(stream):
            if number >= rng.integers(5):
                break
        stream.cancel()
    found = stream.result(timeout_s=60)
    return found, options


def check(found, options):
    """The reason is true."""
    count, reason = found.completion_tokens, found.finish_reason
    assert count == len(found.tokens)
    assert count <= options["max_tokens"]
    if reason == "length":
        assert count == options["max_tokens"]
    elif reason == "stop":
        assert found.stop is not None or "regex" in options
    else:
        assert reason == "cancelled"
    if "stop" in options:
        assert "a" not in found.text
    if "regex" in options and reason == "stop":
        assert 1 <= len(found.text) <= 6
        assert found.text.isdigit()


def soak(tmp_path, requests):
    text = open_text(write_tokenizer(tmp_path / "tok"))
    settings = LlmSettings(kv_tokens=160, policy=SchedulerPolicy(max_batch=4, token_budget=24, max_waiting=5))
    shared = [np.random.default_rng(n).integers(0, 37, 24).tolist() for n in range(3)]
    counts, errors, resident = {}, [], []
    lock, left = threading.Lock(), iter(range(requests))

    def caller(number):
        rng = np.random.default_rng(number)
        while True:
            with lock:
                if next(left, None) is None or errors:
                    return
            try:
                found, options = ask(llm, rng, shared)
                check(found, options)
                name = found.finish_reason
            except (DeadlineExceeded, QueueFull, PoolExhausted, InputError) as error:
                name = type(error).__name__
            except (AssertionError, EdgedsError, TimeoutError) as error:
                errors.append(error)
                return
            with lock:
                counts[name] = counts.get(name, 0) + 1
                if sum(counts.values()) % 250 == 0:
                    resident.append(resident_kib())

    with LlmPipeline(ToyEngine(), text=text, settings=settings) as llm:
        callers = [threading.Thread(target=caller, args=(number,)) for number in range(CALLERS)]
        for one in callers:
            one.start()
        for one in callers:
            one.join()
        if errors:
            raise errors[0]
        until = time.monotonic() + 5
        while llm.stats()["running"] and time.monotonic() < until:
            time.sleep(0.01)
        stats = llm.stats()
        pool = stats["kv"]
        assert (stats["waiting"], stats["running"]) == (0, 0)
        assert (pool.used, pool.shared, pool.sequences) == (0, 0, 0)
        assert pool.cached + pool.free == pool.pages
        llm._model.pool.drop_cache()
        assert llm.stats()["kv"].free == pool.pages, "no page is lost"
    return counts, pool, resident


def test_requests_of_all_kinds_leave_no_page_behind(tmp_path):
    counts, pool, _ = soak(tmp_path, 300)
    assert sum(counts.values()) == 300
    assert counts["length"] > 0
    assert counts["cancelled"] > 0
    assert pool.hit_tokens > 0


@pytest.mark.slow
def test_five_thousand_requests_in_flat_memory(tmp_path):
    counts, pool, resident = soak(tmp_path, 5000)
    assert sum(counts.values()) == 5000
    assert {"length", "stop", "cancelled", "DeadlineExceeded"} <= set(counts)
    assert pool.preemptions > 0
    first, last = np.mean(resident[4:8]), np.mean(resident[-4:])
    assert last - first < 20_000, f"resident memory went from {first:.0f} to {last:.0f} KiB"
