"""float16 conversion: strongly typed, close to float32, and safe where float16 is known to break (B64, B53)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from graph_models import branch_with_capture, build, image, node, run, two_convs, value, weight
from half_models import INT64, const, encoder, exact, make_half, qdq_conv, range_detector, spelled_layer_norm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

from edgeds.errors import ModelError, SpecError
from edgeds.graph.amplitude import find_amplitudes
from edgeds.graph.io import load_model, save_model
from edgeds.graph.precision import convert_float16, to_float16, verify_float16
from edgeds.graph.typecheck import check_types, find_type_errors

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT


def constants(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def by_name(model):
    return {item.name: item for item in model.graph.node}


def kept(report):
    return {item.node: item.reason for item in report.kept}


def check(model):
    """Checker with full inference, our type rules, and a load without optimisations."""
    onnx.checker.check_model(model, full_check=True)
    assert find_type_errors(model) == []
    return model


def test_convolutions_compute_in_half_and_outputs_stay_float32():
    model = two_convs()
    before = model.SerializeToString()
    half = check(to_float16(model))
    assert model.SerializeToString() == before
    assert {array.dtype.name for array in constants(half).values()} == {"float16"}
    assert [n.op_type for n in half.graph.node] == ["Cast", "Conv", "Relu", "Conv", "Cast"]
    assert half.graph.input[0].type.tensor_type.elem_type == FLOAT
    assert half.graph.output[0].name == "y"
    assert half.opset_import[0].version == 17  # raised by need only
    x = {"x": image(2, 3, 12, 12)}
    np.testing.assert_allclose(run(half, x)[0], run(model, x)[0], rtol=0.01, atol=0.01)


def test_half_inputs_and_outputs_on_request():
    half = check(to_float16(two_convs(), io="float16"))
    assert [n.op_type for n in half.graph.node] == ["Conv", "Relu", "Conv"]
    assert half.graph.input[0].type.tensor_type.elem_type == HALF
    assert run(half, {"x": image(1, 3, 12, 12).astype(np.float16)})[0].dtype == np.float16


def test_inputs_and_outputs_of_mixed_types_keep_theirs():
    """A decoder's cache is float16 where its logits are float32: both are what the runtime was told."""
    nodes = [
        node("Cast", ["h"], ["w"], "wide", to=onnx.TensorProto.FLOAT),
        node("Add", ["x", "w"], ["s"], "sum"),
        node("Relu", ["s"], ["y"], "relu"),
        node("Cast", ["y"], ["z"], "narrow", to=HALF),
    ]
    inputs = [value("x", ["N", 4]), value("h", ["N", 4], HALF)]
    model = build(nodes, inputs, [value("y", ["N", 4]), value("z", ["N", 4], HALF)], {})
    half = check(convert_float16(model, io="keep").model)
    kinds = [item.type.tensor_type.elem_type for item in (*half.graph.input, *half.graph.output)]
    assert kinds == [onnx.TensorProto.FLOAT, HALF, onnx.TensorProto.FLOAT, HALF]
    feeds = {"x": image(2, 4), "h": image(2, 4, seed=1).astype(np.float16)}
    for found, expected in zip(run(half, feeds), run(model, feeds), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, atol=2e-3)
    assert next(n for n in half.graph.node if n.name == "sum").output[0] not in {"y", "z"}


def test_b64_squares_of_a_spelled_layer_norm_do_not_overflow():
    """Values of 400 have squares beyond 65504; the plain rewrite of all constants gives infinity, ours does not."""
    weights = {"w": weight(16, 16, scale=0.3)}
    nodes = [node("MatMul", ["x", "w"], ["m"], "mm"), *spelled_layer_norm("m", "y", "ln", weights, size=16)]
    model = build(nodes, [value("x", ["N", 16])], [value("y", ["N", 16])], weights)
    feeds = {"x": image(4, 16, seed=1) * 800}
    want = exact(model, feeds)[0]
    naive = make_half(model)
    assert not np.allclose(exact(naive, {"x": feeds["x"].astype(np.float16)})[0], want, atol=0.05)
    report = convert_float16(model)
    np.testing.assert_allclose(exact(check(report.model), feeds)[0], want, atol=0.02)
    reasons = kept(report)
    for op in ("ReduceMean_mean", "Sub_centred", "Pow_squares", "ReduceMean_variance", "Add_safe", "Sqrt_root"):
        assert f"ln/{op}" in reasons
    assert "ln/Div_unit" in reasons
    assert "mm" not in reasons


