"""Weight-only decoders (issue 7 part 2): both forms compute what the rounded weights say; blocks, head, embedding."""

import numpy as np
import onnx
import pytest
from decoders import write_decoder

from edgeds.compress import llm_weights
from edgeds.compress.llm_weights import (
    PER_CHANNEL,
    Rounding,
    collect_hessians,
    linear_layers,
    quantize_weights,
    to_cpu_form,
    to_tensorrt_form,
)
from edgeds.errors import CalibrationError, SpecError
from edgeds.graph.decoder import build_decoder
from edgeds.graph.decoder_feeds import prefill_feeds
from edgeds.graph.session import open_session
from edgeds.graph.view import GraphView

TOKENS = [5, 9, 3, 60, 12, 7, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    write_decoder(folder, "llama", hidden_size=64, intermediate_size=96)
    return build_decoder(folder, page=8)


def logits(model, tokens=TOKENS):
    feeds = prefill_feeds(model, [tokens], picks=range(len(tokens)))
    return open_session(model, optimize=False).run(["logits"], feeds)[0][0]


def rounded(model, *, samples=None, **how):
    return quantize_weights(model, [Rounding(**how)], samples=samples, quiet=True)[0]


def with_rounded_weights(model, quantized):
    """The same graph with weights that were rounded and widened again: what both forms have to compute."""
    view = GraphView(model)
    for node in linear_layers(view):
        weight = quantized.weights.get(node.name)
        if weight is not None:
            view.set_constant(node.input[1], weight.dequantized().T)
    return view.finish()


@pytest.mark.parametrize(("bits", "group"), [(8, PER_CHANNEL), (8, 32), (4, 32), (4, 16)])
def test_the_tensorrt_form_computes_with_the_rounded_weights(model, bits, group):
    quantized = rounded(model, bits=bits, group=group, head_group=PER_CHANNEL)
    made = to_tensorrt_form(model, quantized)
    onnx.checker.check_model(made, full_check=True)
    expected = logits(with_rounded_weights(model, quantized))
    # The looked up table is float16.
    np.testing.assert_allclose(logits(made), expected, atol=3e-3 * np.abs(expected).max())
    kinds = [node.op_type for node in made.graph.node]
    assert kinds.count("DequantizeLinear") == 15
    per_channel = [node for node in made.graph.node if node.op_type == "DequantizeLinear" and len(node.input) == 3]
    assert len(per_channel) == (15 if group == PER_CHANNEL else 1), "TensorRT takes blocks of INT4 only"


@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (4, True), (4, False)])
def test_the_cpu_form_computes_with_the_rounded_weights(model, monkeypatch, bits, symmetric):
    monkeypatch.setattr(llm_weights, "_ACCURACY_LEVEL", 1)  # float activations, so that only weights are compared
    quantized = rounded(model, bits=bits, group=32, symmetric=symmetric)
    made = to_cpu_form(model, quantized)
    expected = logits(with_rounded_weights(model, quantized))
    np.testing.assert_allclose(logits(made), expected, atol=3e-3 * np.abs(expected).max())
    nodes = [node for node in made.graph.node if node.op_type == "MatMulNBits"]
    assert len(nodes) == 15
    widths = {node.name: next(a.i for a in node.attribute if a.name == "bits") for node in nodes}
    assert widths.pop("lm_head") == 8
    assert set(widths.values()) == {bits}


def test_int8_stays_close_to_float(model):
    quantized = rounded(model, bits=8)
    found, expected = logits(to_cpu_form(model, quantized)), logits(model)
    assert np.square(found - expected).mean() < 3e-3 * np.square(expected).mean()


def test_layers_that_do_not_divide_into_groups_are_left_and_named(model):
    quantized = rounded(model, bits=4, group=64)  # 96 inputs of the down projections
    assert len(quantized.left) == 2
    assert all("mlp.down_proj" in name and "96 inputs" in why for name, why in quantized.left)
    made = to_tensorrt_form(model, quantized)
    assert [node.op_type for node in made.graph.node].count("DequantizeLinear") == 13
    logits(made)


def test_samples_make_up_for_rounding(model):
    rng = np.random.default_rng(0)
    samples = [prefill_feeds(model, [rng.integers(0, 61, 40)]) for _ in range(8)]
    fitted = rounded(model, samples=samples, bits=4)
    plain = rounded(model, bits=4)
    view = GraphView(model)
    name = next(node for node in linear_layers(view) if node.name.endswith("gate_proj"))
    hessian = collect_hessians(model, [name.input[0]], samples, quiet=True)[name.input[0]]
    weight = view.constant(name.input[1]).T

    def lost(found):
        error = found.weights[name.name].dequantized() - weight
        return np.einsum("oi,ij,oj->", error, hessian, error)

    assert lost(fitted) < 0.9 * lost(plain)


def test_several_forms_from_one_pass_are_those_of_passes_of_their_own(model):
    runs = []

    def samples():
        runs.append(1)
        yield prefill_feeds(model, [TOKENS])

    class Again:
        def __iter__(self):
            return samples()

    how = [Rounding(bits=4), Rounding(bits=4, group=16, symmetric=False)]
    both = quantize_weights(model, how, samples=Again(), quiet=True)
    assert len(runs) == 1
    for one, found in zip(how, both, strict=True):
        alone = quantize_weights(model, [one], samples=Again(), quiet=True)[0]
        for name, weight in alone.weights.items():
            np.testing.assert_array_equal(found.weights[name].values, weight.values)


def test_statistics_are_sums_over_all_tokens(model):
    samples = [prefill_feeds(model, [TOKENS]), prefill_feeds(model, [TOKENS[:2]])]
    view = GraphView(model)
    name = linear_layers(view)[0].input[0]
    found = collect_hessians(model, [name], iter(samples), quiet=True)[name]
    rows = np.concatenate([open_session(model, outputs=[name]).run([name], feeds)[0][0] for feeds in samples])
    np.testing.assert_allclose(found, rows.T @ rows, rtol=1e-4)


def test_several_passes_give_what_one_gives(model, monkeypatch):
    samples = [prefill_feeds(model, [TOKENS])]
    whole = rounded(model, samples=samples, bits=4)
    monkeypatch.setattr(llm_weights, "MAX_HESSIAN_BYTES", 100_000)
    parts = rounded(model, samples=samples, bits=4)
    assert list(parts.weights) == list(whole.weights)
    for name, weight in whole.weights.items():
        np.testing.assert_array_equal(parts.weights[name].values, weight.values)


def test_impossible_choices_are_one_sentence(model):
    for options in ({"bits": 5}, {"bits": 4, "group": 24}, {"bits": 4, "group": 8}, {"bits": 4, "head_bits": 2}):
        with pytest.raises(SpecError, match="expected"):
            Rounding(**options)
    with pytest.raises(CalibrationError, match="none"):
        rounded(model, samples=[], bits=4)
