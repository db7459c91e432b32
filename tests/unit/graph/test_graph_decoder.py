"""The decoder builder (issue 7 part 1): parity with a plain reference and with transformers; paging changes nothing."""

import json

import numpy as np
import onnx
import pytest
from decoders import CONFIGS, PagedRun, reference_logits, write_decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.errors import ModelError, SpecError
from edgeds.graph.decoder import build_decoder
from edgeds.graph.decoder_config import read_decoder_config, rope_frequencies
from edgeds.graph.io import input_specs, output_specs


def frequencies(config, tmp_path):
    rope = read_decoder_config(config, tmp_path / "config.json").rope
    return np.array(rope.frequencies), rope.attention_factor


def tokens_of(config, count, seed=0):
    return np.random.default_rng(seed).integers(0, config["vocab_size"], count).tolist()


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_prefill_gives_the_logits_of_the_reference(tmp_path, kind):
    config, tensors = write_decoder(tmp_path / "m", kind)
    model = build_decoder(tmp_path / "m", page=4)
    onnx.checker.check_model(model, full_check=True)
    tokens = tokens_of(config, 13)
    found = PagedRun(model, rows=1).step([tokens], picks=[list(range(13))])["logits"][0]
    freqs, factor = frequencies(config, tmp_path)
    expected = reference_logits(config, tensors, tokens, freqs, factor=factor)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_opset_21_gives_what_opset_17_gives(tmp_path, kv):
    config, _ = write_decoder(tmp_path / "m")
    tokens = tokens_of(config, 9)
    found = []
    for opset in (17, 21):
        model = build_decoder(tmp_path / "m", page=4, kv=kv, attention_mass=True, opset=opset)
        onnx.checker.check_model(model, full_check=True)
        run = PagedRun(model, rows=1)
        run.step([tokens[:6]])
        found.append(run.step([tokens[6:]]))
    for name in ("logits", "attention_mass"):
        np.testing.assert_allclose(found[1][name], found[0][name], atol=1e-5)
    with pytest.raises(SpecError, match="opset 16"):
        build_decoder(tmp_path / "m", opset=16)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("chunks", [[1] * 13, [5, 1, 4, 3], [4, 4, 5], [12, 1]])
def test_chunks_and_single_steps_give_what_one_run_gives(tmp_path, kind, chunks):
    config, tensors = write_decoder(tmp_path / "m", kind)
    run = PagedRun(build_decoder(tmp_path / "m", page=4), rows=1)
    tokens = tokens_of(config, 13)
    freqs, factor = frequencies(config, tmp_path)
    expected = reference_logits(config, tensors, tokens, freqs, factor=factor)
    at = 0
    for size in chunks:
        found = run.step([tokens[at : at + size]], picks=[list(range(size))])["logits"][0]
        np.testing.assert_allclose(found, expected[at : at + size], atol=2e-4 * np.abs(expected).max())
        at += size


@given(st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_rows_of_a_batch_do_not_know_of_each_other(model_of_llama, seed):
    """B99: rows of different length, padded at the right, each with positions of its own."""
    config, tensors, model, freqs = model_of_llama
    rng = np.random.default_rng(seed)
    texts = [tokens_of(config, int(rng.integers(1, 15)), seed=seed + row) for row in range(3)]
    run = PagedRun(model, rows=3, seed=seed)
    done = [0, 0, 0]
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        sizes = [int(min(rng.integers(0, 6), len(text) - at)) for at, text in zip(done, texts, strict=True)]
        if not any(sizes):
            continue
        outputs = run.step([text[at : at + size] for text, at, size in zip(texts, done, sizes, strict=True)])
        for row, size in enumerate(sizes):
            done[row] += size
            if size:
                expected = reference_logits(config, tensors, texts[row][: done[row]], freqs)[-1]
                found = outputs["logits"][row, 0]
                np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.fixture(scope="module")
def model_of_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    config, tensors = write_decoder(folder / "m")
    return config, tensors, build_decoder(folder / "m", page=4), rope_frequencies(8, 10000.0)


def test_guesses_that_failed_leave_nothing_behind(model_of_llama):
    """Verification runs several tokens; only those that held are kept, and the next run is as if nothing happened."""
    config, tensors, model, freqs = model_of_llama
    tokens = tokens_of(config, 10)
    run = PagedRun(model, rows=1)
    run.step([tokens[:6]])
    run.step([[tokens[6], 3, 3, 3]], picks=[[0, 1, 2, 3]], keep=[1])
    found = run.step([tokens[7:]])["logits"][0, 0]
    expected = reference_logits(config, tensors, tokens, freqs)[-1]
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("kv", "limit"), [("float16", 2e-3), ("int8", 3e-2)])
def test_narrow_caches_are_close(tmp_path, kv, limit):
    config, tensors = write_decoder(tmp_path / "m")
    run = PagedRun(build_decoder(tmp_path / "m", page=4, kv=kv), rows=1)
    tokens = tokens_of(config, 12)
    for token in tokens[:-1]:
        run.step([[token]])
    found = run.step([tokens[-1:]])["logits"][0, 0]
    expected = reference_logits(config, tensors, tokens, rope_frequencies(8, 10000.0))[-1]
    assert np.abs(found - expected).max() < limit * np.abs(expected).max()