@pytest.mark.parametrize("op", ["LayerNormalization", "InstanceNormalization", "GroupNormalization"])
def test_b64_normalisation_operators_stay_float32_with_float32_parameters(op):
    attrs = {"GroupNormalization": {"num_groups": 2}}.get(op, {})
    w = {"g": np.ones(4, np.float32), "b": np.zeros(4, np.float32), "w": weight(4, 4, 1, 1)}
    shape = ["N", 4, 4, 4]
    nodes = [node("Conv", ["x", "w"], ["c"], "conv"), node(op, ["c", "g", "b"], ["y"], "norm", **attrs)]
    report = convert_float16(build(nodes, [value("x", shape)], [value("y", shape)], w, opset=21, ir=10))
    check(report.model)
    assert kept(report) == {"norm": "normalisation"}
    assert constants(report.model)["g"].dtype == np.float32
    assert constants(report.model)["w_float16"].dtype == np.float16


@pytest.mark.parametrize("least", [-3.4028235e38, -np.inf, -1e9])
def test_b64_masks_stay_float32_up_to_the_softmax_and_the_rest_does_not(least):
    model = encoder(mask_value=least if np.isfinite(least) else -1e30)
    report = convert_float16(model)
    check(report.model)
    reasons = kept(report)
    assert {"mask/scale", "scores/mask", "scores/softmax", "norm1"} <= set(reasons)
    assert not {"embed", "q/project", "scores", "mix", "up", "gelu/erf", "down"} & set(reasons)
    feeds = {"ids": np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), "mask": np.array([[1, 1, 1, 0], [0, 0, 0, 0]])}
    want, got = exact(model, feeds)[0], exact(report.model, feeds)[0]
    assert np.isfinite(got).all()  # also where everything is masked
    np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


def test_b64_infinity_as_a_mask_constant():
    nodes = [node("Where", ["m", "s", "no"], ["w"], "hide"), node("Softmax", ["w"], ["y"], "soft", axis=-1)]
    w = {"no": const(-np.inf)}
    model = build(nodes, [value("m", ["N", 4], TensorProto.BOOL), value("s", ["N", 4])], [value("y", ["N", 4])], w)
    report = convert_float16(model)
    assert set(kept(report)) == {"hide", "soft"}
    feeds = {"m": np.array([[True, True, False, True]]), "s": image(1, 4)}
    np.testing.assert_allclose(exact(check(report.model), feeds)[0], exact(model, feeds)[0], atol=1e-3)


def test_guards_below_half_keep_a_zero_vector_from_becoming_nan():
    w = {"eps": const(1e-12), "w": weight(8, 8)}
    nodes = [
        node("MatMul", ["x", "w"], ["m"], "mm"),
        node("ReduceL2", ["m"], ["n"], "norm", axes=[-1]),
        node("Clip", ["n", "eps"], ["c"], "guard"),
        node("Div", ["m", "c"], ["y"], "unit"),
    ]
    model = build(nodes, [value("x", ["N", 8])], [value("y", ["N", 8])], w)
    report = convert_float16(model)
    assert {"norm", "guard", "unit"} == set(kept(report))
    x = np.concatenate([np.zeros((1, 8), np.float32), image(1, 8)])
    got = exact(check(report.model), {"x": x})[0]
    np.testing.assert_allclose(got, exact(model, {"x": x})[0], atol=2e-3)
    assert (got[0] == 0).all()


