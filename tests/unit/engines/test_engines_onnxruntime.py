"""The CPU engine: parity with numpy, strict inputs, owned outputs, bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
psutil = pytest.importorskip("psutil")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from edgeds.engines.base import default_threads  # noqa: E402
from edgeds.engines.onnxruntime import OnnxRuntimeEngine  # noqa: E402
from edgeds.errors import InputError, ModelError, SessionClosed, SpecError  # noqa: E402

WEIGHT = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)


def save_model(path, nodes, inputs, outputs, inits=(), *, ir_version=8):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(inits))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=ir_version)
    onnx.save(model, str(path))
    return path


@pytest.fixture(scope="module")
def conv_path(tmp_path_factory):
    return save_model(
        tmp_path_factory.mktemp("m") / "conv.onnx",
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["y"]),
            helper.make_node("Identity", ["w"], ["weight"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, "H", "W"])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4, "H", "W"]),
            helper.make_tensor_value_info("weight", TensorProto.FLOAT, [4, 3, 3, 3]),
        ],
        [numpy_helper.from_array(WEIGHT, "w")],
    )


@pytest.fixture
def engine(conv_path):
    with OnnxRuntimeEngine(conv_path, threads=1) as opened:
        yield opened


def conv_relu(x):
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))).astype(np.float64)
    height, width = x.shape[2:]
    total = sum(
        np.einsum("nchw,oc->nohw", padded[:, :, i : i + height, j : j + width], WEIGHT[:, :, i, j].astype(np.float64))
        for i in range(3)
        for j in range(3)
    )
    return np.maximum(total, 0)


def test_matches_numpy_and_reports_its_io(engine):
    x = np.random.default_rng(1).random((2, 3, 8, 12)).astype(np.float32)
    np.testing.assert_allclose(engine.infer({"x": x})["y"], conv_relu(x), rtol=1e-4, atol=1e-5)
    assert str(engine.inputs[0]) == "x: float32[Nx3xHxW]"
    assert [spec.name for spec in engine.outputs] == ["y", "weight"]
    assert engine.backend == "onnxruntime"
    assert engine.threads == 1
    assert engine.fallback_reason is None


def test_outputs_are_owned_by_the_caller(engine):
    """B70: writing into a result changes neither the model, nor the input, nor a later result."""
    x = np.random.default_rng(2).random((1, 3, 4, 4)).astype(np.float32)
    before = x.copy()
    first = engine.infer({"x": x})
    kept = {name: value.copy() for name, value in first.items()}
    for value in first.values():
        value[...] = 99
    second = engine.infer({"x": x})
    np.testing.assert_array_equal(x, before)
    for name, value in second.items():
        np.testing.assert_array_equal(value, kept[name])
        assert value.flags.owndata
        assert not np.shares_memory(value, first[name])


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({}, ["'x'", "missing"]),
        ({"x": np.zeros((1, 3, 4, 4), np.float32), "z": np.zeros(1)}, ["'z'", "unknown", "x"]),
        ({"x": np.zeros((1, 3, 4, 4))}, ["'x'", "float32", "float64"]),
        ({"x": np.zeros((1, 3, 4, 4), ">f4")}, ["'x'", ">f4"]),
        ({"x": np.zeros((3, 4, 4), np.float32)}, ["'x'", "[N, 3, H, W]", "[3, 4, 4]"]),
        ({"x": np.zeros((1, 4, 4, 4), np.float32)}, ["'x'", "[1, 4, 4, 4]"]),
        ({"x": np.zeros((0, 3, 4, 4), np.float32)}, ["'x'", "empty"]),
        ({"x": [[1.0]]}, ["'x'", "list"]),
        ([1, 2], ["mapping", "list"]),
        ({"x": np.zeros((1, 3, 0, 4), np.float32)}, ["conv.onnx", "[1, 3, 0, 4]"]),
    ],
)
def test_feeds_that_do_not_fit_are_named(engine, feeds, words):
    with pytest.raises(InputError) as caught:
        engine.infer(feeds)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text
    engine.infer({"x": np.zeros((1, 3, 4, 4), np.float32)})


def test_non_contiguous_input_is_taken(engine):
    wide = np.random.default_rng(3).random((1, 8, 8, 3)).astype(np.float32)
    x = wide.transpose(0, 3, 1, 2)[:, ::-1]
    np.testing.assert_allclose(engine.infer({"x": x})["y"], conv_relu(x), rtol=1e-4, atol=1e-5)


def test_dims_of_one_name_must_agree(tmp_path):
    value = helper.make_tensor_value_info
    path = save_model(
        tmp_path / "two.onnx",
        [helper.make_node("Concat", ["a", "b"], ["y"], axis=1)],
        [value("a", TensorProto.FLOAT, ["N", 2]), value("b", TensorProto.FLOAT, ["N", 3])],
        [value("y", TensorProto.FLOAT, ["N", 5])],
    )
    with OnnxRuntimeEngine(path, threads=1) as two, pytest.raises(InputError, match=r"'b'.*'N' is 3.*is 2.*'a'"):
        two.infer({"a": np.zeros((2, 2), np.float32), "b": np.zeros((3, 3), np.float32)})


def test_a_failing_run_is_one_line_and_leaves_the_engine_usable(tmp_path):
    value = helper.make_tensor_value_info
    path = save_model(
        tmp_path / "gather.onnx",
        [helper.make_node("Gather", ["t", "i"], ["y"], name="pick_row")],
        [value("i", TensorProto.INT64, ["N"])],
        [value("y", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(np.eye(2, dtype=np.float32), "t")],
    )
    with OnnxRuntimeEngine(path, threads=1) as gather:
        with pytest.raises(InputError, match="pick_row") as caught:
            gather.infer({"i": np.array([5], np.int64)})
        assert "\n" not in str(caught.value)
        assert gather.infer({"i": np.array([1], np.int64)})["y"].tolist() == [[0.0, 1.0]]


def test_files_that_cannot_be_loaded(tmp_path, conv_path):
    """B03 for the engine side: a newer IR version is said plainly, with what this runtime supports."""
    (tmp_path / "junk.onnx").write_bytes(b"\xff\x00junk")
    (tmp_path / "empty.onnx").write_bytes(b"")
    model = onnx.load(str(conv_path))
    model.ir_version = 99
    (tmp_path / "newer.onnx").write_bytes(model.SerializeToString())
    for name, word in (("junk", "cannot load"), ("empty", "cannot load"), ("newer", "99"), ("absent", "no such")):
        with pytest.raises(ModelError, match=word) as caught:
            OnnxRuntimeEngine(tmp_path / f"{name}.onnx")
        assert f"{name}.onnx" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("threads", [0, -1, 5000, 2.5, True, "2"])
def test_thread_counts_are_checked(conv_path, threads):
    with pytest.raises(SpecError, match="threads"):
        OnnxRuntimeEngine(conv_path, threads=threads)


def test_default_threads_follow_siblings_and_quota(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    for cpu, siblings in enumerate(("0-1", "0-1", "2-3", "2-3")):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    assert default_threads(sysfs=tmp_path) == 2
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpu.max").write_text("100000 100000")
    assert default_threads(sysfs=tmp_path) == 1
    (tmp_path / "fs/cgroup/cpu.max").write_text("max 100000")
    assert default_threads(sysfs=tmp_path) == 2
    assert default_threads(sysfs=tmp_path / "nowhere") == 4


def test_many_threads_get_their_own_answers(engine):
    """B70 at the engine: 8 threads, each with its own marked image."""
    wrong: list[int] = []

    def work(mark: int) -> None:
        x = np.full((1, 3, 8, 8), mark / 8, np.float32)
        want = conv_relu(x)
        for _ in range(25):
            if not np.allclose(engine.infer({"x": x})["y"], want, rtol=1e-4, atol=1e-4):
                wrong.append(mark)

    workers = [threading.Thread(target=work, args=(mark,)) for mark in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_async_and_closing(conv_path):
    closed = []
    engine = OnnxRuntimeEngine(conv_path, threads=1, on_close=lambda: closed.append(1))
    x = np.ones((1, 3, 4, 4), np.float32)
    future = engine.infer_async({"x": x})
    engine.close()
    engine.close()
    assert closed == [1]
    np.testing.assert_allclose(future.result(timeout=10)["y"], conv_relu(x), rtol=1e-4)
    for call in (engine.infer, engine.infer_async):
        with pytest.raises(SessionClosed, match=r"conv\.onnx"):
            call({"x": x})


def test_memory_stays_bounded_over_many_shapes(engine):
    """B74, B127: 300 runs over 40 sizes hold hardly more than over 3 sizes, and the slope is below 50 kB a run."""
    process = psutil.Process()

    def run_sizes(count: int) -> int:
        for index in range(300):
            side = 256 - 4 * (index % count)
            engine.infer({"x": np.zeros((1, 3, side, 256), np.float32)})
        return int(process.memory_info().rss)

    few = run_sizes(3)
    many = run_sizes(40)
    again = run_sizes(40)
    assert many - few < 25 << 20
    assert (again - many) / 300 < 50_000


def test_trim_gives_memory_back_and_keeps_answers(engine):
    process = psutil.Process()
    small = np.ones((1, 3, 8, 8), np.float32)
    want = engine.infer({"x": small})["y"]
    engine.infer({"x": np.zeros((16, 3, 512, 512), np.float32)})
    held = process.memory_info().rss
    engine.trim()
    np.testing.assert_array_equal(engine.infer({"x": small})["y"], want)
    assert process.memory_info().rss < held - (40 << 20)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_can_run_close_and_exit(tmp_path):
    """The threads of the runtime stay behind in a fork; waiting for them in close() would hang the child."""
    code = f"""
