"""Finding, comparing and dropping the layers of a transformer (issue 5 part 2)."""

import numpy as np
import onnx
import pytest
from compress_models import relative, run
from hypothesis import given, settings
from hypothesis import strategies as st
from transformer_models import bert, decoder, texts

from edgeds.compress.group_axes import concrete_shapes
from edgeds.compress.heads import made_up_samples, prune_transformer
from edgeds.compress.layerdrop import choose_layers, drop_layers, find_layers
from edgeds.compress.shape_fold import fold_shapes
from edgeds.errors import CalibrationError, SpecError
from edgeds.graph.view import GraphView


def layers_of(model):
    view = GraphView(fold_shapes(model))
    return view.model, *find_layers(view, concrete_shapes(view.model))


def attentions(model):
    return sum(node.op_type == "Softmax" for node in model.graph.node)


def silenced(make, index):
    """A model in which one layer adds nothing: its output projections and their biases are zero."""
    view = GraphView(make(dead={index: range(4)}, gone={index: range(24)}))
    for node in view.nodes:
        weight = view.constant(node.input[1]) if node.op_type == "MatMul" else None
        if weight is None or weight.any():
            continue
        for reader in view.consumers(node.output[0]):
            for name in reader.input:
                if view.is_constant(name):
                    view.set_constant(name, np.zeros(view.shape(name), np.float32))
    return view.finish()


@pytest.mark.parametrize(
    "make",
    [
        bert,
        lambda **options: bert(pre=True, **options),
        lambda **options: bert(form="pack_first", **options),
        decoder,
    ],
    ids=["post", "pre", "packed", "decoder"],
)
def test_every_layer_can_go(make):
    model, found, protected = layers_of(make(layers=4))
    assert [layer.index for layer in found] == [0, 1, 2, 3]
    assert not protected
    assert [a.end for a in found[:-1]] == [b.start for b in found[1:]]
    for gone in ([found[0]], [found[3]], [found[1], found[2]], [found[0], found[2], found[3]]):
        shorter = drop_layers(model, gone)
        onnx.checker.check_model(shorter, full_check=True)
        assert attentions(shorter) == 4 - len(gone)
        fed = texts(batch=3, length=7)
        assert [a.shape for a in run(model, fed)] == [b.shape for b in run(shorter, fed)]


def test_dropping_the_last_layers_is_the_shorter_model():
    """The first layers are built from the same seed, so a model of two layers is what four without the last two are."""
    long, found, _ = layers_of(bert(5, layers=4))
    shorter = drop_layers(long, found[2:])
    fed = texts(2)
    assert relative(run(bert(5, layers=2), fed)[0], run(shorter, fed)[0]) < 1e-6


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 3), st.integers(0, 40), st.sampled_from(["bert", "decoder"]))
def test_a_layer_that_adds_nothing_goes_first_and_unseen(index, seed, kind):
    def make(**options):
        return bert(seed, layers=4, pre=True, **options) if kind == "bert" else decoder(seed, layers=4, **options)

    model, found, _ = layers_of(silenced(make, index))
    gone, costs = choose_layers(model, found, [texts(seed) for seed in range(3)], count=1, quiet=True)
    assert [layer.index for layer in gone] == [index]
    assert [cost.layer for cost in costs if cost.dropped] == [index]
    assert costs[index].cosine > 1 - 1e-9
    fed = texts(9)
    assert relative(run(model, fed)[0], run(drop_layers(model, gone), fed)[0]) < 1e-5


def test_costs_say_what_each_layer_alone_does():
    model, found, _ = layers_of(bert(1, layers=3))
    fed = [texts(seed) for seed in range(4)]
    _, costs = choose_layers(model, found, fed, count=1, quiet=True)
    for layer, cost in zip(found, costs, strict=True):
        want = np.concatenate([run(model, feed)[0].ravel() for feed in fed]).astype(np.float64)
        have = np.concatenate([run(drop_layers(model, [layer]), feed)[0].ravel() for feed in fed]).astype(np.float64)
        error = np.square(want - have).sum()
        assert cost.sqnr_db == pytest.approx(10 * np.log10(np.square(want).sum() / error), abs=1e-3)
        assert cost.cosine == pytest.approx(want @ have / np.linalg.norm(want) / np.linalg.norm(have), abs=1e-5)
    best = max(costs, key=lambda cost: cost.sqnr_db)
    assert [cost.layer for cost in costs if cost.dropped] == [best.layer]


def test_layers_with_outputs_inside_stay_and_are_named():
    _, found, protected = layers_of(decoder(layers=3, cache=True))
    assert not found
    assert all("is used outside, or is an output" in item.reason for item in protected)


def test_why_no_layer_can_go_is_said(tmp_path):
    onnx.save(decoder(layers=3, cache=True), tmp_path / "m.onnx")
    with pytest.raises(SpecError, match=r"0 of 3 layers can be dropped.*is used outside, or is an output"):
        prune_transformer(tmp_path / "m.onnx", out=tmp_path / "o.onnx", layers=1, quiet=True)


def test_a_single_layer_stays():
    _, found, protected = layers_of(bert(layers=1))
    assert not found
    assert "not clear" in protected[0].reason


def test_samples_that_do_not_run_are_named():
    model, found, _ = layers_of(bert(layers=3))
    with pytest.raises(CalibrationError, match="does not run"):
        choose_layers(model, found, [{"input_ids": np.zeros((1, 2), np.float32)}], count=1, quiet=True)


def test_made_up_samples_index_their_tables():
    fed = made_up_samples(bert())
    assert all(item["input_ids"].max() < 30 for item in fed)
    assert max(item["input_ids"].max() for item in fed) > 10
    assert all((item["attention_mask"] == 1).all() for item in fed)


def test_dropped_without_samples_says_so(tmp_path):
    onnx.save(bert(layers=3), tmp_path / "m.onnx")
    report = prune_transformer(tmp_path / "m.onnx", out=tmp_path / "o.onnx", layers=1, heads=0.25, quiet=True)
    assert report.layers_measured_on == "made-up samples"
    assert any("--calib" in note for note in report.notes)
    assert report.cosine is None
    assert len(report.heads) == 2
    assert attentions(onnx.load(tmp_path / "o.onnx")) == 2


def test_samples_re_solve_what_is_left_after_a_layer(tmp_path):
    onnx.save(bert(7, layers=3), tmp_path / "m.onnx")
    fed = [texts(seed, batch=4, length=10) for seed in range(8)]
    report = prune_transformer(tmp_path / "m.onnx", out=tmp_path / "o.onnx", layers=1, calibration=fed, quiet=True)
    alone = next(cost for cost in report.layers if cost.dropped)
    assert report.layers_measured_on == "calibration samples"
    assert report.reconstructed > 0
    assert report.sqnr_db > alone.sqnr_db