def test_mean_pooling_with_a_summed_mask_and_a_tiny_limit():
    w = {"tiny": const(1e-9), "axes": np.array([2], np.int64)}
    nodes = [
        node("Cast", ["mask"], ["mf"], "cast", to=FLOAT),
        node("Unsqueeze", ["mf", "axes"], ["m3"], "lift"),
        node("Mul", ["t", "m3"], ["tm"], "hide"),
        node("ReduceSum", ["tm", "one"], ["sum"], "sum", keepdims=0),
        node("ReduceSum", ["m3", "one"], ["count"], "count", keepdims=0),
        node("Clip", ["count", "tiny"], ["safe"], "safe"),
        node("Div", ["sum", "safe"], ["y"], "mean"),
    ]
    w["one"] = np.array([1], np.int64)
    inputs = [value("t", ["B", "S", 4]), value("mask", ["B", "S"], INT64)]
    model = build(nodes, inputs, [value("y", ["B", 4])], w)
    feeds = {"t": image(2, 5, 4), "mask": np.array([[1, 1, 0, 0, 0], [0] * 5])}
    got = exact(check(to_float16(model)), feeds)[0]
    np.testing.assert_allclose(got, exact(model, feeds)[0], atol=2e-3)


def test_random_encoder_in_half_is_close_and_half_models_get_float32_norms_back():
    for spelled in (False, True):
        model = encoder(spelled=spelled)
        feeds = {"ids": np.arange(12).reshape(2, 6), "mask": np.ones((2, 6), np.int64)}
        want = run(model, feeds)[0]
        report = convert_float16(model)
        assert np.abs(run(check(report.model), feeds)[0] - want).max() <= 0.01 * np.abs(want).max()


def test_dynamic_detector_with_range_anchors_keeps_coordinates_exact():
    """Strongly typed builds refuse this graph when anchors and boxes differ in type (facts 2.7)."""
    model = range_detector()
    report = convert_float16(model)
    check(report.model)
    reasons = kept(report)
    assert {"grid/x_range", "grid/anchors", "decode/add", "decode/stride", "decode/join"} <= set(reasons)
    assert not {"stem", "act", "box", "score", "decode/sigmoid"} & set(reasons)
    for height, width in ((64, 64), (32, 96)):
        feeds = {"images": image(1, 3, height, width)}
        want, got = run(model, feeds)[0], exact(report.model, feeds)[0]
        assert np.abs(got[:, :2] - want[:, :2]).max() < 0.05  # pixels
        assert np.abs(got[:, 2:] - want[:, 2:]).max() < 0.02


def test_shape_arithmetic_and_resize_scales_stay_float32():
    nodes = [
        node("Conv", ["x", "w"], ["c"], "conv", pads=[1] * 4),
        node("Resize", ["c", "", "scales"], ["r"], "resize", mode="nearest"),
        node("Shape", ["r"], ["s"], "shape"),
        node("Cast", ["s"], ["sf"], "to_float", to=FLOAT),
        node("Mul", ["sf", "factors"], ["t"], "times"),
        node("Floor", ["t"], ["fl"], "floor"),
        node("Cast", ["fl"], ["target"], "to_int", to=INT64),
        node("Resize", ["c", "", "", "target"], ["y"], "resize2", mode="nearest"),
    ]
    w = {"w": weight(3, 3, 3, 3), "scales": const([1, 1, 2, 2]), "factors": const([1, 1, 1.5, 1.5])}
    model = build(nodes, [value("x", [1, 3, "H", "W"])], [value("y", [1, 3, None, None])], w)
    report = convert_float16(model)
    check(report.model)
    assert {"to_float", "times", "floor"} <= set(kept(report))
    assert constants(report.model)["scales"].dtype == np.float32
    feeds = {"x": image(1, 3, 8, 8)}
    want, got = run(model, feeds)[0], run(report.model, feeds)[0]
    assert want.shape == got.shape
    assert np.abs(want - got).max() < 0.01


def test_scores_before_topk_are_ordered_in_float32():
    nodes = [
        node("MatMul", ["x", "w"], ["m"], "mm"),
        node("Sigmoid", ["m"], ["p"], "sigmoid"),
        node("TopK", ["p", "k"], ["top", "index"], "top"),
    ]
    w = {"w": weight(8, 64), "k": np.array([5], np.int64)}
    outputs = [value("top", ["N", 5]), value("index", ["N", 5], INT64)]
    report = convert_float16(build(nodes, [value("x", ["N", 8])], outputs, w))
    check(report.model)
    assert set(kept(report)) == {"sigmoid", "top"}


