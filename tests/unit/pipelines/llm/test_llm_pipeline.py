"""Generation from outside (issue 7 part 4): streams, threads, coroutines, cancelling, true reasons, errors, drafts."""

import asyncio
import threading
import time

import numpy as np
import pytest
from toyllm import END, LETTERS, VOCAB, ToyEngine, metadata, silent, write_tokenizer

from edgeds.errors import InputError, ModelError, QueueFull, SessionClosed, SpecError
from edgeds.pipelines.llm.options import SamplingOptions
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.pipelines.llm.scheduler import SchedulerPolicy
from edgeds.pipelines.llm.settings import LlmSettings

pytest.importorskip("tokenizers")

from edgeds.pipelines.llm.text import open_text


def letters(tokens):
    return "".join(" " if LETTERS[token] == "Ġ" else LETTERS[token] for token in tokens)


def expected(pipeline, prompt, count):
    tokens = pipeline.encode(prompt)
    start = len(tokens)
    for _ in range(count):
        tokens.append(int(silent(tokens).argmax()))
    return letters(tokens[start:])


@pytest.fixture
def text(tmp_path):
    return open_text(write_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture
def llm(text):
    with LlmPipeline(ToyEngine(say=silent), text=text, settings=LlmSettings(kv_tokens=400)) as pipeline:
        yield pipeline


def test_generate_gives_text_counts_and_a_true_reason(llm):
    done = llm.generate("hello world", max_tokens=9)
    assert done.text == expected(llm, "hello world", 9)
    assert done.finish_reason == "length"
    assert (done.prompt_tokens, done.completion_tokens) == (11, 9)
    assert done.ttft_ms > 0
    assert done.tokens_per_s > 0
    assert len(done.tokens) == 9


def test_a_stream_gives_the_same_text_in_pieces(llm):
    deltas = list(llm.stream("hello", max_tokens=12))
    assert "".join(delta.text for delta in deltas) == expected(llm, "hello", 12)
    assert deltas[-1].finish_reason == "length"
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert len(deltas) > 5


def test_stop_strings_end_the_text_and_are_not_part_of_it(llm):
    whole = expected(llm, "hello", 20)
    stop = whole[7:10]
    done = llm.generate("hello", max_tokens=20, stop=(stop,))
    assert done.text == whole[: whole.index(stop)]
    assert done.finish_reason == "stop"
    assert done.stop == stop


def test_end_tokens_of_the_model_end_the_text(text):
    def ends_soon(tokens, places):
        logits = silent(tokens, places)
        if len(tokens) == 8:
            logits[END] = 50.0
        return logits

    with LlmPipeline(ToyEngine(say=ends_soon), text=text) as llm:
        done = llm.generate("hello", max_tokens=30)
        assert done.finish_reason == "stop"
        assert done.stop == END
        assert done.completion_tokens == 4
        assert "<end>" not in done.text
        longer = llm.generate("hello", max_tokens=6, ignore_eos=True)
        assert longer.finish_reason == "length"


def test_many_threads_get_what_they_would_get_alone(llm):
    prompts = [f"number {index}" for index in range(16)]
    found = {}

    def ask(prompt):
        found[prompt] = llm.generate(prompt, max_tokens=10).text

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for prompt in prompts:
        assert found[prompt] == expected(llm, prompt, 10)


def test_generate_all_keeps_the_order(llm):
    prompts = ["one", "twenty two", "three"]
    assert [done.text for done in llm.generate_all(prompts, max_tokens=5)] == [expected(llm, p, 5) for p in prompts]


def test_coroutines_stream_side_by_side(llm):
    async def ask(prompt):
        return "".join([delta.text async for delta in llm.stream(prompt, max_tokens=8)])

    async def all_of_them():
        return await asyncio.gather(
            *(ask(f"text {index}") for index in range(5)), llm.generate_async("x", max_tokens=3)
        )

    *texts, done = asyncio.run(all_of_them())
    assert texts == [expected(llm, f"text {index}", 8) for index in range(5)]
    assert done.text == expected(llm, "x", 3)


def slow(tokens, places):
    time.sleep(0.005)
    return silent(tokens, places)


def test_cancelling_a_stream_frees_its_pages(text):
    """B108: read three pieces, stop; within two tokens nothing is computed any more."""
    with LlmPipeline(ToyEngine(say=slow), text=text) as llm:
        stream = llm.stream("hello", max_tokens=150)
        for seen, _ in enumerate(stream, 1):
            if seen == 3:
                stream.cancel()
        done = stream.result()
        assert done.finish_reason == "cancelled"
        assert done.completion_tokens < 20
        assert llm.stats()["kv"].used == 0
        assert llm.generate("again", max_tokens=3).finish_reason == "length"


def test_cancelling_a_coroutine_cancels_its_request(text):
    with LlmPipeline(ToyEngine(say=slow), text=text) as llm:

        async def main():
            task = asyncio.create_task(llm.generate_async("hello", max_tokens=150))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        for _ in range(200):
            if llm.stats()["running"] == 0:
                break
            time.sleep(0.01)
        assert llm.stats()["kv"].used == 0


def test_closing_ends_what_runs(text):
    llm = LlmPipeline(ToyEngine(say=slow), text=text)
    stream = llm.stream("hello", max_tokens=150)
    time.sleep(0.05)
    llm.close()
    llm.close()
    with pytest.raises(SessionClosed):
        stream.result(10)
    with pytest.raises(SessionClosed):
        llm.generate("again")


def test_messages_go_through_the_models_template(llm):
    messages = [{"role": "user", "content": "hello"}]
    assert llm.encode(messages) == llm.text.encode("u hello.a ")
    assert llm.generate(messages, max_tokens=5).text == expected(llm, "u hello.a ", 5)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("", {}, InputError, "empty"),
        ([], {}, InputError, "empty"),
        ([1, 99], {}, InputError, "token 99"),
        ([1, "x"], {}, InputError, "token ids, or messages"),
        ([{"role": "king", "content": "x"}], {}, InputError, "king"),
        ("x" * 500, {"max_tokens": 1}, InputError, "holds 200"),
        ("x", {"max_tokens": 10_000}, InputError, "at most 199"),
        ("x", {"temprature": 1}, SpecError, "temprature"),
        ("x", {"top_p": 2.0}, SpecError, "top_p"),
    ],
)
def test_bad_requests_are_refused_at_once_with_a_sentence(llm, prompt, options, error, message):
    with pytest.raises(error, match=message):
        llm.generate(prompt, **options)
    assert llm.generate("fine", max_tokens=2).finish_reason == "length"


