"""The TensorRT engine on the simulated device: our reading of the API, never a TensorRT run.

The stand-in computes real outputs with ONNX Runtime, so results must equal the CPU engine's to the last bit. Whatever
would be undefined on a GPU is a violation, and every test here must end without one and without anything left over.
"""

from __future__ import annotations

import gc
import json
import os
import re
import statistics
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from simdevice import models
from simdevice.simcuda import SimCuda, build_library
from simdevice.simtrt import make_tensorrt, write_plan

from edgeds.engines.base import Engine
from edgeds.engines.cuda import open_cuda
from edgeds.engines.onnxruntime import OnnxRuntimeEngine
from edgeds.engines.tensorrt import RunOptions, TensorRTEngine
from edgeds.errors import (
    DeviceError,
    EdgedsError,
    EngineMismatch,
    InputError,
    ModelError,
    OutOfMemory,
    SessionClosed,
    SpecError,
)
from edgeds.runtime import BatchPolicy, Session
from edgeds.specs import TensorSpec

NOTHING = {"runtimes": 0, "engines": 0, "contexts": 0}
KINDS = pytest.mark.parametrize("integrated", [1, 0], ids=["jetson", "discrete"])


@pytest.fixture
def trt(simcuda):
    module = make_tensorrt(simcuda)
    yield module
    assert module.sim.violations == []
    assert module.sim.live == NOTHING


@pytest.fixture
def cuda(simcuda, trt):
    with open_cuda(driver="ctypes", library=str(simcuda.path)) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def conv(folder):
    model = models.conv_model(folder / "conv.onnx")
    return write_plan(folder / "conv.plan", model, profiles=models.CONV_PROFILES)


@pytest.fixture(scope="module")
def reference(folder):
    with OnnxRuntimeEngine(models.conv_model(folder / "reference.onnx"), threads=1) as engine:
        yield engine


def open_sim(plan, simcuda, trt, *, integrated=1, cuda=None, **options):
    simcuda.set(integrated=integrated)
    extra = {key: options.pop(key) for key in ("specs", "derive", "on_close") if key in options}
    cuda = cuda or open_cuda(driver="ctypes", library=str(simcuda.path))
    extra.setdefault("on_close", cuda.close)
    return TensorRTEngine(plan, trt=trt, cuda=cuda, options=RunOptions(**options), **extra)


def image(seed, *shape):
    return np.random.default_rng(seed).random(shape).astype(np.float32)


def check_equal(got, want):
    assert list(got) == list(want)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
        assert got[name].flags.owndata
        assert got[name].flags.writeable


@KINDS
@pytest.mark.parametrize("graphs", [True, False])
def test_equals_the_cpu_engine_over_shapes_and_repeats(conv, simcuda, trt, reference, integrated, graphs):
    with open_sim(conv, simcuda, trt, integrated=integrated, graphs=graphs) as engine:
        assert isinstance(engine, Engine)
        assert str(engine.inputs[0]) == "x: float32[batchx3x?x?]"
        assert [str(spec) for spec in engine.outputs] == ["y: float32[batchx4x?x?]", "m: float32[batchx1x1x1]"]
        assert engine.max_batch == 4
        for seed in range(4):
            for shape in [(1, 3, 8, 8), (4, 3, 8, 8), (2, 3, 20, 24), (3, 3, 32, 9)]:
                x = image(seed, *shape)
                check_equal(engine.infer({"x": x}), reference.infer({"x": x}))
        stats = engine.stats()
        assert stats.calls == 16
        assert stats.zero_copy == bool(integrated)
        assert (stats.graphs, stats.graph_runs) == ((4, 8) if graphs else (0, 0))
        assert (stats.graph_problem is None) == graphs


@KINDS
def test_zero_copy_moves_nothing_on_a_jetson(conv, simcuda, trt, integrated):
    with open_sim(conv, simcuda, trt, integrated=integrated) as engine:
        before = simcuda.count("copies")
        engine.infer({"x": image(0, 1, 3, 8, 8)})
        assert simcuda.count("copies") - before == (0 if integrated else 3)