def test_named_nodes_patterns_and_names_that_do_not_exist():
    model = two_convs()
    report = convert_float16(model, keep=["c1"])
    assert kept(report) == {"c1": "named by the caller"}
    assert constants(report.model)["w1"].dtype == np.float32
    assert set(kept(convert_float16(model, keep=["c*"]))) == {"c1", "c2"}
    with pytest.raises(SpecError, match="no node named 'c1x'; nearest: c1"):
        to_float16(model, keep=["c1x"])
    with pytest.raises(SpecError, match="give a list"):
        to_float16(model, keep="c1")
    with pytest.raises(SpecError, match="io 'half'"):
        to_float16(model, io="half")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "form", [70000.0, (-70000.0, 3.0), SimpleNamespace(minimum=-1.0, maximum=70000.0, count=3), np.float32(40000)]
)
def test_tensors_beyond_half_on_calibration_keep_producer_and_readers_float32(form):
    report = convert_float16(two_convs(), ranges={"a": form, "x": 1.0, "b": 5.0})
    assert set(kept(report)) == {"c1", "r1"}
    check(report.model)


def test_ranges_that_fit_end_the_flow_of_a_large_constant_and_nan_is_refused():
    nodes = [
        node("Mul", ["x", "big"], ["m"], "grow"),
        node("Relu", ["m"], ["r"], "relu"),
        node("Conv", ["r", "w"], ["y"], "conv"),
    ]
    w = {"big": const(1e6), "w": weight(4, 3, 1, 1)}
    model = build(nodes, [value("x", ["N", 3, 4, 4])], [value("y", ["N", 4, 4, 4])], w)
    assert set(kept(convert_float16(model))) == {"grow", "relu", "conv"}
    assert set(kept(convert_float16(model, ranges={"m": 12.0, "r": 12.0}))) == {"grow"}
    with pytest.raises(SpecError, match="holds NaN"):
        to_float16(model, ranges={"m": np.nan})
    with pytest.raises(SpecError, match="not a magnitude"):
        to_float16(model, ranges={"m": "wide"})


def test_measured_amplitudes_drive_the_conversion():
    model = two_convs()
    x = {"x": image(1, 3, 12, 12) * 1e5}
    peaks = find_amplitudes(model, [x], threads=1)
    a, b = run(model, x)[0], peaks["y"]
    assert b == pytest.approx(np.abs(a).max(), rel=1e-5)
    assert set(peaks) == {"x", "a", "b", "y"}
    report = convert_float16(model, ranges=peaks)
    assert set(kept(report)) == {"c1", "r1", "c2"}
    np.testing.assert_allclose(exact(report.model, x)[0], a, rtol=1e-3, atol=1)


@pytest.mark.parametrize("opset", [13, 19, 21])
def test_qdq_keeps_its_integers_and_the_scale_has_the_type_of_the_result(opset):
    model = qdq_conv(opset=opset)
    model.ir_version = 10
    half = check(to_float16(model))
    assert half.opset_import[0].version == max(opset, 19)
    nodes, stored = by_name(half), constants(half)
    np.testing.assert_array_equal(stored[nodes["w_DQ"].input[0]], constants(model)["wq"])
    assert stored[nodes["x_Q"].input[1]].dtype == np.float32  # as the graph input that it quantizes
    for name in ("x_DQ", "w_DQ"):
        assert stored[nodes[name].input[1]].dtype == np.float16
    makers = {output: item for item in half.graph.node for output in item.output}
    assert [makers[name].op_type for name in nodes["conv"].input[:2]] == ["DequantizeLinear"] * 2
    feeds = {"x": image(2, 4, 8, 8)}
    want = run(model, feeds)[0]
    assert np.abs(run(half, feeds)[0] - want).max() < 0.05 * np.abs(want).max()