def test_too_many_waiting_requests_are_refused(text):
    settings = LlmSettings(policy=SchedulerPolicy(max_batch=1, max_waiting=2))
    with LlmPipeline(ToyEngine(say=slow), text=text, settings=settings) as llm:
        streams = [llm.stream("hello", max_tokens=100)]
        for _ in range(200):
            if llm.stats()["running"]:
                break
            time.sleep(0.01)
        streams += [llm.stream("hello", max_tokens=100) for _ in range(2)]
        with pytest.raises(QueueFull):
            llm.stream("hello", max_tokens=100)
        for stream in streams:
            stream.cancel()


def test_seeds_make_sampling_reproducible(llm):
    options = {"temperature": 1.0, "top_k": 20, "max_tokens": 15}
    first, again = (llm.generate("hello", seed=7, **options).text for _ in range(2))
    assert first == again
    assert llm.generate("hello", seed=8, **options).text != first


def test_logprobs_are_those_of_the_model(llm):
    done = llm.generate("hello", max_tokens=3, logprobs=2)
    tokens = llm.encode("hello")
    logits = silent(tokens).astype(np.float64)
    logits -= logits.max() + np.log(np.exp(logits - logits.max()).sum())
    assert done.logprobs[0].logprob == pytest.approx(logits.max(), abs=1e-5)
    assert len(done.logprobs) == 3
    assert len(done.logprobs[0].top_logprobs) == 2