@KINDS
@pytest.mark.parametrize("lanes", [1, 3])
def test_b70_threads_get_their_own_results(conv, simcuda, trt, reference, integrated, lanes):
    """B70: 16 threads with marked images; nothing is mixed up and no two results share memory."""
    with open_sim(conv, simcuda, trt, integrated=integrated, lanes=lanes) as engine:

        def work(mark):
            results = []
            for turn in range(15):
                x = np.full((1 + mark % 3, 3, 8, 8 + turn % 2), mark, np.float32)
                result = engine.infer({"x": x})
                assert np.all(result["m"] == mark)
                check_equal(result, reference.infer({"x": x}))
                results.append(result["y"])
            return results

        with ThreadPoolExecutor(16) as pool:
            results = [array for part in pool.map(work, range(16)) for array in part]
        assert engine.stats().lanes <= lanes
        kept = [array.copy() for array in results]
        for array in results[::2]:
            array[...] = -1
        for array, copy in zip(results[1::2], kept[1::2], strict=True):
            np.testing.assert_array_equal(array, copy)


def test_the_smallest_fitting_profile_runs(conv, simcuda, trt):
    with open_sim(conv, simcuda, trt) as engine:
        for rows, side in [(1, 8), (1, 9), (1, 32)]:
            engine.infer({"x": image(0, rows, 3, side, side)})
        used = [plan.profile.index for plan in engine._plans.values()]
        assert used == [0, 1, 1]
        assert engine.profiles[0]["x"].max == (4, 3, 8, 8)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((5, 3, 8, 8), [r"\[5, 3, 8, 8\]", r"1\.\.4, 3, 8, 8", "or"]),
        ((1, 3, 33, 8), [r"8\.\.32", "'x'", "profile"]),
        ((1, 3, 7, 8), ["7"]),
    ],
)
def test_b75_shapes_no_profile_allows_are_refused_before_the_run(conv, simcuda, trt, shape, words):
    """B67, B75: never a stale result and never a build in the request path."""
    with open_sim(conv, simcuda, trt) as engine:
        before = trt.sim.runs
        with pytest.raises(InputError) as caught:
            engine.infer({"x": image(0, *shape)})
        for word in words:
            assert re.search(word, str(caught.value))
        assert trt.sim.runs == before
        engine.infer({"x": image(0, 1, 3, 8, 8)})


def test_b67_a_session_splits_what_is_larger_than_the_engine(conv, simcuda, trt, reference):
    """B67: ten rows for an engine of four run as 4 + 4 + 2, in order."""
    with open_sim(conv, simcuda, trt) as engine, Session(engine, policy=BatchPolicy(max_batch=8)) as session:
        assert session.policy.max_batch == 4
        x = image(1, 10, 3, 8, 8)
        answer = session.infer({"x": x})
        np.testing.assert_array_equal(answer.outputs["m"], reference.infer({"x": x})["m"])
        assert session.stats().batch_size_histogram == {2: 1, 4: 2}
        with pytest.raises(InputError, match="outside"):
            session.infer({"x": image(1, 1, 3, 64, 64)})
        assert session.stats().backend == "tensorrt"


@KINDS
@pytest.mark.parametrize("graphs", [True, False])
def test_overhead_of_a_call_is_at_most_150_microseconds(conv, simcuda, trt, integrated, graphs):
    """Without the model's compute, batch 1. The least of several medians: the machine is shared."""
    with open_sim(conv, simcuda, trt, integrated=integrated, graphs=graphs) as engine:
        feeds = {"x": image(0, 1, 3, 8, 8)}
        engine.infer(feeds)
        trt.sim.compute = False
        medians = []
        for _ in range(5):
            times = []
            for _ in range(200):
                begin = time.perf_counter()
                engine.infer(feeds)
                times.append(time.perf_counter() - begin)
            medians.append(statistics.median(times) * 1e6)
        assert min(medians) <= 150, f"{medians} microseconds"