def test_dead_channels_get_a_normal_scale_and_small_ones_keep_their_layer_float32():
    scale = np.array([0.004, 1e-9, 0.003, 0.005])
    model = qdq_conv(weight_scale=scale)
    report = convert_float16(model)
    stored = constants(check(report.model))
    written = stored[by_name(report.model)["w_DQ"].input[1]]
    assert written.dtype == np.float16
    assert (written >= np.float16(2.0**-14)).all()
    assert "1 of 4 scales widened" in report.notes[0]
    feeds = {"x": image(1, 4, 8, 8)}
    want = run(model, feeds)[0]
    assert np.abs(run(report.model, feeds)[0] - want).max() < 0.05 * np.abs(want).max()

    report = convert_float16(qdq_conv(weight_scale=np.full(4, 2e-5)))
    check(report.model)
    assert "subnormal" in kept(report)["conv"]
    nodes = by_name(report.model)
    makers = {output: item for item in report.model.graph.node for output in item.output}
    assert [makers[name].op_type for name in nodes["conv"].input[:2]] == ["DequantizeLinear"] * 2
    assert constants(report.model)[nodes["w_DQ"].input[1]].dtype == np.float32


@pytest.mark.parametrize("scale", [1e-6, 600.0])
def test_activation_scales_outside_half_keep_the_layer_float32(scale):
    report = convert_float16(qdq_conv(activation_scale=scale))
    check(report.model)
    assert {"x_Q", "x_DQ", "conv"} <= set(kept(report))


def test_tied_weights_are_stored_once_per_type():
    model = qdq_conv(shared=True)
    half = check(to_float16(model))
    assert sum(tensor.data_type == TensorProto.INT8 and len(tensor.dims) == 4 for tensor in half.graph.initializer) == 1
    mixed = check(to_float16(model, keep=["conv2"]))
    makers = {output: item for item in mixed.graph.node for output in item.output}
    nodes = by_name(mixed)
    twins = {makers[nodes[name].input[1]].name for name in ("conv", "conv2")}
    assert len(twins) == 2  # one DequantizeLinear per type, no Cast between it and its Conv
    assert (
        sum(tensor.data_type == TensorProto.INT8 and len(tensor.dims) == 4 for tensor in mixed.graph.initializer) == 1
    )

    w = {"w": weight(6, 6)}
    nodes2 = [node("MatMul", ["x", "w"], ["a"], "m1"), node("MatMul", ["a", "w"], ["y"], "m2")]
    plain = build(nodes2, [value("x", ["N", 6])], [value("y", ["N", 6])], w)
    assert list(constants(check(to_float16(plain)))) == ["w_float16"]
    assert set(constants(check(to_float16(plain, keep=["m2"])))) == {"w", "w_float16"}


def test_bodies_of_if_stay_float32_and_read_casted_captures():
    model = branch_with_capture()
    report = convert_float16(model)
    check(report.model)
    assert kept(report) == {"choose": "control flow: its bodies stay as they are"}
    for flag in (True, False):
        feeds = {"x": image(1, 4, 8, 8), "flag": np.array(flag)}
        want = run(model, feeds)[0]
        assert np.abs(run(report.model, feeds)[0] - want).max() < 0.02 * np.abs(want).max()


def test_custom_operators_keep_their_types():
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "mm"),
        node("Gelu", ["a"], ["g"], "gelu", domain="com.microsoft"),
        node("MatMul", ["g", "w"], ["y"], "mm2"),
    ]
    model = build(
        nodes,
        [value("x", ["N", 6])],
        [value("y", ["N", 6])],
        {"w": weight(6, 6)},
        extra_opsets=[("com.microsoft", 1)],
    )
    report = convert_float16(model)
    assert "gelu" in kept(report)
    feeds = {"x": image(2, 6)}
    np.testing.assert_allclose(run(report.model, feeds)[0], run(model, feeds)[0], atol=0.02)


@pytest.mark.parametrize("io", ["float32", "float16"])
def test_b53_half_models_come_back_with_the_io_asked_for_and_float32_norms(io):
    weights = {"w": weight(16, 16)}
    nodes = [node("MatMul", ["x", "w"], ["m"], "mm"), *spelled_layer_norm("m", "y", "ln", weights, size=16)]
    model = build(nodes, [value("x", ["N", 16])], [value("y", ["N", 16])], weights)
    half = make_half(model)
    report = convert_float16(half, io=io)
    check(report.model)
    x = image(3, 16)
    got = exact(report.model, {"x": x.astype(io)})[0]
    assert got.dtype == np.dtype(io)
    np.testing.assert_allclose(got, exact(model, {"x": x})[0], atol=0.03)
    assert "ln/Pow_squares" in kept(report)