def test_a_regular_expression_guides(llm):
    pytest.importorskip("llguidance")
    done = llm.generate("hello", max_tokens=20, regex="[0-9]{4}\\.")
    assert len(done.text) == 5
    assert done.text[:4].isdigit()
    assert done.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_from_the_text_itself(text, temperature):
    def echo(tokens, places):
        logits = np.full(VOCAB, -20.0, np.float32)
        logits[(int(tokens[-1]) + 1) % 12] = 5.0
        return logits

    plain = LlmPipeline(ToyEngine(say=echo), text=text)
    fast = LlmPipeline(ToyEngine(say=echo), text=text, settings=LlmSettings(speculate="lookup"))
    with plain, fast:
        prompt = letters([i % 12 for i in range(30)])
        slow_done = plain.generate(prompt, max_tokens=60, temperature=temperature, seed=3)
        done = fast.generate(prompt, max_tokens=60, temperature=temperature, seed=3)
        assert done.text == slow_done.text
        assert done.accepted > 30
        assert fast.engine.runs < plain.engine.runs / 2
        assert fast.generate(prompt, max_tokens=5, speculate=False).drafted == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_that_mostly_agrees(text, temperature):
    def nearly(tokens, places):
        logits = silent(tokens, places)
        return np.roll(logits, 1) if len(tokens) % 5 == 0 else logits

    target, draft = ToyEngine(say=silent), ToyEngine(say=nearly)
    with LlmPipeline(target, text=text, draft=draft) as llm:
        for prompt in ("hello", "hello world", "once more"):
            done = llm.generate(prompt, max_tokens=40, temperature=temperature, seed=1)
            assert done.finish_reason == "length"
            assert 0 < done.accepted < done.drafted
            if temperature == 0:
                assert done.text == expected(llm, prompt, 40)
        assert llm._draft.pool.stats().used == 0
        assert target.runs < 120 * 0.8


def test_a_draft_model_with_too_small_a_cache_only_costs_the_speed(text):
    with LlmPipeline(ToyEngine(say=silent), text=text, draft=ToyEngine(say=silent)) as llm:
        llm._draft.pool.open([1] * 8, reserve=llm._draft.pool.stats().pages * 4)
        assert llm.generate("hello", max_tokens=20).text == expected(llm, "hello", 20)


def test_a_draft_model_of_another_vocabulary_is_refused(text):
    draft = ToyEngine()
    draft.metadata = {**metadata(), "edgeds.vocab_size": "41"}
    with pytest.raises(ModelError, match="41 tokens"):
        LlmPipeline(ToyEngine(), text=text, draft=draft)


def test_a_budget_of_cached_tokens_lets_texts_grow_past_the_cache(text):
    settings = LlmSettings(kv_tokens=48, kv_budget=32)
    with LlmPipeline(ToyEngine(say=silent, mass=True), text=text, settings=settings) as llm:
        done = llm.generate("hello", max_tokens=120)
        assert done.finish_reason == "length"
        assert done.evicted_tokens > 80
    with pytest.raises(SpecError, match="attention_mass"):
        LlmPipeline(ToyEngine(), text=text, settings=settings)


def test_models_and_tokenizers_that_do_not_belong_together_are_refused(text):
    engine = ToyEngine()
    engine.metadata = {**metadata(), "edgeds.vocab_size": "5000"}
    with pytest.raises(ModelError, match="belong together"):
        LlmPipeline(engine, text=text)
    engine.metadata = {}
    with pytest.raises(ModelError, match="metadata"):
        LlmPipeline(engine, text=text)


def test_options_may_be_given_whole_and_changed(llm):
    base = SamplingOptions(max_tokens=4)
    assert llm.generate("hello", options=base).completion_tokens == 4
    assert llm.generate("hello", options=base, max_tokens=6).completion_tokens == 6


def test_deadlines_end_requests(text):
    from edgeds.errors import DeadlineExceeded

    with LlmPipeline(ToyEngine(say=slow), text=text) as llm:
        stream = llm.stream("hello", max_tokens=150, deadline_ms=80)
        with pytest.raises(DeadlineExceeded, match="of at most 150"):
            stream.result(20)
        assert llm.stats()["kv"].used == 0


def test_b101_the_limit_that_holds_is_told_at_load(text, caplog):
    engine = ToyEngine()
    engine.metadata |= {"edgeds.max_length": "64", "edgeds.limits": '{"max_position_embeddings": 128, "model_max": 64}'}
    with LlmPipeline(engine, text=text) as llm:
        assert llm.context == 64
        with pytest.raises(InputError, match="context holds 64"):
            llm.generate("a" * 70)
    assert "64 tokens, the least of the model's limits: model_max 64, max_position_embeddings 128" in caplog.text
    caplog.clear()
    with LlmPipeline(ToyEngine(), text=text):
        pass
    assert not caplog.records


@pytest.mark.parametrize("broken", [{"edgeds.eos": "["}, {"edgeds.eos": "7"}, {"edgeds.limits": "[1]"}])
def test_broken_metadata_is_one_sentence(text, broken):
    engine = ToyEngine()
    engine.metadata |= broken
    with pytest.raises(ModelError, match="not a decoder that edgeds built"):
        LlmPipeline(engine, text=text)
