"""Pruning of model files and its command (issue 5 part 1): planted channels, goals, bad input, what is written."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from compress_models import relative, run
from onnx import numpy_helper
from prune_models import NETS, feeds_of, finish, start

from edgeds import Budget, PruneOptions, prune_model
from edgeds.cli.main import main
from edgeds.compress.choose import choose_units, unit_costs
from edgeds.compress.groups import find_groups
from edgeds.compress.importance import score_groups
from edgeds.compress.prune_goal import Goal
from edgeds.errors import BudgetError, CalibrationError, ModelError, SpecError
from edgeds.graph.cost import count_cost
from edgeds.graph.view import GraphView


def saved(folder, model, name="m.onnx"):
    onnx.save(model, folder / name)
    return folder / name


def prune(folder, model, **options):
    source = saved(folder, model)
    options.setdefault("ratio", 0.25)
    report = prune_model(source, out=folder / "out.onnx", quiet=True, **options)
    onnx.checker.check_model(str(folder / "out.onnx"), full_check=True)
    return report, onnx.load(folder / "out.onnx")


def widths(model):
    stored = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    return [stored[node.input[1]] for node in model.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]


def plant(model, dead):
    """Zero what makes and what reads units; ``dead``: group size -> units."""
    view = GraphView(model)
    nodes = {node.name: node for node in view.nodes}
    for group in find_groups(view).groups:
        for member in group.members:
            node = nodes[member.node]
            for index in (member.index, 2) if member.role in ("producer", "pass") else (member.index,):
                if index >= len(node.input) or not set(member.units.tolist()) & set(dead.get(group.size, ())):
                    continue
                value = view.constant(node.input[index]).copy()
                axis = member.axis if index == member.index else 0
                np.moveaxis(value, axis, 0)[np.isin(member.units, dead[group.size])] = 0
                view.set_constant(node.input[index], value)
    return view.model


@pytest.mark.parametrize(
    ("name", "dead"),
    [
        ("concat_twice", {8: [2, 5]}),
        ("c2f", {4: [1]}),
        ("gate", {8: [1, 6]}),
        ("grouped", {4: [2]}),
        ("flat", {4: [2], 8: [1, 4]}),
        ("flat_not_transposed", {4: [3], 8: [0, 4]}),
        ("head", {8: [0, 5]}),
        ("heads", {4: [1], 16: [0, 3, 9, 15]}),
        ("grouped_queries", {2: [0]}),
        ("computed_heads", {4: [2]}),
        ("multiplier", {6: [4]}),
    ],
)
def test_planted_dead_channels_go_first(tmp_path, name, dead):
    """B15 B16 B18 B19 B20 B22 B27: exactly the dead ones go, the output stays."""
    model = plant(NETS[name](7), dead)
    ratio = 0.5 if name == "grouped_queries" else 0.2 if name == "multiplier" else 0.25
    report, pruned = prune(tmp_path, model, ratio=ratio)
    assert report.params_after < report.params_before
    feeds = feeds_of(model)
    for a, b in zip(run(model, feeds), run(pruned, feeds), strict=True):
        assert relative(a, b) < 1e-5


def test_b31_constant_channels_move_into_biases(tmp_path):
    """Zero weights and a bias: through SiLU, the readers' biases take the number over."""
    net, x = start(5)
    weight, bias = net.w(8, 3, 3, 3), net.w(8)
    net.weights[weight][[1, 4]] = 0
    net.weights[bias][[1, 4]] = [2.0, -1.5]
    t = net.op("Conv", x, weight, bias, pads=[1] * 4)
    t = net.op("Mul", t, net.op("Sigmoid", t))
    f = net.op("Flatten", net.op("GlobalAveragePool", net.op("Relu", net.op("Conv", t, net.w(6, 8, 1, 1)))))
    model = finish(net, net.op("Gemm", f, net.w(6, 3)), net.conv(t, 8, 2, 1, act=None))
    report, pruned = prune(tmp_path, model, ratio=0.15)  # two of 8 + 6
    assert any("constant channels" in note for note in report.notes)
    assert widths(pruned)[0][0] == 6
    feeds = feeds_of(model)
    for a, b in zip(run(model, feeds), run(pruned, feeds), strict=True):
        assert relative(a, b) < 1e-5


