"""Recovery by distillation (issue 5 part 4): it learns, resumes after a kill, refuses bad input, never makes worse."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from compress_models import FLOAT, INT64, Net, relative, run
from onnx import numpy_helper

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from edgeds.cli.main import main  # noqa: E402
from edgeds.compress.calibset import open_calibration  # noqa: E402
from edgeds.compress.fakequant import open_student  # noqa: E402
from edgeds.compress.prune import prune_model  # noqa: E402
from edgeds.compress.quantize import prepare_float, quantize_model  # noqa: E402
from edgeds.compress.recover import recover_model  # noqa: E402
from edgeds.compress.recover_augment import vary  # noqa: E402
from edgeds.compress.recover_loss import Target, plan_targets, total_loss  # noqa: E402
from edgeds.compress.recover_options import RecoverOptions  # noqa: E402
from edgeds.compress.recover_state import load_state  # noqa: E402
from edgeds.errors import CalibrationError, ModelError, SpecError  # noqa: E402
from edgeds.graph.io import input_specs, load_model  # noqa: E402


def cnn(seed=5, width=16):
    net = Net(seed=seed)
    x = net.input("x", ["n", 3, 12, 12])
    a = net.op("Relu", net.op("Conv", x, net.w(width, 3, 3, 3), net.w(width)))
    b = net.op("Relu", net.op("Conv", a, net.w(width, width, 3, 3), net.w(width)))
    net.output(net.op("Conv", b, net.w(4, width, 1, 1), net.w(4)), ["n", 4, 8, 8])
    return net.model()


@pytest.fixture
def pruned(tmp_path):
    onnx.save(cnn(), tmp_path / "dense.onnx")
    prune_model(tmp_path / "dense.onnx", out=tmp_path / "small.onnx", ratio=0.5, quiet=True)
    return tmp_path


def samples(count=16, seed=0):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(1, 3, 12, 12)).astype(np.float32)} for _ in range(count)]


FAST = RecoverOptions(steps=60, learning_rate=5e-3, batch=8, warmup_steps=5, threads=1)


def recover(folder, *, student="small.onnx", feeds=None, options=FAST, **more):
    return recover_model(
        folder / student,
        teacher=folder / "dense.onnx",
        samples=samples() if feeds is None else feeds,
        out=folder / "out.onnx",
        options=options,
        quiet=True,
        **more,
    )


def test_distillation_without_labels_brings_the_student_closer(pruned):
    report = recover(pruned)
    test = samples(4, seed=99)
    dense, small, better = (load_model(pruned / f"{name}.onnx") for name in ("dense", "small", "out"))
    error = {
        name: np.mean([relative(run(dense, f)[0], run(model, f)[0]) for f in test])
        for name, model in (("small", small), ("better", better))
    }
    assert error["better"] < 0.7 * error["small"]
    assert report.kept
    assert report.loss_after < report.loss_before
    assert report.steps == 60
    assert len(report.losses) == 10
    assert input_specs(better) == input_specs(small)
    assert not (pruned / "out.recover.safetensors").exists()


def test_the_mapping_of_pruning_lets_pruned_layers_be_compared(pruned):
    mapping = json.loads((pruned / "small.mapping.json").read_text())["tensors"]
    targets = plan_targets(
        load_model(pruned / "small.onnx"), load_model(pruned / "dense.onnx"), classes=None, mapping=mapping
    )
    assert {target.kind for target in targets} == {"values", "feature"}
    cut = [target for target in targets if target.kept is not None]
    assert cut
    stored = {item.name: item.dims for item in load_model(pruned / "small.onnx").graph.initializer}
    widths = sorted(dims[0] for dims in stored.values() if len(dims) == 4)
    assert sorted([*(len(target.kept) for target in cut), 4]) == widths
    assert all(target.axis == 1 for target in cut)


def test_a_model_is_never_made_worse(pruned):
    """A rate that only does harm: the model comes back as it was, and the report says so."""
    options = RecoverOptions(steps=3, learning_rate=3.0, warmup_steps=0, threads=1)
    report = recover(pruned, options=options)
    assert not report.kept
    assert report.loss_after == report.loss_before
    assert "as it was" in report.notes[0]
    x = samples(1)[0]
    np.testing.assert_allclose(
        run(load_model(pruned / "out.onnx"), x)[0], run(load_model(pruned / "small.onnx"), x)[0], atol=1e-5
    )


def test_qat_trains_through_the_rounding_and_writes_int8(pruned):
    small = load_model(pruned / "small.onnx")
    feeds = open_calibration(iter(samples(8)), model_inputs=input_specs(small), preprocess=None, resolution=None)
    quantize_model(pruned / "small.onnx", feeds, out=pruned / "int8.onnx", quiet=True)
    report = recover(pruned, student="int8.onnx", options=RecoverOptions(steps=60, threads=1))
    assert report.kept
    assert report.quantized
    written = load_model(pruned / "out.onnx")
    kinds = [node.op_type for node in written.graph.node]
    assert kinds == [node.op_type for node in load_model(pruned / "int8.onnx").graph.node]
    stored = {item.name: numpy_helper.to_array(item) for item in written.graph.initializer}
    before = {i.name: numpy_helper.to_array(i) for i in load_model(pruned / "int8.onnx").graph.initializer}
    weights = [name for name, value in stored.items() if value.dtype == np.int8 and value.ndim == 4]
    assert weights
    assert any(not np.array_equal(stored[name], before[name]) for name in weights)
    assert report.loss_after < 0.9 * report.loss_before, "on samples it was not trained on"


COMMAND = [sys.executable, "-m", "edgeds", "recover"]


def command(folder, *more):
    np.savez(folder / "set.npz", x=np.concatenate([feed["x"] for feed in samples()]))
    paths = [folder / "small.onnx", "--teacher", folder / "dense.onnx", "--calib", folder / "set.npz"]
    return [str(word) for word in [*paths, "--out", folder / "out.onnx", "--batch", 4, "--threads", 1, "-q", *more]]


def test_a_killed_run_resumes_to_the_same_weights(pruned):
    """kill -9 in the middle; what comes out in the end is what an undisturbed run gives."""
    options = RecoverOptions(steps=40, batch=4, threads=1, checkpoint_s=1e-6, learning_rate=1e-3)
    whole = recover(pruned, options=options)
    expected = [numpy_helper.to_array(item) for item in load_model(pruned / "out.onnx").graph.initializer]
    (pruned / "out.onnx").unlink()
    script = (
        "import sys, os, signal\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import edgeds.compress.recover_train as train\n"
        "from test_compress_recover import recover, RecoverOptions\n"
        "save, count = train.save_state, [0]\n"
        "def counted(state, path):\n"
        "    save(state, path)\n"
        "    count[0] += 1\n"
        "    if count[0] == 15: os.kill(os.getpid(), signal.SIGKILL)\n"
        "train.save_state = counted\n"
        f"recover(Path({str(pruned)!r}), options=RecoverOptions(steps=40, batch=4, threads=1, checkpoint_s=1e-6,"
        " learning_rate=1e-3))\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (pruned / "out.onnx").exists()
    assert load_state(pruned / "out.recover.safetensors").facts.step == 14
    with pytest.raises(SpecError, match="--resume"):
        recover(pruned, options=options)
    again = recover(pruned, options=options, resume=True)
    assert again.steps == whole.steps == 40
    found = [numpy_helper.to_array(item) for item in load_model(pruned / "out.onnx").graph.initializer]
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5)


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on(pruned):
    words = [*COMMAND, *command(pruned, "--steps", "100000", "--lr", "1e-4")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (pruned / "out.recover.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # some steps
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    assert load_state(pruned / "out.recover.safetensors").facts.step > 0
    assert not (pruned / "out.onnx").exists()


def test_a_loss_that_explodes_keeps_the_weights_before_it(pruned):
    """NaN in the middle: a sentence, the last good weights, and a lower rate goes on from there."""
    wild = RecoverOptions(steps=40, learning_rate=1e30, warmup_steps=0, batch=4, threads=1)
    with pytest.raises(CalibrationError, match=r"loss is not finite.*--resume and a lower --lr"):
        recover(pruned, options=wild)
    state = load_state(pruned / "out.recover.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in state.mean.values())
    report = recover(pruned, options=replace(wild, learning_rate=1e-3), resume=True)
    assert report.steps == 40
    assert np.isfinite(report.loss_after)


def test_command_prints_one_json_document(pruned, capsys):
    assert main(["recover", *command(pruned, "--steps", "5", "--json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"model", "steps", "loss_before", "loss_after", "samples", "device", "kept"} <= set(found)
    assert found["steps"] == 5


def test_checkpoint_of_another_run_is_refused(pruned):
    (pruned / "out.recover.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match="not a checkpoint"):
        recover(pruned, resume=True)


def test_checkpoint_of_other_options_is_refused(pruned):
    options = RecoverOptions(steps=4, threads=1, checkpoint_s=1e-6, batch=2)

    class StopError(Exception):
        pass

    import edgeds.compress.recover_train as train

    save = train.save_state

    def stop(state, path):
        save(state, path)
        raise StopError

    train.save_state = stop
    try:
        with pytest.raises(StopError):
            recover(pruned, options=options)
    finally:
        train.save_state = save
    with pytest.raises(SpecError, match="other models, samples or options"):
        recover(pruned, options=RecoverOptions(steps=5, threads=1, batch=2), resume=True)


def test_nothing_to_resume_is_said(pruned):
    with pytest.raises(SpecError, match="no checkpoint to resume"):
        recover(pruned, resume=True)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_samples_are_refused(pruned, count):
    with pytest.raises(CalibrationError, match="too few"):
        recover(pruned, feeds=samples(count))


def test_samples_that_are_not_finite_stop_with_a_sentence(pruned):
    feeds = samples(8)
    for feed in feeds:
        feed["x"][:] = np.nan
    with pytest.raises(CalibrationError, match="loss is not finite"):
        recover(pruned, feeds=feeds)
    assert not (pruned / "out.onnx").exists()


def test_another_network_as_teacher_is_refused(pruned):
    onnx.save(cnn(seed=77), pruned / "dense.onnx")
    with pytest.raises(ModelError, match="nothing to learn from"):
        recover(pruned)


def test_teacher_with_other_inputs_is_refused(pruned):
    net = Net(seed=5)
    x = net.input("images", ["n", 3, 12, 12])
    net.output(net.op("Conv", x, net.w(4, 3, 3, 3)))
    onnx.save(net.model(), pruned / "dense.onnx")
    with pytest.raises(ModelError, match="inputs"):
        recover(pruned)


def test_output_over_a_given_model_is_refused(pruned):
    with pytest.raises(SpecError, match="one of the models given"):
        recover_model(
            pruned / "small.onnx", teacher=pruned / "dense.onnx", samples=samples(), out=pruned / "dense.onnx"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"minutes": -1}, "minutes"),
        ({"batch": 0}, "batch"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"mean_decay": 1.0}, "mean_decay"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(SpecError, match=message):
        RecoverOptions(**options)


def test_device_that_is_not_there_is_named(pruned):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SpecError, match="CUDA devices"):
        recover(pruned, options=RecoverOptions(steps=1, device="cuda"))
    with pytest.raises(SpecError, match="expected auto"):
        recover(pruned, options=RecoverOptions(steps=1, device="tpu"))


def tensors(seed, classes, bins=4):
    rng = torch.Generator().manual_seed(seed)
    return {
        "cls": torch.randn((2, classes, 4, 5), generator=rng) * 2 - 3,
        "box": torch.randn((2, 4 * bins, 4, 5), generator=rng),
        "raw": torch.randn((2, 3 * (5 + classes), 4, 5), generator=rng),
        "soft": torch.softmax(torch.randn((2, 7), generator=rng), dim=-1),
        "feat": torch.randn((2, 6, 4, 5), generator=rng),
    }


HEADS = (
    Target(tensor="cls", kind="scores"),
    Target(tensor="box", kind="bins"),
    Target(tensor="raw", kind="anchors"),
    Target(tensor="soft", kind="probabilities"),
    Target(tensor="feat", kind="feature"),
)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
def test_every_loss_is_zero_for_equal_tensors_and_falls_towards_the_teacher(head):
    teacher, other = tensors(1, 6), tensors(2, 6)
    assert float(total_loss((head,), teacher, teacher, classes=6)) == pytest.approx(0.0, abs=1e-6)
    far = float(total_loss((head,), other, teacher, classes=6))
    middle = {name: (teacher[name] + other[name]) / 2 for name in teacher}
    assert 0 < float(total_loss((head,), middle, teacher, classes=6)) < far


def test_boxes_do_not_count_where_the_teacher_sees_nothing():
    teacher, other = tensors(1, 6), tensors(2, 6)
    teacher["cls"] = torch.full_like(teacher["cls"], -20.0)
    assert float(total_loss(HEADS[:2], {**teacher, "box": other["box"]}, teacher, classes=6)) < 1e-5


def test_qat_quantizes_a_pruned_model_and_trains_it(pruned):
    """--qat: from float to INT8 in one step, better than quantizing alone; ranges and rounding are those of Q/DQ."""
    out = ["--out", pruned / "qat.onnx", "--batch", 8, "--threads", 1, "-q", "--json", "--qat", "--steps", 80]
    np.savez(pruned / "set.npz", x=np.concatenate([feed["x"] for feed in samples()]))
    words = [pruned / "small.onnx", "--teacher", pruned / "dense.onnx", "--calib", pruned / "set.npz", *out]
    assert main(["recover", *map(str, [*words, "--lr", 3e-3])]) == 0
    feeds = open_calibration(
        samples(16), model_inputs=input_specs(load_model(pruned / "small.onnx")), preprocess=None, resolution=None
    )
    quantize_model(pruned / "small.onnx", feeds, out=pruned / "ptq.onnx", quiet=True)
    dense, ptq, qat = (load_model(pruned / f"{name}.onnx") for name in ("dense", "ptq", "qat"))
    assert [node.op_type for node in qat.graph.node] == [node.op_type for node in ptq.graph.node]
    stored = {item.name: numpy_helper.to_array(item) for item in qat.graph.initializer}
    assert any(value.dtype == np.int8 and value.ndim == 4 for value in stored.values())
    error = {
        name: np.mean([relative(run(dense, feed)[0], run(model, feed)[0]) for feed in samples(4, seed=99)])
        for name, model in (("ptq", ptq), ("qat", qat))
    }
    assert error["qat"] < 0.8 * error["ptq"]


def test_qat_starts_from_the_float_weights_of_the_pruned_model(pruned):
    model = prepare_float(pruned / "small.onnx")
    student = open_student(
        pruned / "small.onnx", reference=load_model(pruned / "dense.onnx"), feeds=samples(8), qat=True, quiet=True
    )
    weights = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    assert len(student.masters) >= 2
    for name, value in student.masters.items():
        np.testing.assert_array_equal(value, weights[name.removesuffix("_quantized")])


@pytest.mark.parametrize("seed", range(6))
def test_varied_images_keep_shape_and_range_and_repeat_with_the_seed(seed):
    images = torch.rand((3, 3, 20, 28), generator=torch.Generator().manual_seed(seed))
    before = images.clone()
    first, again = (vary(images, random=np.random.default_rng(seed)) for _ in range(2))
    assert torch.equal(images, before)
    assert torch.equal(first, again)
    assert first.shape == images.shape
    assert not torch.equal(first, images)
    assert images.min() <= first.min()
    assert first.max() <= images.max()
    assert not torch.equal(first, vary(images, random=np.random.default_rng(seed + 100)))


def encoder():
    """A small text encoder: int64 tokens and mask, embedding, one attention head, LayerNormalization, Gelu by Erf."""
    net = Net(seed=11)
    ids, mask = net.input("input_ids", ["b", 6], INT64), net.input("attention_mask", ["b", 6], INT64)
    x = net.op("Gather", net.w(20, 8), ids)
    x = net.op("LayerNormalization", x, net.w(value=np.ones(8, np.float32)), net.w(8))
    q, k, v = (net.op("Add", net.op("MatMul", x, net.w(8, 8)), net.w(8)) for _ in range(3))
    hidden = net.op("Sub", net.w(value=np.float32(1)), net.op("Cast", mask, to=FLOAT))
    hidden = net.op("Unsqueeze", net.op("Mul", hidden, net.w(value=np.float32(-1e4))), net.ints(1))
    scores = net.op("Add", net.op("MatMul", q, net.op("Transpose", k, perm=[0, 2, 1])), hidden)
    x = net.op("Add", x, net.op("MatMul", net.op("Softmax", scores, axis=-1), v))
    up = net.op("Add", net.op("MatMul", x, net.w(8, 16)), net.w(16))
    erf = net.op("Erf", net.op("Div", up, net.w(value=np.float32(2**0.5))))
    half = net.op(
        "Mul", net.op("Mul", up, net.op("Add", erf, net.w(value=np.float32(1)))), net.w(value=np.float32(0.5))
    )
    net.output(net.op("Add", net.op("MatMul", half, net.w(16, 4)), net.w(4)), ["b", 6, 4])
    return net.model()


def texts(count, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        mask = (np.arange(6) < rng.integers(2, 7)).astype(np.int64)[None]
        made.append({"input_ids": rng.integers(0, 20, (1, 6)), "attention_mask": mask})
    return made


def test_encoders_learn_from_unlabelled_texts(tmp_path):
    """Two int64 inputs, nothing to augment; embeddings stay, weights and biases come back."""
    dense = encoder()
    onnx.save(dense, tmp_path / "dense.onnx")
    rng, damaged = np.random.default_rng(1), onnx.ModelProto()
    damaged.CopyFrom(dense)
    for item in damaged.graph.initializer:
        value = numpy_helper.to_array(item)
        if value.ndim == 2 and value.shape[0] != 20:
            noise = rng.normal(0, 0.1, value.shape).astype(np.float32)
            item.CopyFrom(numpy_helper.from_array(value + noise, item.name))
    onnx.save(damaged, tmp_path / "small.onnx")
    options = RecoverOptions(steps=80, learning_rate=5e-3, batch=8, warmup_steps=5, threads=1)
    report = recover(tmp_path, feeds=texts(24), options=options)
    better = load_model(tmp_path / "out.onnx")
    test = texts(6, seed=9)
    before, after = (
        np.mean([relative(run(dense, feed)[0], run(model, feed)[0]) for feed in test]) for model in (damaged, better)
    )
    assert report.kept
    assert after < 0.5 * before
    assert [(spec.name, spec.dtype) for spec in input_specs(better)] == [
        ("input_ids", "int64"),
        ("attention_mask", "int64"),
    ]