def test_b53_parts_that_a_mixed_model_computes_in_float32_stay_so():
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "half_mm"),
        node("Cast", ["a"], ["af"], "up", to=FLOAT),
        node("Exp", ["af"], ["e"], "float_exp"),
        node("Cast", ["e"], ["y"], "down", to=HALF),
    ]
    w = {"w": weight(6, 6, dtype=np.float16)}
    model = build(nodes, [value("x", ["N", 6], HALF)], [value("y", ["N", 6], HALF)], w)
    report = convert_float16(model, io="float16")
    assert [n.op_type for n in check(report.model).graph.node] == ["MatMul", "Cast", "Exp", "Cast"]
    assert kept(report) == dict.fromkeys(("up", "float_exp"), "is float32 in a model that mixes precisions")


def test_clip_limits_of_float32_saturate_instead_of_becoming_infinite():
    nodes = [node("Conv", ["x", "w"], ["c"], "conv"), node("Clip", ["c", "zero", "huge"], ["y"], "clip")]
    w = {"w": weight(2, 3, 1, 1), "zero": const(0.0), "huge": const(3.4e38)}
    report = convert_float16(build(nodes, [value("x", ["N", 3, 4, 4])], [value("y", ["N", 2, 4, 4])], w))
    assert kept(report) == {}
    assert all(np.isfinite(array).all() for array in constants(check(report.model)).values())


def test_operators_whose_types_are_their_own_are_left_alone():
    w = {
        "i": np.array([[0, 1]], np.int64),
        "depth": const(4.0),
        "values": const([0, 1]),
        "base": np.zeros((2, 2), np.float32),
    }
    nodes = [
        node("OneHot", ["i", "depth", "values"], ["h"], "one_hot"),
        node("ScatterElements", ["base", "i", "x"], ["s"], "scatter", reduction="add"),
        node("RandomNormal", [], ["r"], "noise", shape=[2, 2]),
        node("Add", ["s", "r"], ["y"], "add"),
    ]
    outputs = [value("h", [1, 2, 4]), value("y", [2, 2])]
    report = convert_float16(build(nodes, [value("x", [1, 2])], outputs, w, opset=18))
    check(report.model)
    assert kept(report)["scatter"] == "long sums lose digits"
    run(report.model, {"x": image(1, 2)})
    bare = build(
        [node("Binarizer", ["x"], ["y"], "b", domain="ai.onnx.ml", threshold=0.5)], [value("x", [2])], [value("y", [2])]
    )
    bare.opset_import[0].domain, bare.opset_import[0].version = "ai.onnx.ml", 1
    with pytest.raises(ModelError, match="nothing to convert"):
        to_float16(bare)


def test_outputs_that_feed_other_nodes_or_are_weights_keep_their_names():
    nodes = [node("Relu", ["x"], ["a"], "r1"), node("Add", ["a", "w"], ["b"], "add")]
    outputs = [value("a", [2]), value("b", [2]), value("w", [2])]
    model = build(nodes, [value("x", [2])], outputs, {"w": weight(2)})
    feeds = {"x": image(2)}
    for io in ("float32", "float16"):
        half = check(to_float16(model, io=io))
        got = run(half, {"x": feeds["x"].astype(io)})
        assert [item.name for item in half.graph.output] == ["a", "b", "w"]
        for want, have in zip(run(model, feeds), got, strict=True):
            assert have.dtype == np.dtype(io)
            np.testing.assert_allclose(have, want, atol=1e-2)


def test_large_models_keep_external_data(tmp_path):
    model = two_convs()
    path = save_model(to_float16(model), tmp_path / "h.onnx", inline_limit_bytes=1000)
    assert (tmp_path / "h.onnx.data").exists()
    x = {"x": image(1, 3, 12, 12)}
    worst = verify_float16(model, load_model(path), [x], threads=1)
    assert 0 < worst["y"] < 0.02