def test_padded_readers_of_a_constant_are_left_alone(tmp_path):
    net, x = start(5)
    weight, bias = net.w(8, 3, 3, 3), net.w(8)
    net.weights[weight][1], net.weights[bias][1] = 0, 3
    model = finish(net, net.conv(net.op("Conv", x, weight, bias), 8, 4, act=None))
    report, pruned = prune(tmp_path, model, ratio=0.01)
    assert not any("constant channels" in note for note in report.notes)
    feeds = feeds_of(model)
    assert relative(run(model, feeds)[0], run(pruned, feeds)[0]) < 1e-6


def wide(seed=0):
    net, x = start(seed)
    a = net.conv(net.conv(net.conv(x, 3, 40), 40, 48), 48, 64)
    return finish(net, net.conv(a, 64, 4, act=None))


def test_b25_widths_are_multiples(tmp_path):
    report, pruned = prune(tmp_path, wide(), ratio=0.2)
    assert all(shape[0] % 8 == 0 for shape in widths(pruned)[:-1])
    assert report.aligned_share == 1
    for multiple in (1, 16):
        _, other = prune(tmp_path, wide(), ratio=0.2, options=PruneOptions(multiple=multiple, scope="uniform"))
        kept = [shape[0] for shape in widths(other)[:-1]]
        assert kept == ([32, 38, 51] if multiple == 1 else [32, 40 // 16 * 16, 48])


def test_least_width_is_kept(tmp_path):
    _, pruned = prune(tmp_path, wide(), ratio=0.95, options=PruneOptions(min_channels=24))
    assert min(shape[0] for shape in widths(pruned)[:-1]) >= 24


@pytest.mark.parametrize("method", ["l1", "l2", "bn", "activation"])
def test_every_method_prunes(tmp_path, method):
    feeds = [feeds_of(NETS["residual"](0), seed) for seed in range(4)]
    options = PruneOptions(method=method, reconstruct=False)
    report, _ = prune(tmp_path, NETS["residual"](0), calibration=feeds, options=options)
    assert report.method == method
    assert report.params_after < report.params_before


def test_activation_energy_finds_channels_that_weights_do_not_show(tmp_path):
    """A channel that a Relu silences on the samples goes first, though its weights are large."""
    net, x = start(2)
    weight, bias = net.w(8, 3, 3, 3), net.w(8)
    net.weights[weight][3] *= 5
    net.weights[bias][3] = -1000
    t = net.op("Relu", net.op("Conv", x, weight, bias, pads=[1] * 4))
    model = finish(net, net.conv(t, 8, 3, act=None))
    view = GraphView(model)
    groups = find_groups(view)
    feeds = [feeds_of(model, seed) for seed in range(3)]
    by_energy = score_groups(view.model, groups, method="activation", feeds=feeds, quiet=True)[0]
    assert by_energy.argmin() == 3
    assert score_groups(view.model, groups)[0].argmax() == 3


def test_bn_scale_counts_before_folding():
    net, x = start(2)
    scale, shift, mean, variance = net.w(6), net.w(6), net.w(6), net.w(value=np.ones(6, np.float32))
    net.weights[scale][2] = net.weights[shift][2] = 0
    t = net.conv(x, 3, 6, act=None, bias=False)
    t = net.op("Relu", net.op("BatchNormalization", t, scale, shift, mean, variance))
    view = GraphView(finish(net, net.conv(t, 6, 3, act=None)))
    groups = find_groups(view)
    for method in ("l2", "bn"):
        assert score_groups(view.model, groups, method=method)[0][2] == 0


def test_calibration_re_solves_what_is_left(tmp_path):
    """The error after reconstruction is smaller than before it, on samples not seen."""
    model = wide()
    feeds = [feeds_of(model, seed) for seed in range(8)]
    errors = []
    for again in (False, True):
        report, pruned = prune(tmp_path, model, ratio=0.4, calibration=feeds, options=PruneOptions(reconstruct=again))
        unseen = feeds_of(model, 99)
        errors.append(relative(run(model, unseen)[0], run(pruned, unseen)[0]))
        assert bool(report.reconstructed) == again
    assert errors[1] < 0.8 * errors[0]


def test_speedup_and_budget(tmp_path):
    report, _ = prune(tmp_path, wide(), ratio=None, speedup=1.5)
    assert report.flops_before / report.flops_after >= 1.5
    with pytest.raises(BudgetError, match="cannot be reached"):
        prune(tmp_path, wide(), ratio=None, speedup=1e6)
    target = "jetson-agx-orin-64gb@30W"
    report, _ = prune(tmp_path, wide(), ratio=0.3, target=target)
    assert report.predicted["status"] == "predicted"
    assert report.predicted["target"] == target
    with pytest.raises(BudgetError):
        prune(tmp_path, wide(), ratio=None, budget=Budget(latency_ms=1e-6), target=target)


def test_with_a_target_what_counts_is_predicted_time(tmp_path):
    """A unit that saves much predicted time for its loss goes before one that saves many FLOPs."""
    model = wide()
    groups = find_groups(GraphView(model, copy=False))
    target = "jetson-agx-orin-64gb@30W"
    plain = Goal.of(ratio=None, speedup=1.2, budget=None, target=None, precision="int8")
    board = Goal.of(ratio=None, speedup=1.2, budget=None, target=target, precision="int8")
    flops, times = plain.layer_costs(model), board.layer_costs(model)
    assert flops == {layer.node: layer.flops for layer in count_cost(model).layers}
    assert sum(times.values()) == pytest.approx(1e3 * board.cost(model), rel=0.5)
    shares = [unit_costs(groups, costs) for costs in (flops, times)]
    assert shares[0].keys() == shares[1].keys()
    assert shares[0] != shares[1]
    feeds = [feeds_of(model, seed) for seed in range(6)]
    report, _ = prune(tmp_path, model, ratio=None, speedup=1.05, target=target, calibration=feeds)
    assert report.predicted["speedup"] >= 1.05


def test_speedup_with_samples_takes_less_loss_per_flop(tmp_path):
    """A costly layer gives more when FLOPs count than when channels do."""
    net, x = start(4, batch=2, size=16)
    a = net.op("MaxPool", net.conv(net.conv(x, 3, 24), 24, 24), kernel_shape=[8, 8], strides=[8, 8])
    model = finish(net, net.conv(net.conv(a, 24, 24, 1), 24, 3, 1, act=None))
    feeds = [feeds_of(model, seed) for seed in range(6)]
    report, by_flops = prune(tmp_path, model, ratio=None, speedup=1.5, calibration=feeds)
    assert report.method == "sensitivity"
    assert report.flops_before / report.flops_after >= 1.5
    _, by_channels = prune(tmp_path, model, ratio=report.removed_share, calibration=feeds)
    assert widths(by_flops)[0][0] <= widths(by_channels)[0][0]


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 1},
        {"ratio": 1.5},
        {"ratio": -0.1},
        {"ratio": float("nan")},
        {"ratio": True},
        {"ratio": None},
        {"ratio": 0.2, "speedup": 2},
        {"ratio": None, "speedup": 1},
        {"ratio": None, "budget": Budget(latency_ms=3)},
        {"ratio": None, "budget": Budget(watts=3), "target": "orin-nx-16gb"},
        {"options": PruneOptions(multiple=0)},
        {"options": PruneOptions(min_channels=-1)},
        {"options": PruneOptions(method="guess")},
        {"options": PruneOptions(scope="some")},
        {"options": PruneOptions(method="activation")},
        {"options": PruneOptions(keep=("nothing",))},
        {"target": "no-such-board"},
        {"options": PruneOptions(samples=0)},
    ],
)
def test_bad_options_leave_nothing(tmp_path, options):
    with pytest.raises(SpecError):
        prune(tmp_path, wide(), **options)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_ratio_0_is_a_copy(tmp_path):
    model = wide()
    report, pruned = prune(tmp_path, model, ratio=0)
    assert report.params_after == report.params_before
    assert [n.op_type for n in pruned.graph.node] == [n.op_type for n in model.graph.node]


