"""Attention heads, feed-forward width and layers of transformers (issue 5 part 2; report B22)."""

import json

import numpy as np
import onnx
import pytest
from compress_models import relative, run
from transformer_models import FORMS, SIZE, bert, decoder, texts

from edgeds import PruneOptions
from edgeds.cli.main import main
from edgeds.compress.channels import prune_channels
from edgeds.compress.groups import find_groups
from edgeds.compress.heads import prune_transformer
from edgeds.compress.heads_cut import Width, correct_metadata
from edgeds.compress.heads_find import find_blocks
from edgeds.compress.shape_fold import fold_shapes
from edgeds.errors import CalibrationError, ModelError, SpecError
from edgeds.graph.view import GraphView


def feeds(model, seed=0, **sizes):
    """``texts`` for the inputs that the model has: fused forms here take no mask."""
    made = texts(seed, **sizes)
    return {item.name: made[item.name] for item in model.graph.input}


def samples(model, count=8):
    return [feeds(model, seed, batch=4, length=10) for seed in range(count)]


def analysed(model):
    view = GraphView(fold_shapes(model))
    groups = find_groups(view)
    return view, groups, find_blocks(view, groups)


def prune(folder, model, **options):
    onnx.save(model, folder / "m.onnx")
    options.setdefault("quiet", True)
    report = prune_transformer(folder / "m.onnx", out=folder / "o.onnx", **options)
    onnx.checker.check_model(str(folder / "o.onnx"), full_check=True)
    return report, onnx.load(folder / "o.onnx")


def same(dense, pruned, *, tolerance=1e-5):
    """Equal outputs at several sizes: nothing of the shape of one feed is baked in."""
    for sizes in ({}, {"batch": 1, "length": 3}, {"batch": 5, "length": 13}):
        fed = feeds(dense, 3, **sizes)
        for a, b in zip(run(dense, fed), run(pruned, fed), strict=True):
            assert a.shape == b.shape
            assert relative(a, b) < tolerance


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pre", [False, True])
def test_planted_heads_and_units_go_without_a_trace(tmp_path, form, pre):
    """B22: head counts in Reshapes, shape subgraphs and attributes change with the weights."""
    model = bert(1, form=form, pre=pre, dead={0: [1], 1: [0]}, gone={0: [0, 3, 5, 7, 8, 9, 20, 23], 1: range(8)})
    report, pruned = prune(tmp_path, model, heads=0.25, ffn=1 / 3)
    assert [(item.before, item.after) for item in report.heads] == [(4, 3), (4, 3)]
    assert [(item.before, item.after) for item in report.ffn] == [(24, 16), (24, 16)]
    assert report.params_after < report.params_before
    assert report.flops_after < report.flops_before
    same(model, pruned)


@pytest.mark.parametrize("form", FORMS)
def test_any_choice_equals_zeroed_output_rows(form):
    """Removing a head is zeroing its rows of the output projection, scale 1/sqrt(d) untouched (B22)."""
    model = bert(2, form=form)
    view, groups, blocks = analysed(model)
    assert [block.heads for block in blocks.attention] == [4, 4]
    kept = {blocks.attention[0].group: np.asarray([0, 3]), blocks.attention[1].group: np.asarray([2])}
    result = prune_channels(view.model, kept, groups=groups).model
    zeroed = GraphView(view.model)
    nodes = {node.name: node for node in zeroed.nodes}
    for group in groups.groups:
        for member in group.members if group.index in kept else ():
            if member.role == "consumer":
                weight = zeroed.constant(nodes[member.node].input[1]).copy()
                weight[~np.isin(member.units, kept[group.index])] = 0
                zeroed.set_constant(nodes[member.node].input[1], weight)
    same(zeroed.model, result)


def test_grouped_queries_go_with_their_key_head(tmp_path):
    model = decoder(1, dead={0: [0, 1], 1: [2, 3]}, gone={0: range(8), 1: range(8, 16)})
    report, pruned = prune(tmp_path, model, heads=0.5, ffn=1 / 3)
    assert [(item.before, item.after) for item in report.heads] == [(4, 2), (4, 2)]
    assert [(item.before, item.after) for item in report.ffn] == [(24, 16), (24, 16)]
    same(model, pruned)
    stored = {tuple(tensor.dims) for tensor in pruned.graph.initializer}
    assert {(16, 2 * SIZE), (16, SIZE), (2 * SIZE, 16)} <= stored


def test_gated_pairs_are_one_feed_forward_layer():
    _, _, blocks = analysed(decoder())
    assert [len(block.layers) for block in blocks.ffn] == [2, 2]
    assert [(block.heads, block.units) for block in blocks.attention] == [(4, 2), (4, 2)]


def test_a_cache_with_fixed_heads_protects_them_and_is_named(tmp_path):
    model = decoder(cache=True)
    report, pruned = prune(tmp_path, model, heads=0.5, ffn=0.4)
    assert all(item.after == item.before for item in report.heads)
    assert any("reaches the graph output" in item.reason for item in report.protected)
    assert any("no head was removed" in note for note in report.notes)
    assert report.ffn[0].after + report.ffn[1].after < 48
    assert [a.shape for a in run(model, texts())] == [b.shape for b in run(pruned, texts())]


@pytest.mark.parametrize("scope", ["global", "uniform"])
def test_every_block_keeps_a_head(tmp_path, scope):
    report, _ = prune(tmp_path, bert(), heads=0.99, ffn=0.99, options=PruneOptions(scope=scope))
    assert all(item.after >= 1 for item in (*report.heads, *report.ffn))


