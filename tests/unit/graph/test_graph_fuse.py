"""LayerNorm fusion and folding (issue 6 part 2): equal numbers, one operator, nothing else touched."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgeds.graph.fuse import fold_norm_scales, fuse_layernorms
from edgeds.graph.session import open_session

WIDTH = 12


class Build:
    def __init__(self, seed=0, opset=13):
        self.rng, self.nodes, self.weights, self.opset = np.random.default_rng(seed), [], {}, opset

    def w(self, value):
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(value, np.float32)
        return name

    def op(self, kind, *inputs, **attributes):
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [f"{name}_out"], name, **attributes))
        return f"{name}_out"

    def model(self, *outputs):
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 5, WIDTH])
        stored = [numpy_helper.from_array(value, name) for name, value in self.weights.items()]
        graph = helper.make_graph(self.nodes, "g", [x], infos, stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def norm(self, x, *, square="Pow", twice=False, reciprocal=False, affine=True, epsilon=1e-5):
        mean = self.op("ReduceMean", x, axes=[-1])
        centred = self.op("Sub", x, mean)
        again = self.op("Sub", x, mean) if twice else centred
        squared = self.op("Pow", again, self.w(2.0)) if square == "Pow" else self.op("Mul", again, again)
        plus = self.op("Add", self.op("ReduceMean", squared, axes=[2]), self.w(epsilon))
        root = self.op("Sqrt", plus)
        out = self.op("Mul", centred, self.op("Reciprocal", root)) if reciprocal else self.op("Div", centred, root)
        if affine:
            out = self.op("Mul", out, self.w(self.rng.normal(1, 0.5, WIDTH)))
            out = self.op("Add", self.w(self.rng.normal(0, 0.5, WIDTH)), out)
        return out


def run(model, seed=3):
    x = np.random.default_rng(seed).normal(size=(2, 5, WIDTH)).astype(np.float32) * 3
    return open_session(model, threads=1).run(None, {"x": x})


def kinds(model):
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_decomposed_norms_become_one_operator(square, twice, reciprocal, affine):
    build = Build()
    out = build.norm("x", square=square, twice=twice, reciprocal=reciprocal, affine=affine)
    model = build.model(build.op("Tanh", out))
    fused, count = fuse_layernorms(model)
    assert count == 1
    assert kinds(fused) == ["LayerNormalization", "Tanh"]
    onnx.checker.check_model(fused, full_check=True)
    np.testing.assert_allclose(run(fused)[0], run(model)[0], atol=2e-6)


def test_a_norm_that_is_an_output_keeps_its_name():
    build = Build()
    model = build.model(build.norm("x"))
    fused, count = fuse_layernorms(model)
    assert count == 1
    assert fused.graph.output[0].name == model.graph.output[0].name
    np.testing.assert_allclose(run(fused)[0], run(model)[0], atol=2e-6)


def test_what_only_looks_like_a_norm_stays():
    build = Build()
    mean = build.op("ReduceMean", "x", axes=[1])  # over another axis
    centred = build.op("Sub", "x", mean)
    root = build.op(
        "Sqrt", build.op("Add", build.op("ReduceMean", build.op("Mul", centred, centred), axes=[1]), build.w(1e-5))
    )
    model = build.model(build.op("Div", centred, root))
    same, count = fuse_layernorms(model)
    assert count == 0
    assert same is model
    build = Build()
    centred = build.op("Sub", "x", build.op("ReduceMean", "x", axes=[-1]))
    cubed = build.op("Pow", build.op("Abs", centred), build.w(3.0))
    root = build.op("Sqrt", build.op("Add", build.op("ReduceMean", cubed, axes=[-1]), build.w(1e-5)))
    assert fuse_layernorms(build.model(build.op("Div", centred, root)))[1] == 0


def with_linear(seed=0, *, kind="MatMul", bias=True, shortcut=False, readers=2):
    build = Build(seed=seed, opset=17)
    rng = build.rng
    scale, shift = build.w(rng.normal(1, 0.5, WIDTH)), build.w(rng.normal(0, 0.5, WIDTH))
    h = build.op("LayerNormalization", "x", scale, shift, axis=-1)
    outs = []
    for _ in range(readers):
        out = build.op("MatMul", h, build.w(rng.normal(size=(WIDTH, 7))))
        outs.append(build.op("Add", out, build.w(rng.normal(size=7))) if bias else out)
    if shortcut:
        outs.append(build.op("Relu", h))
    return build.model(*outs)


@given(st.integers(0, 1000), st.booleans(), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_scales_move_into_the_linear_layers(seed, bias, readers):
    model = with_linear(seed, bias=bias, readers=readers)
    folded, count = fold_norm_scales(model)
    assert count == 1
    for a, b in zip(run(model), run(folded), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-5)
    norm = next(node for node in folded.graph.node if node.op_type == "LayerNormalization")
    stored = {item.name: numpy_helper.to_array(item) for item in folded.graph.initializer}
    assert np.all(stored[norm.input[1]] == 1)
    assert not stored[norm.input[2]].any()
    assert fold_norm_scales(folded)[1] == 0, "nothing is left to move"
    assert kinds(folded).count("Add") == readers, "a bias that is there takes the shift"


def test_a_norm_that_the_shortcut_reads_keeps_its_scale():
    assert fold_norm_scales(with_linear(shortcut=True))[1] == 0


def gemm_model(*, trans_b, weight_node=False, beta=1.0):
    build = Build(seed=4, opset=17)
    rng = build.rng
    flat = build.op("ReduceMax", "x", axes=[1], keepdims=0)
    h = build.op("LayerNormalization", flat, build.w(rng.normal(1, 0.5, WIDTH)), build.w(rng.normal(0, 0.5, WIDTH)))
    weight = rng.normal(size=(7, WIDTH) if trans_b else (WIDTH, 7)).astype(np.float32)
    kernel = build.op("Constant", value=numpy_helper.from_array(weight)) if weight_node else build.w(weight)
    return build.model(build.op("Gemm", h, kernel, build.w(rng.normal(size=7)), transB=int(trans_b), beta=beta))


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("weight_node", [False, True])
def test_gemms_take_the_scale_in_either_layout(trans_b, weight_node):
    model = gemm_model(trans_b=trans_b, weight_node=weight_node)
    folded, count = fold_norm_scales(model)
    assert count == 1
    assert kinds(folded)[-1] == "Gemm", "its bias takes the shift, no Add is left"
    np.testing.assert_allclose(run(folded)[0], run(model)[0], atol=2e-5)
    assert fold_norm_scales(gemm_model(trans_b=trans_b, beta=0.5))[1] == 0


def test_weights_that_two_layers_share_are_left_alone():
    model = with_linear(readers=2)
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    products[1].input[1] = products[0].input[1]
    same, count = fold_norm_scales(model)
    assert count == 0
    assert same is model


def test_a_fold_that_would_overflow_float16_is_left():
    model = with_linear(readers=1, bias=False)
    for item in model.graph.initializer:
        item.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(item).astype(np.float16) * 250, item.name))
    for item in (*model.graph.input, *model.graph.output):
        item.type.tensor_type.elem_type = TensorProto.FLOAT16
    assert fold_norm_scales(model)[1] == 0


def test_fusion_then_fold_on_a_prenorm_block_is_exact():
    """What a pre-norm transformer of an old exporter becomes: the operator first, then its scale in the linears."""
    build = Build(seed=6)
    h = build.norm("x")
    out = build.op("Add", build.op("MatMul", h, build.w(build.rng.normal(size=(WIDTH, WIDTH)))), "x")
    model = build.model(out)
    fused, norms = fuse_layernorms(model)
    folded, moved = fold_norm_scales(fused)
    assert (norms, moved) == (1, 1)
    np.testing.assert_allclose(run(folded)[0], run(model)[0], atol=2e-5)
    assert kinds(model).count("ReduceMean") == 2, "the model given is not touched"