def _only_head():
    net, x = start(0)
    return net, net.conv(x, 3, 8, act=None)


def test_nothing_prunable_is_named_or_refused(tmp_path):
    report, _ = prune(tmp_path, finish(*_only_head()))
    assert report.params_after == report.params_before
    assert "graph output" in report.protected[0].reason
    assert any("nothing can be pruned" in note for note in report.notes)
    with pytest.raises(BudgetError, match="goal cannot be reached"):
        prune(tmp_path, finish(*_only_head()), ratio=None, speedup=2)
    net, x = start(0)
    with pytest.raises(ModelError, match="nothing can be pruned"):
        prune(tmp_path, finish(net, net.op("Relu", x)))


def test_nan_weights_are_named(tmp_path):
    net, x = start(0)
    weight = net.w(8, 3, 3, 3)
    net.weights[weight][0, 0, 0, 0] = np.nan
    model = finish(net, net.conv(net.op("Conv", x, weight), 8, 4, act=None))
    with pytest.raises(ModelError, match="NaN"):
        prune(tmp_path, model)


def test_the_model_itself_is_not_overwritten(tmp_path):
    source = saved(tmp_path, wide())
    for out in (source, tmp_path / "folder.onnx", tmp_path / "m.txt"):
        (tmp_path / "folder.onnx").mkdir(exist_ok=True)
        with pytest.raises(SpecError):
            prune_model(source, out=out, ratio=0.2, quiet=True)