def test_verification_names_the_output_that_overflows():
    nodes = [node("Mul", ["x", "k"], ["y"], "mul")]
    model = build(nodes, [value("x", ["N", 3])], [value("y", ["N", 3])], {"k": const(500.0)})
    half = make_half(model)
    with pytest.raises(ModelError, match="output 'y' holds NaN or infinity in float16"):
        verify_float16(model, half, [{"x": np.full((1, 3), 600, np.float32)}], threads=1)
    with pytest.raises(SpecError, match="no array for input 'x'"):
        verify_float16(model, half, [{}], threads=1)


def test_the_type_checker_sees_what_tensorrt_refuses():
    w = {"h": weight(4, dtype=np.float16), "s": const(0.1), "z": np.int8(0)}
    bad = build(
        [node("Add", ["x", "h"], ["y"], "add"), node("QuantizeLinear", ["h", "s", "z"], ["q"], "quantize")],
        [value("x", [4])],
        [value("y", [4]), value("q", [4], TensorProto.INT8)],
        w,
        opset=19,
    )
    errors = find_type_errors(bad)
    assert len(errors) == 2
    assert "node 'add' (Add) mixes" in errors[0]
    with pytest.raises(ModelError, match=r"strongly typed network refuses it: node 'add'.*and 1 more"):
        check_types(bad, where="m.onnx")
    wrong = two_convs()
    wrong.graph.output[0].type.tensor_type.elem_type = HALF
    assert "node 'c2' (Conv) needs one type" in find_type_errors(wrong)[0]


_UNARY = ["Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Softmax", "Erf", "Identity"]
_BINARY = ["Add", "Sub", "Mul", "Max", "Concat", "MatMul"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(_UNARY + _BINARY), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=8
    ),
    kept_index=st.integers(0, 7),
    io=st.sampled_from(["float32", "float16"]),
)
def test_any_graph_stays_strongly_typed_and_close(steps, kept_index, io):
    nodes, tensors, w = [], ["x", "w"], {"w": weight(6, 6, scale=0.4)}
    for index, (op, left, right) in enumerate(steps):
        inputs = [tensors[left % len(tensors)]]
        attrs = {}
        if op in _BINARY:
            inputs.append(tensors[right % len(tensors)])
        if op == "Concat":
            attrs = {"axis": 0}
            nodes.append(node("Concat", inputs, [f"j{index}"], f"join{index}", **attrs))
            w.setdefault("begin", np.array([0], np.int64))
            w.setdefault("end", np.array([6], np.int64))
            nodes.append(node("Slice", [f"j{index}", "begin", "end"], [f"t{index}"], f"n{index}"))
        else:
            nodes.append(node(op, inputs, [f"t{index}"], f"n{index}", **attrs))
        tensors.append(f"t{index}")
    model = build(nodes, [value("x", [6, 6])], [value(tensors[-1], [6, 6])], w)
    half = check(to_float16(model, keep=[f"n{kept_index % len(steps)}"], io=io))
    x = image(6, 6)
    want, got = run(model, {"x": x})[0], exact(half, {"x": x.astype(io)})[0]
    assert got.dtype == np.dtype(io)
    assert np.abs(got - want).max() <= 0.02 * max(1.0, np.abs(want).max())


@pytest.mark.zoo
@pytest.mark.slow
def test_yolo11n_scores_move_by_less_than_two_hundredths():
    from edgeds.preproc import ImagePreprocess, prepare_image, read_image
    from edgeds.specs import Resolution
    from edgeds.zoo import fetch_model, fetch_photos

    model = load_model(fetch_model("yolo11n", quiet=True))
    photo = prepare_image(read_image(fetch_photos(quiet=True)[0]), ImagePreprocess(), Resolution(320, 320))[0]
    feeds = [{"images": photo[None]}]
    half = check(to_float16(model, ranges=find_amplitudes(model, feeds, threads=2)))
    want, got = run(model, feeds[0])[0], run(half, feeds[0])[0]
    assert np.abs(want[:, 4:] - got[:, 4:]).max() <= 0.02
    sure = want[0, 4:].max(axis=0) > 0.25
    assert np.abs(want[0, :4, sure] - got[0, :4, sure]).max() <= 2.0  # pixels of 320