def test_calibration_makes_up_for_heads_that_are_gone(tmp_path):
    model = bert(3)
    fed = samples(model)
    plain, _ = prune(tmp_path, model, heads=0.25, ffn=0.3, calibration=fed, options=PruneOptions(reconstruct=False))
    solved, pruned = prune(tmp_path, model, heads=0.25, ffn=0.3, calibration=fed)
    assert solved.method == "sensitivity"
    assert solved.reconstructed > 0
    assert solved.sqnr_db > plain.sqnr_db + 1
    held = feeds(model, 99, batch=4, length=10)
    assert relative(run(model, held)[0], run(pruned, held)[0]) < 0.6


@pytest.mark.parametrize("method", ["l1", "l2", "activation", "sensitivity"])
def test_every_importance_finds_the_dead(tmp_path, method):
    model = bert(4, dead={0: [2], 1: [3]})
    _, pruned = prune(
        tmp_path,
        model,
        heads=0.25,
        calibration=samples(model, 4),
        options=PruneOptions(method=method, reconstruct=False),
    )
    same(model, pruned)


def test_metadata_follows(tmp_path):
    model = bert(dead={0: [1], 1: [0]})
    for key, value in (("num_heads", "4"), ("config.intermediate_size", "24"), ("edgeds.num_layers", "2"), ("x", "4")):
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    report, pruned = prune(tmp_path, model, heads=0.25, ffn=0.33, options=PruneOptions(scope="uniform"))
    found = {entry.key: entry.value for entry in pruned.metadata_props}
    assert found == {"num_heads": "3", "config.intermediate_size": "16", "edgeds.num_layers": "2", "x": "4"}
    assert any("num_heads" in note for note in report.notes)


def test_metadata_of_unequal_layers_is_a_list():
    model = bert()
    entry = model.metadata_props.add()
    entry.key, entry.value = "num_attention_heads", "4"
    heads = (Width(node="a", before=4, after=3), Width(node="b", before=4, after=1))
    assert correct_metadata(model, heads=heads) == ("num_attention_heads",)
    assert json.loads(model.metadata_props[0].value) == [3, 1]


def test_a_mask_with_heads_of_its_own_protects(tmp_path):
    """A bias per head from outside, as relative positions are."""
    view = GraphView(bert())
    view.model.graph.input.append(onnx.helper.make_tensor_value_info("per_head", 1, [1, 4, 1, 1]))
    view = GraphView(view.model)
    softmax = next(node for node in view.nodes if node.op_type == "Softmax")
    view.make_node("Add", [softmax.input[0], "per_head"], ["biased"], name="biased")
    view.set_input(softmax, 0, "biased")
    report, _ = prune(tmp_path, view.finish(), heads=0.5)
    assert report.heads[0].before == 4
    assert len(report.heads) == 1
    assert any(item.node == softmax.name and "heads stay" in item.reason for item in report.protected)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"heads": 1.0}, SpecError, "below 1"),
        ({"ffn": -0.1}, SpecError, "at least 0"),
        ({"heads": float("nan")}, SpecError, "below 1"),
        ({"layers": -1}, SpecError, "whole number"),
        ({"layers": True}, SpecError, "whole number"),
        ({"layers": 2}, SpecError, "one of those stays"),
        ({"heads": 0.5, "options": PruneOptions(keep=("nothing",))}, SpecError, "no such node"),
        ({"heads": 0.5, "options": PruneOptions(method="activation")}, SpecError, "--calib"),
        ({"heads": 0.5, "calibration": []}, CalibrationError, "no samples"),
    ],
)
def test_bad_options_leave_nothing(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        prune(tmp_path, bert(), **options)
    assert not list(tmp_path.glob("o.*"))


def test_a_model_without_attention_is_refused(tmp_path):
    from prune_models import flat

    with pytest.raises(ModelError, match="has no attention"):
        prune(tmp_path, flat(0), heads=0.5)


def test_nan_weights_are_named(tmp_path):
    model = bert()
    view = GraphView(model)
    node = next(node for node in view.nodes if node.op_type == "MatMul" and view.is_constant(node.input[1]))
    view.set_constant(node.input[1], np.full(view.shape(node.input[1]), np.nan, np.float32))
    with pytest.raises(ModelError, match="NaN or infinity"):
        prune(tmp_path, view.finish(), heads=0.25)


def test_command(tmp_path, capsys):
    model = bert()
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "calib").mkdir()
    for seed in range(4):
        np.savez(tmp_path / "calib" / f"{seed}.npz", **texts(seed))
    words = ["prune", str(tmp_path / "m.onnx"), "--heads", "0.25", "--ffn", "0.3", "--layers", "1"]
    words += ["--out", str(tmp_path / "o.onnx"), "--calib", str(tmp_path / "calib")]
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["params_after"] < data["params_before"]
    assert data["flops_after"] < data["flops_before"]
    assert data["protected"] == []
    assert [item["dropped"] for item in data["layers"]].count(True) == 1
    assert data["cosine"] is not None
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "dropped" in said
    assert "measured" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--heads", "0.2", "--ratio", "0.2"], "exactly one"),
        (["--heads", "1.2"], "below 1"),
        (["--layers", "9"], "one of those stays"),
        (["--ffn", "0.2", "--target", "orin-nx-16gb@25W"], "--target"),
    ],
)
def test_command_used_wrongly(tmp_path, capsys, words, said):
    onnx.save(bert(), tmp_path / "m.onnx")
    assert main(["prune", str(tmp_path / "m.onnx"), "--out", str(tmp_path / "o.onnx"), *words]) == 2
    assert said in capsys.readouterr().err