def test_opset_ir_metadata_and_names_stay(tmp_path):
    """B5 B19: external data, opset 12, metadata of Ultralytics."""
    model = NETS["c2f_opset_12"](0)
    model.ir_version = 7
    entry = model.metadata_props.add()
    entry.key, entry.value = "names", "{0: 'a'}"
    source = tmp_path / "in" / "m.onnx"
    source.parent.mkdir()
    onnx.save(model, source, save_as_external_data=True, location="m.bin", size_threshold=0)
    report = prune_model(source, out=tmp_path / "out.onnx", ratio=0.3, quiet=True)
    (source.parent / "m.bin").unlink()
    pruned = onnx.load(tmp_path / "out.onnx")
    assert (pruned.ir_version, pruned.opset_import[0].version) == (7, 12)
    assert pruned.metadata_props[0].value == "{0: 'a'}"
    assert {n.name for n in pruned.graph.node} == {n.name for n in model.graph.node}
    tensors = json.loads(Path(report.mapping).read_text())["tensors"]
    stored = {item.name: item for item in pruned.graph.value_info}
    for name, entry in tensors.items():
        assert stored[name].type.tensor_type.shape.dim[entry["axis"]].dim_value == len(entry["kept"])


def test_float16_stays_float16(tmp_path):
    _, pruned = prune(tmp_path, NETS["half"](0))
    assert {numpy_helper.to_array(t).dtype for t in pruned.graph.initializer} == {np.dtype(np.float16)}


def test_one_sample_is_too_few_to_reconstruct(tmp_path):
    with pytest.raises(CalibrationError, match="at least two"):
        prune(tmp_path, wide(), calibration=[feeds_of(wide())])
    with pytest.raises(CalibrationError, match="no samples"):
        prune(tmp_path, wide(), calibration=[])
    assert not (tmp_path / "out.onnx").exists()


def test_command(tmp_path, capsys):
    model = wide()
    source = saved(tmp_path, model)
    (tmp_path / "calib").mkdir()
    for seed in range(3):
        np.savez(tmp_path / "calib" / f"{seed}.npz", **feeds_of(model, seed))
    out = tmp_path / "small.onnx"
    words = ["prune", str(source), "--ratio", "0.25", "--out", str(out)]
    assert main([*words, "--calib", str(tmp_path / "calib"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["params_after"] < data["params_before"]
    assert data["flops_after"] < data["flops_before"]
    assert {"node", "reason"} <= set(data["protected"][0])
    assert data["samples"] == 3
    assert main(words) == 0
    assert "parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ratio", "1.2"], "below 1"),
        (["--ratio", "0"], ""),
        ([], "exactly one"),
        (["--ratio", "0.2", "--size", "64"], "--calib"),
        (["--budget", "watts=3"], "latency-ms"),
        (["--budget", "fps=x"], "fps=60"),
        (["--ratio", "0.2", "--keep", "nothing"], "no such node"),
    ],
)
def test_command_used_wrongly(tmp_path, capsys, words, said):
    code = main(["prune", str(saved(tmp_path, wide())), "--out", str(tmp_path / "o.onnx"), *words])
    assert code == (2 if said else 0)
    assert said in capsys.readouterr().err


def test_choice_repeats_and_respects_scope():
    view = GraphView(NETS["c2f"](0))
    groups = find_groups(view)
    scores = score_groups(view.model, groups)
    uniform = choose_units(groups, scores, ratio=0.25, scope="uniform")
    assert {len(units) for units in uniform.values()} == {3}
    assert choose_units(groups, scores, ratio=0) == {}


@pytest.mark.zoo
def test_yolo11n_still_detects_shapes(tmp_path):
    import time

    from edgeds import YoloPipeline, model_path

    started = time.perf_counter()
    report = prune_model(model_path("yolo11n"), out=tmp_path / "y.onnx", ratio=0.2, quiet=True)
    assert time.perf_counter() - started < 10
    assert report.params_after < 0.8 * report.params_before
    assert {item.node.split("/")[1] for item in report.protected} <= {"model.10", "model.23"}
    image = np.zeros((64, 64, 3), np.uint8)
    with YoloPipeline.from_model(tmp_path / "y.onnx") as pipeline:
        assert len(pipeline.predict_one(image).names) == 80