@KINDS
def test_ten_thousand_inferences_of_eight_threads_leak_nothing(conv, simcuda, trt, integrated):
    simcuda.set(integrated=integrated)
    before = simcuda.live()
    with open_sim(conv, simcuda, trt, integrated=integrated, lanes=2) as engine:
        trt.sim.compute = False
        shapes = [(n, 3, h, w) for n in (1, 2, 3, 4) for h in range(8, 32, 4) for w in (8, 16, 31)]
        feeds = [{"x": np.zeros(shape, np.float32)} for shape in shapes]
        errors: list[BaseException] = []

        def work(start):
            try:
                for turn in range(1250):
                    engine.infer(feeds[(start * 7 + turn // 3) % len(feeds)])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        stats = engine.stats()
        assert stats.calls == 10_000
        assert stats.graphs <= 2 * 16
        assert stats.graph_runs > 0
        assert simcuda.count("execs") == stats.graphs
        assert simcuda.count("pending") == 0
    assert simcuda.live() == before
    assert trt.sim.live == NOTHING


CALLS = [
    *("cuStreamCreate", "cuEventCreate", "cuMemAlloc_v2", "cuMemHostAlloc", "cuMemHostGetDevicePointer_v2"),
    *("cuCtxPushCurrent_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuStreamWaitEvent"),
    *("cuEventSynchronize", "cuLaunchHostFunc", "cuStreamBeginCapture_v2", "cuStreamEndCapture"),
    *("cuGraphInstantiateWithFlags", "cuGraphLaunch", "cuMemGetInfo_v2"),
]


@KINDS
@pytest.mark.parametrize("call", CALLS)
def test_every_driver_failure_is_told_and_leaves_nothing(conv, simcuda, trt, reference, integrated, call):
    """The nth call of each function fails: our error or a right answer, nothing leaked, the next call works."""
    x = image(3, 2, 3, 8, 8)
    want = reference.infer({"x": x})
    told: list[str] = []
    simcuda.set(integrated=integrated)
    for nth in (1, 2, 3, 5, 9, 17):
        before = simcuda.live()
        with open_cuda(driver="ctypes", library=str(simcuda.path)) as cuda:
            simcuda.fail(call, nth, 801)
            try:
                engine = TensorRTEngine(conv, trt=trt, cuda=cuda)
            except EdgedsError as error:
                told.append(str(error))
            else:
                with engine:
                    for _ in range(4):
                        try:
                            check_equal(engine.infer({"x": x}), want)
                        except EdgedsError as error:
                            told.append(str(error))
                    simcuda.fail("", 0, 0)
                    check_equal(engine.infer({"x": x}), want)
            simcuda.fail("", 0, 0)
            assert simcuda.count("depth") == 0
        assert simcuda.live() == before
    assert trt.sim.live == NOTHING
    assert not any("\n" in text for text in told)


@KINDS
def test_a_broken_context_is_final_and_close_still_ends(conv, tmp_path, integrated):
    """A failed kernel loses the context: every later call says so at once, and closing raises nothing."""
    sim = SimCuda(build_library(tmp_path))  # its own driver, since nothing can be freed any more
    sim.set(integrated=integrated)
    trt = make_tensorrt(sim)
    cuda = open_cuda(driver="ctypes", library=str(sim.path))
    engine = TensorRTEngine(conv, trt=trt, cuda=cuda)
    trt.sim.fail_next = "kernel"
    with pytest.raises(DeviceError, match=r"LAUNCH_FAILED \(719\).*restart"):
        engine.infer({"x": image(0, 1, 3, 8, 8)})
    with pytest.raises(DeviceError, match="cannot go on"):
        engine.infer({"x": image(0, 1, 3, 8, 8)})
    engine.close()
    cuda.close()


def test_what_tensorrt_refuses_is_told_with_its_reason(conv, simcuda, trt, reference):
    with open_sim(conv, simcuda, trt) as engine:
        x = image(0, 1, 3, 8, 8)
        trt.sim.fail_next = "execute"
        with pytest.raises(DeviceError, match=r"conv\.plan: inference could not be started: .*no kernel could be run"):
            engine.infer({"x": x})
        check_equal(engine.infer({"x": x}), reference.infer({"x": x}))
        trt.sim.fail_next = "context"
        y = {"x": image(0, 2, 3, 8, 8)}
        engine.infer(y)
        with pytest.raises(OutOfMemory, match="Requested size"):
            engine.infer(y)  # the second run makes the context of a graph
        check_equal(engine.infer({"x": x}), reference.infer({"x": x}))


@pytest.mark.parametrize("capturable", [False, "fails"])
def test_an_engine_that_cannot_be_captured_runs_without_graphs(folder, simcuda, trt, reference, capturable):
    plan = write_plan(
        folder / "nocapture.plan", folder / "reference.onnx", profiles=models.CONV_PROFILES, capturable=capturable
    )
    x = image(0, 2, 3, 8, 8)
    with open_sim(plan, simcuda, trt) as engine:
        for _ in range(60):
            check_equal(engine.infer({"x": x}), reference.infer({"x": x}))
        assert re.search("cannot be captured|graphs are off", engine.stats().graph_problem)
        assert engine.stats().graphs == 0
        if not capturable:  # and when TensorRT changes its mind
            engine._opened.machine.loaded.engine.manifest["capturable"] = True
            for _ in range(60):
                check_equal(engine.infer({"x": x}), reference.infer({"x": x}))
            assert engine.stats().graphs == 1
            assert engine.stats().graph_problem is None


def test_a_forgotten_engine_gives_everything_back(conv, simcuda, trt, cuda):
    before = cuda.open_count
    engine = TensorRTEngine(conv, trt=trt, cuda=cuda)
    engine.infer({"x": image(0, 1, 3, 8, 8)})
    del engine
    gc.collect()
    assert cuda.open_count == before
    assert trt.sim.live == NOTHING


@KINDS
def test_b106_buffers_shrink_to_what_is_used_when_the_profile_does_not_fit(folder, simcuda, trt, integrated, caplog):
    """B106: the largest shape needs more than one allocation may be; small requests still run, large ones are told."""
    model = models.add_model(folder / "add.onnx")
    wide = dict.fromkeys("ab", ((1, 4), (8, 4), (1 << 20, 4)))
    plan = write_plan(folder / "wide.plan", model, profiles=[wide])
    simcuda.set(limit_mb=8)
    with open_sim(plan, simcuda, trt, integrated=integrated) as engine:
        a = image(0, 2, 4)
        np.testing.assert_array_equal(engine.infer({"a": a, "b": a})["s"], a + a)
        assert "trying" in caplog.text
        big = np.zeros((1 << 20, 4), np.float32)
        with pytest.raises(OutOfMemory, match="16 MiB needed"):
            engine.infer({"a": big, "b": big})
        np.testing.assert_array_equal(engine.infer({"a": a, "b": a})["s"], a + a)


def test_a_second_lane_without_memory_is_done_without(conv, simcuda, trt, reference, caplog):
    with open_sim(conv, simcuda, trt, integrated=0, lanes=4) as engine:
        simcuda.set(mem_mb=0)
        x = image(0, 1, 3, 8, 8)
        want = reference.infer({"x": x})
        with ThreadPoolExecutor(8) as pool:
            for result in pool.map(lambda _: engine.infer({"x": x}), range(40)):
                check_equal(result, want)
        assert engine.stats().lanes == 1


@KINDS
def test_outputs_whose_shape_depends_on_the_data(folder, simcuda, trt, integrated):
    model = models.nonzero_model(folder / "nonzero.onnx")
    plan = write_plan(
        folder / "nonzero.plan", model, profiles=[{"x": ((1,), (8,), (4096,))}], data_dependent=["places"]
    )
    with (
        open_sim(plan, simcuda, trt, integrated=integrated) as engine,
        OnnxRuntimeEngine(model, threads=1) as cpu,
    ):
        for size, share in [(4, 1.0), (4096, 0.5), (10, 0.0), (4096, 1.0), (4, 0.5)]:
            x = (np.random.default_rng(size).random(size) < share).astype(np.float32)
            check_equal(engine.infer({"x": x}), cpu.infer({"x": x}))
        assert engine.stats().graphs == 0
        simcuda.set(mem_mb=0)
        engine._opened.pool.lanes[0]._buffers["places"].close()
        with pytest.raises(OutOfMemory):
            engine.infer({"x": np.ones(4096, np.float32)})
        simcuda.set(mem_mb=8192)
        check_equal(engine.infer({"x": x}), cpu.infer({"x": x}))


@KINDS
def test_inputs_that_are_shapes_and_inputs_derived_from_others(folder, simcuda, trt, integrated):
    model = models.reshape_model(folder / "reshape.onnx")
    plan = write_plan(
        folder / "reshape.plan",
        model,
        profiles=[{"x": ((1,), (12,), (64,))}],
        values=[{"size": ((1, 1), (3, 4), (16, 16))}],
    )
    x = image(0, 24)
    with open_sim(plan, simcuda, trt, integrated=integrated) as engine:
        for rows in (2, 3, 4, 2, 2, 3):
            size = np.array([rows, 24 // rows], np.int64)
            np.testing.assert_array_equal(engine.infer({"x": x, "size": size})["y"], x.reshape(rows, -1))
        with pytest.raises(InputError, match=r"values \[24, 1\] is outside.*1\.\.16"):
            engine.infer({"x": x, "size": np.array([24, 1], np.int64)})
        with pytest.raises(InputError, match="cannot process"):
            engine.infer({"x": x, "size": np.array([5, 5], np.int64)})

    derive = {"size": lambda shapes: np.array([shapes["x"][0] // 2, 2], np.int64)}
    with open_sim(plan, simcuda, trt, integrated=integrated, derive=derive) as engine:
        assert [spec.name for spec in engine.inputs] == ["x"]
        for count in (8, 24, 8):
            np.testing.assert_array_equal(engine.infer({"x": image(1, count)})["y"], image(1, count).reshape(-1, 2))
    wrong = {"size": lambda shapes: np.zeros(2, np.int32)}
    with (
        open_sim(plan, simcuda, trt, derive=wrong) as engine,
        pytest.raises(SpecError, match=r"'derive' gave for 'size'.*int64"),
    ):
        engine.infer({"x": x})
    with (
        pytest.raises(SpecError, match="no input 'sise'"),
        open_cuda(driver="ctypes", library=str(simcuda.path)) as cuda,
    ):
        TensorRTEngine(plan, trt=trt, cuda=cuda, derive={"sise": derive["size"]})


@KINDS
def test_bound_tensors_stay_on_the_device(folder, simcuda, trt, cuda, integrated):
    model = models.add_model(folder / "bind.onnx")
    plan = write_plan(folder / "bind.plan", model, profiles=[dict.fromkeys("ab", ((1, 4), (2, 4), (8, 4)))])
    simcuda.set(integrated=integrated)
    with TensorRTEngine(plan, trt=trt, cuda=cuda, options=RunOptions(zero_copy=bool(integrated))) as engine:
        a = image(0, 2, 4)
        state = cuda.device_buffer(2 * 4 * 4)
        state.write(np.zeros((2, 4), np.float32))
        engine.bind("b", state, shape=(2, 4))
        assert [spec.name for spec in engine.inputs] == ["a"]
        np.testing.assert_array_equal(engine.infer({"a": a})["s"], a)
        engine.bind("s", state)  # updated in place: the sum grows with every call
        assert engine.outputs == ()
        for _ in range(5):
            assert engine.infer({"a": a}) == {}
        total = np.zeros_like(a)
        for _ in range(5):
            total = a + total
        np.testing.assert_array_equal(state.read((2, 4), dtype=np.float32), total)
        engine.bind("b", None)
        with pytest.raises(InputError, match="128 bytes for these inputs"):
            engine.infer({"a": image(1, 8, 4), "b": image(2, 8, 4)})
        engine.bind("s", None)
        np.testing.assert_array_equal(engine.infer({"a": a, "b": a})["s"], a + a)
        for arguments, text in [
            (("z", state), "no tensor 'z'"),
            (("b", state), "needs the shape"),
            ((("b"), state, (9, 4)), "outside what the engine allows"),
            ((("b"), state, (8, 4)), "needs 128 bytes"),
        ]:
            with pytest.raises(SpecError, match=text):
                engine.bind(arguments[0], arguments[1], shape=arguments[2] if len(arguments) > 2 else None)
        state.close()
        with pytest.raises(SpecError, match="closed"):
            engine.bind("b", state, shape=(2, 4))


def test_layers_are_timed_and_graphs_come_back(conv, simcuda, trt, reference):
    x = image(0, 2, 3, 8, 8)
    with open_sim(conv, simcuda, trt) as engine:
        for _ in range(3):
            engine.infer({"x": x})
        layers = engine.profile_layers({"x": x}, runs=4)
        assert [layer.name for layer in layers] == ["layer 0", "layer 1", "layer 2"]
        assert sum(layer.share for layer in layers) == pytest.approx(1)
        assert layers[2].mean_ms == layers[2].min_ms == 2.5
        with pytest.raises(SpecError, match="runs"):
            engine.profile_layers({"x": x}, runs=0)
        for _ in range(3):
            check_equal(engine.infer({"x": x}), reference.infer({"x": x}))
        assert engine.stats().graphs == 1


def test_many_shapes_keep_a_bounded_number_of_graphs_and_plans(conv, simcuda, trt, reference):
    with open_sim(conv, simcuda, trt, lanes=1) as engine:
        for height in range(8, 33):
            for width in range(8, 20):
                x = np.full((1, 3, height, width), height, np.float32)
                for _ in range(3 if height % 2 else 1):
                    result = engine.infer({"x": x})
                assert result["m"].item() == height
        assert engine.stats().graphs <= 16
        assert len(engine._plans) <= 256
        assert len(engine._opened.pool.lanes[0]._ready) <= 64


def test_plans_that_cannot_be_used_are_told_apart(conv, folder, simcuda, trt, cuda):
    def fails(path, kind, text):
        with pytest.raises(kind, match=text) as caught:
            TensorRTEngine(path, trt=trt, cuda=cuda)
        assert "\n" not in str(caught.value)

    fails(folder / "absent.plan", ModelError, "edgeds build")
    old = write_plan(folder / "old.plan", folder / "reference.onnx", profiles=models.CONV_PROFILES, version="8.6.1")
    fails(old, EngineMismatch, r"not built by TensorRT 10\.3\.0.*8\.6\.1.*build it here")
    cut = folder / "cut.plan"
    cut.write_bytes(conv.read_bytes()[:40])
    fails(cut, ModelError, "cannot read this engine")
    cut.write_bytes(b"")
    fails(cut, ModelError, "empty")
    cut.write_bytes(b"PK\x03\x04 not an engine at all")
    fails(cut, ModelError, "not a TensorRT engine")
    for fields, text in [({"dtype": "BF16"}, "'y' has type BF16"), ({"format": "CHW32"}, "memory format CHW32")]:
        odd = write_plan(
            folder / "odd.plan", folder / "reference.onnx", profiles=models.CONV_PROFILES, overrides={"y": fields}
        )
        fails(odd, ModelError, text)
    trt.sim.fail_next = "context"
    fails(conv, OutOfMemory, "no execution context")
    trt.sim.fail_next = "load"  # B106: weights are one allocation of TensorRT's
    fails(conv, OutOfMemory, r"not enough memory for an engine of .* MiB free.*L4T 36\.4\.7")


def test_plans_with_the_ultralytics_header_are_read(conv, folder, simcuda, trt, reference):
    header = json.dumps({"names": {"0": "cat"}, "stride": 32, "task": "detect"}).encode()
    wrapped = folder / "wrapped.engine"
    wrapped.write_bytes(struct.pack("<i", len(header)) + header + conv.read_bytes())
    with open_sim(wrapped, simcuda, trt) as engine:
        assert engine.metadata["task"] == "detect"
        x = image(0, 1, 3, 8, 8)
        check_equal(engine.infer({"x": x}), reference.infer({"x": x}))


def test_names_of_dims_come_from_the_bundle(conv, simcuda, trt):
    specs = (
        TensorSpec(name="x", dtype="float32", shape=("N", 3, "H", "W")),
        TensorSpec(name="y", dtype="float32", shape=("N", 4, "H", "W")),
    )
    with open_sim(conv, simcuda, trt, specs=specs) as engine:
        assert str(engine.inputs[0]) == "x: float32[Nx3xHxW]"
        assert str(engine.outputs[0]) == "y: float32[Nx4xHxW]"


def test_a_dim_that_all_profiles_fix_is_a_number(folder, simcuda, trt):
    fixed = {"x": ((2, 3, 8, 8), (2, 3, 8, 8), (2, 3, 8, 8))}
    plan = write_plan(folder / "fixed.plan", folder / "reference.onnx", profiles=[fixed])
    with open_sim(plan, simcuda, trt) as engine, Session(engine) as session:
        assert engine.inputs[0].shape == (2, 3, 8, 8)
        assert engine.max_batch is None
        x = image(0, 3, 3, 8, 8)
        np.testing.assert_allclose(session.infer({"x": x}).outputs["m"].ravel(), x.mean(axis=(1, 2, 3)), rtol=1e-6)


def test_closing_waits_for_calls_and_refuses_new_ones(conv, simcuda, trt):
    closed: list[int] = []
    cuda = open_cuda(driver="ctypes", library=str(simcuda.path))

    def on_close() -> None:
        cuda.close()
        closed.append(1)

    engine = open_sim(conv, simcuda, trt, cuda=cuda, on_close=on_close)
    outcomes: list[str] = []

    def work() -> None:
        try:
            while True:
                engine.infer({"x": image(0, 1, 3, 8, 8)})
        except SessionClosed as error:
            outcomes.append(str(error))

    future = engine.infer_async({"x": image(0, 1, 3, 8, 8)})
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert future.result(timeout=30)["m"].shape == (1, 1, 1, 1)
    closers = [threading.Thread(target=engine.close) for _ in range(2)]
    for thread in [*closers]:
        thread.start()
    for thread in [*closers, *threads]:
        thread.join(30)
        assert not thread.is_alive()
    assert len(outcomes) == 6
    assert closed == [1]
    for call in (engine.infer, engine.infer_async):
        with pytest.raises(SessionClosed, match=r"conv\.plan is closed"):
            call({"x": image(0, 1, 3, 8, 8)})


def test_an_interrupted_call_gives_its_lane_back(conv, simcuda, trt, reference, monkeypatch):
    """Ctrl-C while the GPU works: the lane is settled before anybody else gets it."""
    with open_sim(conv, simcuda, trt, integrated=0, lanes=1) as engine:
        driver = engine.cuda.driver
        real, first = driver.sync_event, [True]

        def interrupt(event):
            if first.pop() if first else False:
                raise KeyboardInterrupt
            real(event)

        monkeypatch.setattr(driver, "sync_event", interrupt)
        x, other = image(0, 1, 3, 8, 8), image(1, 1, 3, 8, 8)
        with pytest.raises(KeyboardInterrupt):
            engine.infer({"x": x})
        assert simcuda.count("depth") == 0
        check_equal(engine.infer({"x": other}), reference.infer({"x": other}))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_worker_is_told(conv, simcuda, trt):
    with open_sim(conv, simcuda, trt) as engine:
        child = os.fork()
        if child == 0:
            try:
                engine.infer({"x": image(0, 1, 3, 8, 8)})
            except DeviceError as error:
                os._exit(0 if "spawn" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("feeds", [{}, {"x": np.zeros((1, 3, 8, 8))}, {"x": np.zeros((1, 3, 8), np.float32)}, {"z": 1}])
def test_feeds_that_do_not_fit_are_refused(conv, simcuda, trt, feeds):
    with open_sim(conv, simcuda, trt) as engine, pytest.raises(InputError):
        engine.infer(feeds)


def test_options_are_checked():
    with pytest.raises(SpecError, match="lanes"):
        RunOptions(lanes=0)
