"""Perplexity (issue 7 part 2): equal to a plain computation, in any chunks, with and without eviction; bad input."""

import math

import numpy as np
import pytest
from decoders import write_decoder
from llmmodels import write_llm
from toyllm import VOCAB, ToyEngine, next_logits

from edgeds.engines import open_engine
from edgeds.errors import InputError, SpecError
from edgeds.graph.decoder import build_decoder
from edgeds.graph.decoder_feeds import prefill_feeds
from edgeds.graph.io import save_model
from edgeds.graph.session import open_session
from edgeds.pipelines.llm.model import LlmModel
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.report.perplexity import evaluate_language_model, measure_perplexity
from edgeds.workshop.llmpackage import create_llm_bundle


def toy(**options):
    return LlmModel(ToyEngine(**options), LlmSettings(kv_tokens=200))


def plain(tokens, window):
    """exp of the mean of -log softmax, one token after the other."""
    losses = []
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        for at in range(1, len(part)):
            logits = next_logits(part[:at]).astype(np.float64)
            losses.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[part[at]])
    return math.exp(np.mean(losses)), len(losses)


TOKENS = np.random.default_rng(0).integers(0, VOCAB - 2, 57).tolist()


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
@pytest.mark.parametrize("window", [7, 20, 100])
def test_equals_a_plain_computation_in_any_chunks(chunk, window):
    found = measure_perplexity(toy(), TOKENS, window=window, chunk=chunk, quiet=True)
    value, count = plain(TOKENS, window)
    assert found.value == pytest.approx(value, rel=1e-6)
    assert (found.tokens, found.windows) == (count, sum(len(TOKENS) - at > 1 for at in range(0, len(TOKENS), window)))


def test_the_pool_is_empty_afterwards_and_a_known_prefix_changes_nothing():
    model = toy()
    first = measure_perplexity(model, TOKENS, window=20, quiet=True)
    again = measure_perplexity(model, TOKENS, window=20, quiet=True)
    assert again.value == first.value
    stats = model.pool.stats()
    assert (stats.used, stats.sequences) == (0, 0)


def test_real_decoder_equals_one_run_over_the_window(tmp_path):
    write_decoder(tmp_path / "m")
    model = build_decoder(tmp_path / "m", page=8)
    tokens = np.random.default_rng(1).integers(0, 61, 40).tolist()
    logits = open_session(model).run(["logits"], prefill_feeds(model, [tokens], picks=range(40)))[0][0, :-1]
    logits = logits.astype(np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(39), tokens[1:]]
    with open_engine(save_model(model, tmp_path / "m.onnx"), threads=1) as engine:
        found = measure_perplexity(LlmModel(engine, LlmSettings(kv_tokens=64)), tokens, chunk=7, window=64, quiet=True)
    assert found.nll == pytest.approx(losses.mean(), rel=1e-4)


def test_eviction_forgets_and_needs_the_output_for_it():
    found = measure_perplexity(toy(mass=True), TOKENS, window=57, chunk=4, kv_budget=16, quiet=True)
    assert found.value != pytest.approx(plain(TOKENS, 57)[0], rel=1e-6)
    whole = measure_perplexity(toy(mass=True), TOKENS, window=57, chunk=4, kv_budget=80, quiet=True)
    assert whole.value == pytest.approx(plain(TOKENS, 57)[0], rel=1e-6)
    with pytest.raises(SpecError, match="created with eviction"):
        measure_perplexity(toy(), TOKENS, kv_budget=16, window=57, quiet=True)


def test_sizes_and_texts_that_cannot_be():
    for options in ({"window": 1}, {"window": 201}, {"window": 0}, {"chunk": 0}, {"chunk": True}):
        with pytest.raises(SpecError, match=r"window|chunk"):
            measure_perplexity(toy(), TOKENS, quiet=True, **{"window": 100, **options})
    for tokens in ([], [3]):
        with pytest.raises(InputError, match="at least two tokens"):
            measure_perplexity(toy(), tokens, window=100, quiet=True)


def test_a_bundle_is_measured_on_a_file(tmp_path):
    bundle = create_llm_bundle(write_llm(tmp_path / "m"), out=tmp_path / "b", weights="int8", quiet=True)
    text = tmp_path / "t.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 4)
    report = evaluate_language_model(bundle, text, limit=96, window=32, threads=1, quiet=True)
    assert report["metric"] == "perplexity"
    assert report["value"] == report["perplexity"] > 1
    assert (report["samples"], report["windows"], report["precision"]) == (93, 3, "int8")
    for content, words in ((b"\xff", "not UTF-8"), (b"", "two tokens")):
        text.write_bytes(content)
        with pytest.raises(InputError, match=words):
            evaluate_language_model(bundle, text, quiet=True)
    with pytest.raises(InputError, match="cannot be read"):
        evaluate_language_model(bundle, tmp_path / "none.txt", quiet=True)
    with pytest.raises(SpecError, match="at least two"):
        evaluate_language_model(bundle, text, limit=1, quiet=True)
