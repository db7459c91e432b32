"""Language-model bench (issue 7 part 7): counts that must be, occupancy, guesses, interruption, impossible loads."""

import signal
import threading

import pytest
from toyllm import ToyEngine, silent, write_tokenizer

from edgeds.errors import InputError, SpecError
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.pipelines.llm.text import open_text
from edgeds.report.llmbench import LlmLoad, run_llm_bench

pytest.importorskip("tokenizers")


class NamedToy(ToyEngine):
    backend, fallback_reason, precision, threads = "toy", None, "float", 1


@pytest.fixture
def pipeline(tmp_path):
    text = open_text(write_tokenizer(tmp_path / "tok"))
    with LlmPipeline(NamedToy(say=silent), text=text, settings=LlmSettings(kv_tokens=400)) as found:
        yield found


def bench(pipeline, *, speculate=None, **load):
    return run_llm_bench(pipeline, LlmLoad(seconds=0.3, warmup_s=0.1, **load), speculate=speculate, quiet=True)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_counts_are_those_of_the_load(pipeline, concurrency):
    report = bench(pipeline, prompt_tokens=10, output_tokens=6, concurrency=concurrency)
    assert report.requests >= 1
    assert (report.prompt_tokens, report.output_tokens) == (10 * report.requests, 6 * report.requests)
    assert report.finish_reasons == {"length": report.requests}
    assert report.tokens_per_s == pytest.approx(report.output_tokens / report.wall_s)
    for spread in (report.ttft_ms, report.itl_ms, report.total_ms):
        assert 0 <= spread.p50 <= spread.p90 <= spread.p95 <= spread.p99
    assert report.ttft_ms.mean + 5 * report.itl_ms.mean == pytest.approx(report.total_ms.mean, rel=0.2)
    assert 0 <= report.kv_mean_share <= report.kv_peak_share <= 1
    assert report.kv_tokens == 400
    assert (report.cached_tokens, report.drafted, report.interrupted) == (0, 0, False)
    assert report.power_w is None
    assert report.power_source.startswith("unavailable")


def test_a_shared_prefix_is_computed_once(pipeline):
    report = bench(pipeline, prompt_tokens=20, shared_prefix=16, output_tokens=2)
    assert report.cached_tokens >= 16 * (report.requests - 1)


def test_guesses_are_counted(pipeline):
    report = bench(pipeline, prompt_tokens=60, output_tokens=30, speculate=True)
    assert report.drafted >= report.accepted >= 0
    assert report.drafted > 0


def test_interruption_gives_what_there_was_and_ends_the_requests(pipeline):
    timer = threading.Timer(0.4, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    report = run_llm_bench(
        pipeline, LlmLoad(seconds=60, warmup_s=0.1, prompt_tokens=5, output_tokens=5, concurrency=2), quiet=True
    )
    assert report.interrupted
    assert report.wall_s < 5
    pipeline.generate("a", max_tokens=1)  # and it still works
    assert pipeline.stats()["kv"].sequences == 0


def test_loads_that_cannot_be(pipeline):
    for wrong in (
        {"prompt_tokens": 0},
        {"output_tokens": 0},
        {"concurrency": 0},
        {"concurrency": 5000},
        {"shared_prefix": 200},
        {"seconds": 0},
        {"warmup_s": -1},
    ):
        with pytest.raises(SpecError):
            LlmLoad(**wrong)
    with pytest.raises(InputError, match="together 300"):
        bench(pipeline, prompt_tokens=250, output_tokens=50)