def test_attention_mass_is_what_the_queries_spent_on_cached_tokens(tmp_path):
    config, _ = write_decoder(tmp_path / "m")
    run = PagedRun(build_decoder(tmp_path / "m", page=4, attention_mass=True), rows=2)
    first = tokens_of(config, 6)
    outputs = run.step([first, first[:3]])
    assert outputs["attention_mass"].shape == (2, 1, 4)
    assert not outputs["attention_mass"].any(), "nothing was cached"
    mass = run.step([[5, 6, 7], [5]])["attention_mass"].reshape(2, -1)
    assert np.all(mass[0, 6:] == 0)
    assert np.all(mass[1, 3:] == 0)
    assert 0 < mass[0].sum() < 3
    assert 0 < mass[1].sum() < 1, "padded queries do not count"
    alone = PagedRun(build_decoder(tmp_path / "m", page=4, attention_mass=True), rows=1, seed=5)
    alone.step([first[:3]])
    np.testing.assert_allclose(alone.step([[5]])["attention_mass"].reshape(-1)[:3], mass[1, :3], atol=1e-5)


def test_inputs_outputs_and_metadata(tmp_path):
    write_decoder(tmp_path / "m")
    model = build_decoder(tmp_path / "m", page=16, kv="int8")
    specs = {spec.name: (spec.dtype, spec.shape) for spec in input_specs(model)}
    assert specs["input_ids"] == ("int64", ("batch", "step"))
    assert specs["k_pages.1"] == ("int8", ("pages", 2, 8, 16))
    assert specs["v_pages.0"] == ("int8", ("pages", 2, 16, 8))
    assert specs["k_scale.0"] == ("float16", ("pages", 2, 16))
    assert [spec.name for spec in output_specs(model)] == ["k_new.0", "v_new.0", "k_new.1", "v_new.1", "logits"]
    props = {item.key: item.value for item in model.metadata_props}
    assert props["edgeds.task"] == "generate"
    assert json.loads(props["edgeds.eos"]) == [2]
    assert props["edgeds.kv_dtype"] == "int8"


def test_the_least_limit_of_length_counts(tmp_path):
    """B101: the effective limit is the least of the documented ones, and all are listed."""
    write_decoder(tmp_path / "m", max_position_embeddings=64)
    props = {item.key: item.value for item in build_decoder(tmp_path / "m").metadata_props}
    assert props["edgeds.max_length"] == "64"
    assert json.loads(props["edgeds.limits"]) == {"max_position_embeddings": 64}


def test_end_tokens_come_from_the_generation_config(tmp_path):
    write_decoder(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    props = {item.key: item.value for item in build_decoder(tmp_path / "m").metadata_props}
    assert json.loads(props["edgeds.eos"]) == [7, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2.*supported are llama"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope.*known"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": "yes"}, "expected an object"),
        ({"num_hidden_layers": 3}, r"no tensor 'model\.layers\.2"),
        ({"vocab_size": 60}, "config.json makes it"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_built_is_named(tmp_path, changes, message):
    write_decoder(tmp_path / "m")
    config = {**json.loads((tmp_path / "m" / "config.json").read_text()), **changes}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        build_decoder(tmp_path / "m")


def test_options_are_checked(tmp_path):
    write_decoder(tmp_path / "m")
    with pytest.raises(SpecError, match="page"):
        build_decoder(tmp_path / "m", page=0)
    with pytest.raises(SpecError, match="choose one of"):
        build_decoder(tmp_path / "m", kv="fp8")


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_parity_with_transformers(tmp_path, kind):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, _ = write_decoder(tmp_path / "m", kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval().float()
    tokens = tokens_of(config, 40)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    found = PagedRun(build_decoder(tmp_path / "m", page=8), rows=1).step([tokens], picks=[list(range(40))])["logits"][0]
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
