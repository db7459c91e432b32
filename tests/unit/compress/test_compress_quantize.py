"""The whole job: the CPU form, checks against float, reuse of ranges, outliers, interruption, bad targets."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from compress_models import BOOL, INT64, Net, image_feeds, quantize, relative, run, worst_error
from onnx import numpy_helper

import edgeds.compress.ranges as ranges_module
from edgeds.compress.calibset import open_calibration
from edgeds.compress.cpu_variant import to_cpu_variant
from edgeds.compress.placement import Selection
from edgeds.compress.quantize import quantize_model
from edgeds.compress.ranges import load_ranges
from edgeds.errors import CalibrationError, ModelError, SpecError
from edgeds.graph.io import input_specs, load_model


def chain(*, act="Relu", seed=0, scale=1.0):
    net = Net(seed=seed)
    x = net.conv(net.input("x", ["N", 3, 16, 16]), 3, 8, act=act)
    x = net.conv(x, 8, 8, act=act)
    net.output(net.conv(x, 8, 4, 1, act=None))
    if scale != 1.0:
        net.weights = {name: array * np.float32(scale) for name, array in net.weights.items()}
    return net.model()


def activation_zero_points(model):
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            found[node.input[0]] = constants[node.input[2]], float(constants[node.input[1]])
    return found


def test_cpu_form_has_the_same_numbers_on_uint8(tmp_path):
    """Conv -> Relu -> Conv: every scale is that of the int8 form, zero point 128, and the results are equal."""
    cpu = tmp_path / "cpu.onnx"
    report, int8 = quantize(tmp_path, chain(), image_feeds(), cpu_out=cpu)
    cpu_model = load_model(cpu)
    ours, theirs = activation_zero_points(int8), activation_zero_points(cpu_model)
    for tensor, (zero, scale) in ours.items():
        assert theirs[tensor][0].dtype == np.uint8
        assert theirs[tensor] == (128, scale)
        assert zero == 0
    a, b = run(int8, image_feeds()(101))[0], run(cpu_model, image_feeds()(101))[0]
    assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()  # the output is not rounded: TensorRT does not round it either
    assert report.cpu_model == str(cpu)


@pytest.mark.parametrize("act", ["Relu", "SiLU", "HardSwish", "Sigmoid"])
def test_cpu_form_runs_integer_kernels(tmp_path, act):
    cpu = tmp_path / "cpu.onnx"
    quantize(tmp_path, chain(act=act), image_feeds(), cpu_out=cpu)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    ort.InferenceSession(str(cpu), options, providers=["CPUExecutionProvider"])
    ops = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert ops.count("QLinearConv") == 2  # the last one gives the output, which stays float
    assert worst_error(chain(act=act), cpu, image_feeds()) < 0.05


def test_cpu_form_of_wide_biases_b32(tmp_path):
    """B32: 40 / (s_x * s_w) is far beyond int32; the weight scale widens and nothing wraps around."""
    net = Net()
    weight = np.random.default_rng(0).normal(0, 0.3, (4, 3, 3, 3)).astype(np.float32)
    weight[:2] *= 3e-7
    x = net.op("Conv", net.input("x", ["N", 3, 8, 8]), net.w(value=weight),
               net.w(value=np.array([40, -40, 0.1, -0.1], np.float32)))  # fmt: skip
    net.output(net.op("Conv", net.op("Add", x, net.op("Tanh", x)), net.w(3, 4, 1, 1), net.w(3)))
    feeds = image_feeds((2, 3, 8, 8), scale=0.1)
    quantize(tmp_path, net.model(), feeds, cpu_out=tmp_path / "cpu.onnx")
    assert worst_error(net.model(), tmp_path / "m.int8.onnx", feeds) < 0.05
    assert worst_error(net.model(), tmp_path / "cpu.onnx", feeds) < 0.05


def test_cpu_form_without_ranges_computes_in_float(tmp_path):
    _, int8 = quantize(tmp_path, chain(), image_feeds())
    cpu = to_cpu_variant(int8, {})
    assert relative(run(int8, image_feeds()(7))[0], run(cpu, image_feeds()(7))[0]) < 0.01


def test_cpu_form_of_foreign_models_is_refused():
    net = Net()
    quantized = net.op("QuantizeLinear", net.input("x", ["N", 3, 8, 8]), net.w(value=np.float32(0.1)))
    net.output(net.op("DequantizeLinear", quantized, net.w(value=np.float32(0.1))))
    with pytest.raises(ModelError, match="from a model that edgeds quantized"):
        to_cpu_variant(net.model(), {})


def detector():
    net = Net(seed=3)
    x = net.conv(net.input("x", ["N", 3, 8, 8]), 3, 8)
    box = net.op(
        "Mul", net.op("Sigmoid", net.reshape(net.conv(x, 8, 4, 1, act=None), 0, 4, -1)), net.w(value=np.float32(640))
    )
    cls = net.op("Sigmoid", net.reshape(net.conv(x, 8, 2, 1, act=None), 0, 2, -1))
    joined = net.op("Concat", box, cls, axis=1)
    return net, joined


def test_scores_survive_the_join_with_boxes_b36(tmp_path):
    """B36: the tail stays float, so every score channel stays alive and close."""
    net, joined = detector()
    net.output(joined)
    feeds = image_feeds((2, 3, 8, 8))
    report, model = quantize(tmp_path, net.model(), feeds)
    a, b = run(net.model(), feeds(9))[0], run(model, feeds(9))[0]
    assert np.abs(a[:, 4:] - b[:, 4:]).max() < 0.02
    assert {item.reason for item in report.float_nodes} == {f"detector tail of output '{joined}'"}


def test_a_collapse_of_scores_is_refused_b36(tmp_path):
    """B36: with the tail quantized, boxes and scores share one scale; the statistics catch it, nothing is written."""
    net, joined = detector()
    identity = np.eye(6, dtype=np.float32).reshape(6, 6, 1)
    net.output(net.op("Conv", joined, net.w(value=identity)))
    with pytest.raises(CalibrationError, match=r"channel [45]: 100% of its values are non-zero in float and 0%"):
        quantize(tmp_path, net.model(), image_feeds((2, 3, 8, 8)), keep_tail=False)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def bert(layers=2, *, outlier=1.0):
    net = Net()
    x = net.op("Gather", net.w(30, 16, scale=1.0), net.input("ids", ["N", "L"], INT64))
    mask = net.op("Unsqueeze", net.input("mask", ["N", "L"], INT64), net.ints(1, 2))
    mask = net.op("Sub", net.w(value=np.float32(1)), net.op("Cast", mask, to=1))
    mask = net.op("Mul", mask, net.w(value=np.float32(-1e9)))
    gain = np.ones(16, np.float32)
    gain[3] = outlier
    for _ in range(layers):
        heads = []
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            y = net.op("Add", net.op("MatMul", x, net.w(16, 16)), net.w(16))
            heads.append(net.op("Transpose", net.reshape(y, 0, 0, 2, 8), perm=perm))
        scores = net.op("Add", net.op("MatMul", heads[0], heads[1]), mask)
        y = net.op("MatMul", net.op("Softmax", scores, axis=-1), heads[2])
        y = net.reshape(net.op("Transpose", y, perm=[0, 2, 1, 3]), 0, 0, 16)
        x = net.op("Add", x, net.op("MatMul", y, net.w(16, 16)))
        x = net.op("LayerNormalization", x, net.w(value=gain), net.w(16), axis=-1)
        y = net.op("Add", net.op("MatMul", x, net.w(16, 32)), net.w(32))
        erf = net.op(
            "Add", net.op("Erf", net.op("Div", y, net.w(value=np.float32(1.4142)))), net.w(value=np.float32(1))
        )
        x = net.op("Add", x, net.op("MatMul", net.op("Mul", y, erf), net.w(32, 16, scale=0.1)))
    net.output(x)
    return net.model()


def bert_feeds(seed):
    mask = np.ones((2, 7), np.int64)
    mask[1, 5:] = 0
    return {"ids": np.random.default_rng(seed).integers(0, 30, (2, 7)), "mask": mask}


def test_transformers_work_with_defaults_b97(tmp_path):
    """B97: a two-layer encoder with a -1e9 mask: all MatMuls, attention included."""
    report, model = quantize(tmp_path, bert(), bert_feeds)
    assert report.quantized_nodes == 16
    assert worst_error(bert(), model, bert_feeds) < 0.1


def test_decoders_with_cache_inputs_work_with_defaults_b97(tmp_path):
    """B97: one decoder layer whose past is empty in some samples."""
    net = Net()
    x = net.op("Gather", net.w(30, 8, scale=1.0), net.input("ids", ["N", "L"], INT64))
    past = [net.input(name, ["N", "P", 8]) for name in ("past_k", "past_v")]
    k, v = (net.op("Concat", p, net.op("MatMul", x, net.w(8, 8)), axis=1) for p in past)
    scores = net.op("MatMul", net.op("MatMul", x, net.w(8, 8)), net.op("Transpose", k, perm=[0, 2, 1]))
    y = net.op("MatMul", net.op("Softmax", scores, axis=-1), v)
    net.output(net.op("MatMul", net.op("Add", x, y), net.w(8, 30)))
    net.output(k)
    net.output(v)

    def feeds(seed):
        rng = np.random.default_rng(seed)
        past = (1, seed % 3, 8)
        return {
            "ids": rng.integers(0, 30, (1, 3)),
            "past_k": rng.normal(size=past).astype(np.float32),
            "past_v": rng.normal(size=past).astype(np.float32),
        }

    report, model = quantize(tmp_path, net.model(), feeds)
    assert report.quantized_nodes == 6
    assert worst_error(net.model(), model, feeds, seeds=(102, 103)) < 0.1


def test_methods_are_compared_on_held_out_samples_b98(tmp_path):
    """B98: one hidden unit 60x larger; the report shows every method, the choice is recorded, the result is close."""
    report, model = quantize(tmp_path, bert(outlier=60.0), bert_feeds, samples=16, method="auto")
    assert set(report.methods) == {"minmax", "percentile", "entropy", "mse"}
    assert report.method == load_ranges(Path(report.ranges)).chosen
    best = max(value for value in report.methods.values() if value is not None)
    assert report.methods[report.method] >= best - 0.01
    assert report.samples == 16
    assert worst_error(bert(outlier=60.0), model, bert_feeds) < 0.25


def test_layers_that_int8_loses_stay_float_b98(tmp_path):
    """A tensor with values of 1e6 beside values of 1: the layer that needs the small ones goes back to float."""
    net = Net()
    x = net.input("x", ["N", 8])
    scales = np.ones(8, np.float32)
    scales[0] = 1e6
    weight = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    weight[0] = 0
    net.output(net.op("MatMul", net.op("Mul", x, net.w(value=scales)), net.w(value=weight), label="blind"))
    net.output(net.op("MatMul", x, net.w(8, 4), label="sound"))
    feeds = image_feeds((4, 8))
    report, model = quantize(tmp_path, net.model(), feeds)
    assert [item.node for item in report.float_nodes] == [net.names["blind"]]
    assert "INT8 loses its output" in report.float_nodes[0].reason
    assert worst_error(net.model(), model, feeds) < 0.05


def hopeless():
    """Only the last of many unequal columns matters: INT8 cannot hold it anywhere."""
    net = Net()
    scales = np.ones(8, np.float32)
    scales[0] = 1e6
    weight = np.eye(8, dtype=np.float32)
    weight[0] = 0
    net.output(net.op("MatMul", net.op("Mul", net.input("x", ["N", 8]), net.w(value=scales)), net.w(value=weight)))
    return net.model()


def test_a_model_that_int8_cannot_hold_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match="INT8 loses the output"):
        quantize(tmp_path, hopeless(), image_feeds((4, 8)))
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


# reuse of ranges ------------------------------------------------------------------------------------------------------


def calibrate(tmp_path, model, data, *, counter=None, monkeypatch=None, **options):
    source = tmp_path / "m.onnx"
    onnx.save(model, source)
    calibration = data
    if isinstance(data, list):
        calibration = open_calibration(data, model_inputs=input_specs(load_model(source)))
    options.setdefault("out", tmp_path / "out.onnx")
    return quantize_model(source, calibration, threads=1, quiet=True, **options)


DATA = [image_feeds()(seed) for seed in range(3)]


def test_ranges_are_reused_only_when_all_is_equal_b50(tmp_path, monkeypatch):
    """B50: weights, data, method, percentile and tool version each make a table foreign; an equal one runs nothing."""
    first = calibrate(tmp_path, chain(), DATA)
    table = tmp_path / "table.json"
    table.write_bytes(Path(first.ranges).read_bytes())

    def note(model=None, data=DATA, **options):
        report = calibrate(tmp_path, model or chain(), data, ranges_in=table, **options)
        return next(text for text in report.notes if "reused" in text)

    assert "made with model_sha256" in note(chain(scale=1.1))
    assert "other samples" in note(data=DATA[:2])
    assert "made with method" in note(method="minmax")
    assert "made with percentile" in note(percentile=99.9)
    calls = []
    original = ranges_module.collect_histograms
    monkeypatch.setattr(
        "edgeds.compress.rangefind.collect_histograms", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    assert note() == f"ranges reused from {table}"
    assert not calls
    assert json.loads(Path(first.ranges).read_text())["tensors"] == json.loads(table.read_text())["tensors"]
    generator = open_calibration(iter(DATA), model_inputs=input_specs(chain()))
    assert "only once" in note(data=generator)
    data = json.loads(table.read_text())
    data["key"]["tool"] = "edgeds 0.0.0"
    table.write_text(json.dumps(data))
    assert "made with tool" in note()
    for text in ("{", "[]", '{"schema": 99}', '{"schema": 1}', ""):
        table.write_text(text)
        assert note().startswith("ranges not reused")
    table.unlink()
    assert "cannot be read" in note()


def test_preprocessing_is_part_of_the_identity_b50(tmp_path):
    from edgeds.preproc import ImagePreprocess
    from edgeds.specs import Resolution

    images = [np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8) for seed in range(3)]

    def open_set(scale):
        return open_calibration(
            images,
            model_inputs=input_specs(chain()),
            preprocess=ImagePreprocess(scale=scale, stride=8),
            resolution=Resolution(16, 16),
        )

    first = calibrate(tmp_path, chain(), open_set(1 / 255))
    again = calibrate(tmp_path, chain(), open_set(1 / 128), ranges_in=first.ranges)
    assert any("other samples, preprocessing" in note for note in again.notes)


def test_an_interruption_leaves_no_file(tmp_path):
    def interrupted():
        yield DATA[0]
        raise KeyboardInterrupt

    calibration = open_calibration(interrupted(), model_inputs=input_specs(chain()))
    with pytest.raises(KeyboardInterrupt):
        calibrate(tmp_path, chain(), calibration)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_targets_are_checked_before_calibration(tmp_path):
    never = open_calibration(
        (pytest.fail("calibration must not start") for _ in range(1)), model_inputs=input_specs(chain())
    )
    (tmp_path / "file").write_text("")
    cases = {
        tmp_path / "m.onnx": "is the float model itself",
        tmp_path: "is a directory",
        tmp_path / "file" / "out.onnx": "cannot be written to",
    }
    for out, message in cases.items():
        with pytest.raises(SpecError, match=message):
            calibrate(tmp_path, chain(), never, out=out)
    with pytest.raises(SpecError, match="needs different files"):
        calibrate(tmp_path, chain(), never, out=tmp_path / "a.onnx", cpu_out=tmp_path / "a.onnx")
    for options in ({"method": "median"}, {"percentile": 0.5}, {"percentile": float("nan")}, {"sampled_elements": 0}):
        with pytest.raises(SpecError):
            calibrate(tmp_path, chain(), never, **options)


def test_an_existing_output_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "out.onnx").write_text("old")
    calibrate(tmp_path, chain(), DATA)
    assert relative(run(chain(), DATA[0])[0], run(tmp_path / "out.onnx", DATA[0])[0]) < 0.05
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "m.onnx",
        "out.onnx",
        "out.ranges.json",
        "out.report.json",
    ]


def test_a_set_that_does_not_fit_the_model_is_explained(tmp_path):
    onnx.save(chain(), tmp_path / "m.onnx")
    other = open_calibration([{"x": np.zeros((1, 3, 16, 16), np.float32)}], model_inputs=input_specs(chain()))
    other.model_inputs = ()
    with pytest.raises(CalibrationError, match="does not run on calibration data"):
        quantize_model(tmp_path / "m.onnx", other, out=tmp_path / "o.onnx", quiet=True)


def test_the_result_does_not_depend_on_the_run(tmp_path):
    a = calibrate(tmp_path, chain(), DATA, out=tmp_path / "a.onnx")
    b = calibrate(tmp_path, chain(), DATA, out=tmp_path / "b.onnx")
    assert Path(a.int8_model).read_bytes() == Path(b.int8_model).read_bytes()
    assert Path(a.ranges).read_bytes() == Path(b.ranges).read_bytes()


def test_boolean_and_scalar_inputs(tmp_path):
    net = Net()
    x = net.op("MatMul", net.input("x", ["N", 8]), net.w(8, 8))
    net.output(net.op("Where", net.input("flag", [], BOOL), x, net.op("Mul", x, net.input("gain", []))))

    def feeds(seed):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(2, 8)).astype(np.float32)
        return {"x": x, "flag": np.array(bool(seed % 2)), "gain": np.array(rng.random(), np.float32)}

    _, model = quantize(tmp_path, net.model(), feeds)
    assert worst_error(net.model(), model, feeds) < 0.05
    assert Selection().residual