import os, signal, sys, warnings
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
warnings.simplefilter("ignore")
import numpy as np
from onnx import TensorProto, helper, numpy_helper, save
from edgeds.engines import open_engine
weight = numpy_helper.from_array(np.ones((32, 32, 3, 3), np.float32), "w")
info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 32, None, None]) for n in "xy"]
graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"])], "g", info[:1], info[1:], [weight])
save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), {str(tmp_path / "m.onnx")!r})
from pathlib import Path
engine = open_engine(Path({str(tmp_path / "m.onnx")!r}), threads=2)
other = open_engine(Path({str(tmp_path / "m.onnx")!r}), threads=2)
feeds = {{"x": np.ones((1, 32, 128, 128), np.float32)}}
engine.infer(feeds); engine.infer_async(feeds).result(); other.infer(feeds)
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    engine.infer(feeds); engine.infer_async(feeds).result(); engine.close()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
engine.infer(feeds); engine.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0")])
def test_runtime_does_not_report_usage_unless_asked(tmp_path, given, expected):
    """ONNX Runtime 1.32 sends telemetry and leaves a device identifier in the temporary folder."""
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    if given is not None:
        environment["ORT_DISABLE_TELEMETRY"] = given
    code = "import os, edgeds\nprint(os.environ['ORT_DISABLE_TELEMETRY'])"
    code += "\nfrom edgeds.engines.onnxruntime import import_onnxruntime\nimport_onnxruntime()" if given is None else ""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
    if given is None:
        assert list(tmp_path.iterdir()) == []
