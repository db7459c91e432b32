"""Builders of small models for the compress tests, and the one checker that every quantized output must pass."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from edgeds.compress.calibset import open_calibration
from edgeds.compress.placement import Selection
from edgeds.compress.quantize import quantize_model
from edgeds.graph.io import input_specs, load_model

FLOAT, INT64, HALF, BOOL, DOUBLE = (
    TensorProto.FLOAT,
    TensorProto.INT64,
    TensorProto.FLOAT16,
    TensorProto.BOOL,
    TensorProto.DOUBLE,
)


class Net:
    """A model under construction: ``op`` adds a node and returns its output, ``w`` a weight and returns its name.

    Names are drawn at random, so that nothing under test can lean on them; ``names[label]`` finds a labelled node.
    """

    def __init__(self, *, seed=0, opset=17, dtype=np.float32):
        self.rng = np.random.default_rng(seed)
        self.nodes, self.weights, self.inputs, self.outputs, self.names = [], {}, [], [], {}
        self.opset, self.dtype = opset, dtype

    def fresh(self):
        return "t" + "".join(self.rng.choice(list("abcdefghij"), 8))

    def w(self, *shape, scale=0.3, value=None):
        name = self.fresh()
        array = self.rng.normal(0, scale, shape).astype(self.dtype) if value is None else np.asarray(value)
        self.weights[name] = array
        return name

    def ints(self, *values):
        return self.w(value=np.asarray(values, np.int64))

    def input(self, name, dims, elem=FLOAT):
        self.inputs.append(helper.make_tensor_value_info(name, elem, dims))
        return name

    def output(self, tensor, dims=None, elem=FLOAT):
        self.outputs.append(helper.make_tensor_value_info(tensor, elem, dims))

    def op(self, kind, *inputs, label=None, outputs=1, **attrs):
        made = [self.fresh() for _ in range(outputs)]
        name = self.fresh()
        if label:
            self.names[label] = name
        self.nodes.append(helper.make_node(kind, list(inputs), made, name, **attrs))
        return made[0] if outputs == 1 else made

    def conv(self, x, cin, cout, k=3, *, act="Relu", bias=True, label=None, **attrs):
        attrs.setdefault("pads", [k // 2] * 4)
        extra = [self.w(cout)] if bias else []
        y = self.op("Conv", x, self.w(cout, cin // attrs.get("group", 1), k, k), *extra, label=label, **attrs)
        if act == "SiLU":
            return self.op("Mul", y, self.op("Sigmoid", y))
        return self.op(act, y) if act else y

    def reshape(self, x, *dims):
        return self.op("Reshape", x, self.ints(*dims))

    def model(self):
        tensors = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        graph = helper.make_graph(self.nodes, "net", self.inputs, self.outputs, tensors)
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run(model, feeds, *, optimize=True):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def relative(reference, value):
    reference, value = np.asarray(reference, np.float64), np.asarray(value, np.float64)
    return float(np.linalg.norm(reference - value) / (np.linalg.norm(reference) + 1e-12))


def check_quantized(path):
    """The form every TensorRT reads: int8 zero points of 0, positive scales, axes written; loads in both modes."""
    onnx.checker.check_model(str(path), full_check=True)
    model = load_model(path)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    for node in model.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        scale, zero = constants[node.input[1]], constants[node.input[2]]
        assert zero.dtype == np.int8, node.name
        assert not zero.any(), node.name
        assert np.isfinite(scale).all(), node.name
        assert (scale > 0).all(), node.name
        axis = [a.i for a in node.attribute if a.name == "axis"]
        assert (len(axis) == 1) == (scale.ndim == 1), node.name
        if scale.ndim == 1:
            assert constants[node.input[0]].shape[axis[0]] == scale.size
        if node.op_type == "QuantizeLinear":
            assert node.input[0] not in constants, f"{node.name} quantizes a constant at run time"
    for optimize in (True, False):
        options = ort.SessionOptions()
        options.log_severity_level = 4
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return model


def quantize(folder, model, feeds, *, samples=8, name="m", **options):
    """Quantize a model over ``feeds(seed)`` for seeds 0.. and check the result; returns (report, int8 model)."""
    source = folder / f"{name}.onnx"
    if isinstance(model, onnx.ModelProto):
        onnx.save(model, source)
    else:
        source = model
    data = [feeds(seed) for seed in range(samples)]
    calibration = open_calibration(data, model_inputs=input_specs(load_model(source)))
    chosen = {key: options.pop(key) for key in tuple(options) if key in Selection.__dataclass_fields__}
    out = folder / f"{name}.int8.onnx"
    report = quantize_model(
        source, calibration, out=out, selection=Selection(**chosen), threads=1, quiet=True, **options
    )
    return report, check_quantized(out)


def worst_error(model, quantized, feeds, seeds=(101, 102)):
    worst = 0.0
    for seed in seeds:
        for a, b in zip(run(model, feeds(seed)), run(quantized, feeds(seed)), strict=True):
            if a.dtype.kind == "f":
                worst = max(worst, relative(a, b))
    return worst


def pairs(model):
    """{float tensor: number of QuantizeLinear nodes that read it}."""
    found = {}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            found[node.input[0]] = found.get(node.input[0], 0) + 1
    return found


def reads_quantized(model, node_name, index):
    """Whether an input of a node comes from a DequantizeLinear."""
    made = {output: node for node in model.graph.node for output in node.output}
    node = next(item for item in model.graph.node if item.name == node_name)
    producer = made.get(node.input[index])
    return producer is not None and producer.op_type == "DequantizeLinear"


def image_feeds(shape=(2, 3, 16, 16), name="x", scale=1.0, dtype=np.float32):
    return lambda seed: {name: np.random.default_rng(seed).normal(0, scale, shape).astype(dtype)}
