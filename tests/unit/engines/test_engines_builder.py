"""The builder on a stand-in for TensorRT: every silent failure becomes ours, and nothing half-written stays.

The stand-in is our reading of the API; tests/tensorrt builds with the real TensorRT-RTX.
"""

import contextlib
import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fake_tensorrt
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeds.engines.build_config import timing_cache_file
from edgeds.engines.build_log import LogTap, process_logger, tap_log
from edgeds.engines.build_monitor import BuildProgress
from edgeds.engines.builder import BuildOptions, BuildReport, build_plan
from edgeds.engines.layer_log import node_precisions, read_layers
from edgeds.engines.trt_module import describe_tensorrt
from edgeds.errors import BuildError, DeviceError, EdgedsError, ModelError, OutOfMemory, SpecError
from edgeds.specs import ShapeRange, from_json, to_json

PROFILE = {"x": ShapeRange(min=(1, 3, 32, 32), opt=(2, 3, 32, 32), max=(4, 3, 32, 32))}
OPTIONS = BuildOptions(profiles=(PROFILE,))
MEMINFO = "MemTotal: 8000000 kB\nMemAvailable: 6000000 kB\nSwapFree: 0 kB\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "net.onnx")


def make_model(path: Path, *, quantized: bool = False) -> Path:
    weight = numpy_helper.from_array(np.ones((8, 3, 3, 3), np.float32), "w")
    scale = numpy_helper.from_array(np.float32(0.1), "s")
    zero = numpy_helper.from_array(np.int8(0), "z")
    quantize = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
    ]
    conv = helper.make_node("Conv", ["d" if quantized else "x", "w"], ["y"], name="conv1")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, "height", "width"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [*(quantize if quantized else []), conv]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y], [weight, scale, zero])), path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Files of a system with 6 GB free."""
    (tmp_path / "root/proc").mkdir(parents=True)
    (tmp_path / "root/proc/meminfo").write_text(MEMINFO)
    return tmp_path / "root"


@pytest.fixture
def orin(root: Path) -> Path:
    (root / "proc/device-tree").mkdir()
    (root / "proc/device-tree/compatible").write_bytes(b"nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0")
    (root / "etc").mkdir()
    (root / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic")
    library = root / "usr/lib/aarch64-linux-gnu/nvidia/libnvdla_compiler.so"
    library.parent.mkdir(parents=True)
    library.touch()
    return root


@contextlib.contextmanager
def trt_version(monkeypatch: pytest.MonkeyPatch, version: str) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(fake_tensorrt, "__version__", version)
        yield


def build(model: Path, options: BuildOptions = OPTIONS, **more: object) -> BuildReport:
    out = model.parent / "engine.plan"
    return build_plan(model, out, options, trt=fake_tensorrt, quiet=True, **more)


def named(model: Path, behaviour: str) -> Path:
    return model.rename(model.with_name(f"{behaviour}.onnx"))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("isolate", [False, True])
def test_a_build_writes_the_plan_and_reports_what_it_did(model: Path, root: Path, isolate: bool) -> None:
    report = build(model, isolate=isolate, root=root)
    plan = Path(report.plan)
    assert plan.read_bytes() == b"ftrt plan of net, typed 2"
    assert report.plan_bytes == plan.stat().st_size
    assert (report.typing, report.precision) == ("strong", "float32")
    assert report.inputs[0].shape == ("batch", 3, "height", "width")
    assert report.applied["profiling_verbosity"] == "DETAILED"
    assert report.skipped == {}
    assert report.free_mib == 5859
    assert report.needed_mib < report.free_mib
    assert files(model.parent) == {"net.onnx", "engine.plan"}
    assert from_json(BuildReport, to_json(report), where="x") == report


@pytest.mark.parametrize("isolate", [False, True])
def test_layers_and_memory_are_read_from_the_log(model: Path, root: Path, isolate: bool) -> None:
    report = build(named(model, "layers"), isolate=isolate, root=root)
    assert report.precision_of_nodes() == {"/conv1/Conv": "Int8", "/act/Mul": "Int8"}
    assert report.int8_nodes == ("/conv1/Conv", "/act/Mul")
    assert report.memory_mib == {"activations": 2.0}


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    ("behaviour", "error", "message"),
    [
        ("none", BuildError, "nms_0 has no runners that implement it. This TensorRT has no kernel for that layer"),
        ("silent", BuildError, "gave no reason; run with -vv"),
        ("memory", OutOfMemory, "ran out of memory while building the engine"),
        ("inconsistent", BuildError, "not self-consistent.*multiples of its stride"),
        ("uint8", BuildError, "quantized to uint8.*edgeds quantize"),
        ("unsupported", BuildError, r"node 'fancy' \(Fancy\): Plugin not found.*node 7 \(Fancy, output 'z'\)"),
        ("empty", ModelError, "no outputs"),
    ],
)
def test_silent_failures_become_errors_and_the_old_engine_stays(
    model: Path, root: Path, behaviour: str, error: type[EdgedsError], message: str, isolate: bool
) -> None:
    old = model.parent / "engine.plan"
    old.write_bytes(b"old")
    model = named(model, behaviour)
    with pytest.raises(error, match=message) as caught:
        build(model, isolate=isolate, root=root)
    assert str(model) in str(caught.value)
    assert "cudaError" not in str(caught.value)
    assert "/_src/" not in str(caught.value)
    assert old.read_bytes() == b"old"
    assert files(model.parent) == {model.name, "engine.plan"}


def test_b62_a_killed_build_says_out_of_memory_and_leaves_the_old_engine(model: Path, root: Path) -> None:
    old = model.parent / "engine.plan"
    old.write_bytes(b"old")
    with pytest.raises(OutOfMemory, match=r"signal 9.*out of memory.*5859 MiB were free"):
        build(named(model, "kill"), isolate=True, root=root)
    assert old.read_bytes() == b"old"
    assert files(model.parent) == {"kill.onnx", "engine.plan"}


def test_a_crash_inside_tensorrt_ends_in_a_message_with_its_last_words(model: Path, root: Path) -> None:
    with pytest.raises(BuildError, match=r"crashed \(signal 11, SIGSEGV\).*Myelin: something went wrong"):
        build(named(model, "crash"), isolate=True, root=root)
    assert files(model.parent) == {"crash.onnx"}


@pytest.mark.parametrize(("behaviour", "isolate"), [("slow", False), ("slow", True), ("stuck", True)])
def test_ctrl_c_stops_within_a_second_and_leaves_nothing(
    model: Path, root: Path, behaviour: str, isolate: bool
) -> None:
    main = threading.main_thread().ident
    assert main is not None
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    timer = threading.Timer(1.5 if isolate else 0.4, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        build(named(model, behaviour), isolate=isolate, root=root)
    assert time.monotonic() - pressed[0] < 1.0
    timer.join()
    assert files(model.parent) == {f"{behaviour}.onnx"}


def test_b62_a_build_that_cannot_fit_is_refused_before_it_starts(model: Path, root: Path) -> None:
    (root / "proc/meminfo").write_text("MemTotal: 8000000 kB\nMemAvailable: 500000 kB\n")
    count = len(fake_tensorrt.LAST)
    with pytest.raises(OutOfMemory, match=r"needs about \d+ MiB, 488 MiB are free"):
        build(model, root=root)
    assert len(fake_tensorrt.LAST) == count
    assert files(model.parent) == {"net.onnx"}


def test_b59_a_folder_that_cannot_be_written_fails_before_the_build(model: Path, root: Path) -> None:
    blocked = model.parent / "file"
    blocked.write_text("in its place")
    count = len(fake_tensorrt.LAST)
    with pytest.raises(BuildError, match="engines cannot be written here"):
        build_plan(model, blocked / "engine.plan", OPTIONS, trt=fake_tensorrt, quiet=True, root=root)
    with pytest.raises(SpecError, match="is a folder"):
        build_plan(model, model.parent, OPTIONS, trt=fake_tensorrt, quiet=True, root=root)
    assert len(fake_tensorrt.LAST) == count


def test_a_full_disk_is_told_with_the_size_that_is_needed(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    original = Path.open

    def opened(self: Path, mode: str = "r", *rest: object, **more: object) -> object:
        stream = original(self, mode, *rest, **more)
        if mode == "wb" and self.suffix == ".plan":
            stream.close()
            return contextlib.nullcontext(SimpleNamespace(write=write))
        return stream

    monkeypatch.setattr(fake_tensorrt.HostMemory, "nbytes", 3 << 20)
    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(BuildError, match=r"disk is full, the engine needs 3\.0 MiB"):
        build(model, root=root)
    assert files(model.parent) == {"net.onnx"}


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ((), "needs at least one profile"),
        (({"images": PROFILE["x"]},), "'images' is unknown; the model's inputs are x"),
        (({"x": ShapeRange(min=(1, 4, 8, 8), opt=(1, 4, 8, 8), max=(1, 4, 8, 8))},), "axis 1 is fixed at 3"),
        (({"x": ShapeRange(min=(1,), opt=(1,), max=(1,))},), "has 4 dimensions"),
    ],
)
def test_profiles_that_do_not_fit_are_refused_by_name(model: Path, root: Path, profiles: tuple, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(model, BuildOptions(profiles=profiles), root=root)


def test_a_profile_that_tensorrt_refuses_or_changes_is_an_error(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fake_tensorrt.IBuilderConfig, "add_optimization_profile", lambda self, profile: -1)
        with pytest.raises(SpecError, match="profile 0 was refused"):
            build(model, root=root)
    monkeypatch.setattr(fake_tensorrt.IOptimizationProfile, "get_shape", lambda self, name: [(1,), (1,), (1,)])
    with pytest.raises(SpecError, match="it holds"):
        build(model, root=root)


def test_options_are_read_back_and_reported(model: Path, root: Path) -> None:
    options = BuildOptions(
        profiles=(PROFILE,),
        workspace_mib=512,
        optimization_level=5,
        tiling="fast",
        tiling_l2_kib=2048,
        sparsity=True,
        tf32=False,
        strip=True,
        refit=True,
        version_compatible=True,
        hardware_compatibility="ampere_plus",
        max_aux_streams=0,
        max_tactics=64,
    )
    report = build(model, options, root=root)
    assert report.skipped == {}
    assert report.applied["workspace"] == "512 MiB"
    assert report.applied["tiling"] == "FAST"
    assert report.applied["optimization_level"] == "5"
    assert report.applied["hardware_compatibility"] == "AMPERE_PLUS"
    assert {"sparse_weights", "strip_plan", "refit", "version_compatible", "tf32"} <= set(report.applied)
    config = fake_tensorrt.LAST[-1]
    assert config.pools[fake_tensorrt.MemoryPoolType.WORKSPACE] == 512 << 20
    assert config.l2_limit_for_tiling == 2048 * 1024


def test_tuning_that_is_not_taken_is_skipped_with_its_reason_and_a_warning(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A setter that logs and ignores, as TensorRT's do.
    level = property(lambda self: 3, lambda self, value: None)
    monkeypatch.setattr(fake_tensorrt.IBuilderConfig, "builder_optimization_level", level)
    monkeypatch.delattr(fake_tensorrt.IBuilderConfig, "tiling_optimization_level")
    options = BuildOptions(profiles=(PROFILE,), optimization_level=5, tiling="full")
    with caplog.at_level(logging.WARNING):
        report = build(model, options, root=root)
    assert report.skipped["optimization_level"] == "asked for 5, TensorRT holds 3"
    assert "has no tiling" in report.skipped["tiling"]
    assert "optimization_level was not applied" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [({"strip": True}, "stripped plan"), ({"refit": True}, "refittable"), ({"version_compatible": True}, "version-")],
)
def test_what_decides_the_engine_is_never_skipped(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch, options: dict, message: str
) -> None:
    monkeypatch.setattr(fake_tensorrt.IBuilderConfig, "set_flag", lambda self, flag: None)
    with pytest.raises(BuildError, match=message):
        build(model, BuildOptions(profiles=(PROFILE,), **options), root=root)


@pytest.mark.parametrize(
    ("quantized", "precision", "flags"),
    [(True, "auto", {"FP16", "INT8"}), (False, "float16", {"FP16"}), (False, "auto", set())],
)
def test_older_tensorrt_builds_weakly_typed_with_flags(
    tmp_path: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantized: bool,
    precision: str,
    flags: set[str],
) -> None:
    model = make_model(tmp_path / "net.onnx", quantized=quantized)
    with trt_version(monkeypatch, "10.3.0"):
        report = build(model, BuildOptions(profiles=(PROFILE,), precision=precision), root=root)
    assert report.typing == "weak"
    assert Path(report.plan).read_bytes().endswith(b"typed 0")
    assert {flag.name for flag in fake_tensorrt.LAST[-1].flags} - {"TF32"} == flags
    strong = build(model, root=root)
    assert strong.typing == "strong"
    # Precision flags and strong typing must never meet.
    assert {flag.name for flag in fake_tensorrt.LAST[-1].flags} == {"TF32"}


def test_a_network_that_is_not_strongly_typed_although_asked_is_an_error(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt.INetworkDefinition, "get_flag", lambda self, flag: False)
    with pytest.raises(BuildError, match="did not make a strongly typed network"):
        build(model, root=root)


def test_both_pools_are_set_on_a_jetson(model: Path, orin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = build(model, root=orin)
    assert {"workspace", "tactic_dram"} <= set(report.applied)
    with pytest.raises(SpecError, match="on a Jetson leave it out"):
        build(model, BuildOptions(profiles=(PROFILE,), hardware_compatibility="ampere_plus"), root=orin)


def test_b61_dla_builds_tell_their_split_and_are_refused_where_there_is_none(
    model: Path, orin: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = {"x": ShapeRange(min=(1, 3, 32, 32), opt=(1, 3, 32, 32), max=(1, 3, 32, 32))}
    options = BuildOptions(profiles=(fixed,), dla_core=1)
    layers = [{"node": "conv1", "op": "Conv", "flops": 10}, {"node": "mm", "op": "MatMul", "flops": 10}]
    with pytest.raises(BuildError, match=r"10\.16\.2\.10 does not support the DLA"):
        build(model, options, root=orin)
    with trt_version(monkeypatch, "10.3.0"):
        report = build(model, options, root=orin, layers=layers)
        assert report.dla is not None
        assert "1 of 2 layers" in report.dla
        assert report.applied["device"] == "DLA"
        assert report.applied["gpu_fallback"] == "on"
        assert fake_tensorrt.LAST[-1].DLA_core == 1
        monkeypatch.setattr(fake_tensorrt.Builder, "num_DLA_cores", 1)
        with pytest.raises(BuildError, match="TensorRT finds 1 on this machine"):
            build(model, options, root=orin)
        (orin / "usr/lib/aarch64-linux-gnu/nvidia/libnvdla_compiler.so").unlink()
        with pytest.raises(BuildError, match="nvidia-l4t-dla-compiler"):
            build(model, options, root=orin)
        (orin / "proc/device-tree/compatible").write_bytes(b"nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0")
        with pytest.raises(BuildError, match="Orin Nano"):
            build(model, options, root=orin)


def test_known_faults_are_warned_about(model: Path, orin: Path, caplog: pytest.LogCaptureFixture) -> None:
    (orin / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 4.7, GCID: 1, BOARD: generic")
    with caplog.at_level(logging.WARNING):
        report = build(model, root=orin)
    assert any("error 12" in warning for warning in report.warnings)
    assert "error 12" in caplog.text


def test_timing_cache_is_kept_reused_and_survives_damage(model: Path, root: Path) -> None:
    cache = timing_cache_file(
        model.parent / "cache", facts=describe_tensorrt(fake_tensorrt), device="Orin (nvgpu)", compute_capability="8.7"
    )
    assert cache.name == "timing-10.16.2.10-Orin--nvgpu--sm8.7.cache"
    options = BuildOptions(profiles=(PROFILE,), timing_cache=cache)
    assert "new" in build(model, options, root=root).applied["timing_cache"]
    assert cache.read_bytes() == b"+timed"
    assert "reused" in build(model, options, root=root, isolate=True).applied["timing_cache"]
    assert cache.read_bytes() == b"+timed+timed"
    cache.write_bytes(b"damaged")
    build(model, options, root=root)
    assert cache.read_bytes() == b"+timed"


def test_b59_a_timing_cache_that_cannot_be_kept_is_told(model: Path, root: Path) -> None:
    (model.parent / "file").write_text("in the way")
    options = BuildOptions(profiles=(PROFILE,), timing_cache=model.parent / "file" / "t.cache")
    report = build(model, options, root=root)
    assert "next build will take as long" in report.skipped["timing_cache"]


def test_targets_are_for_rtx_only(model: Path, root: Path) -> None:
    with pytest.raises(BuildError, match="is for TensorRT-RTX"):
        build(model, BuildOptions(profiles=(PROFILE,), compute_capabilities=(86,)), root=root)


def test_installed_without_a_driver_says_so(model: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, logger: object) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(fake_tensorrt.Builder, "__init__", fails)
    with pytest.raises(DeviceError, match="driver"):
        build(model, root=root)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workspace_mib": 0}, "workspace_mib"),
        ({"optimization_level": 6}, "optimization_level"),
        ({"optimization_level": True}, "optimization_level"),
        ({"typing": "maybe"}, "typing"),
        ({"precision": "fp16"}, "float16"),
        ({"tiling": "most"}, "tiling"),
        ({"tiling_l2_kib": 5}, "only together with tiling"),
        ({"gpu_fallback": False}, "only together with dla_core"),
        ({"compute_capabilities": (86, 86)}, "given twice"),
        ({"compute_capabilities": (8.6,)}, "compute_capabilities"),
    ],
)
def test_wrong_options_are_refused_when_they_are_made(options: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        BuildOptions(**options)


def test_one_logger_per_process_that_reaches_everyone_who_listens(caplog: pytest.LogCaptureFixture) -> None:
    logger = process_logger(fake_tensorrt)
    assert process_logger(fake_tensorrt) is logger
    with caplog.at_level(logging.WARNING), tap_log() as one, tap_log() as two:
        logger.log(fake_tensorrt.Severity.WARNING, "mind\nthis")
        logger.log(fake_tensorrt.Severity.ERROR, fake_tensorrt.NOISE)
        logger.log(fake_tensorrt.Severity.ERROR, "real")
    logger.log(fake_tensorrt.Severity.ERROR, "too late")
    assert one.warnings() == two.warnings() == ["mind this"]
    assert one.errors() == ["real"]
    assert [record.getMessage() for record in caplog.records][:2] == ["mind this", "real"]


def test_a_log_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeds.engines.build_log.MAX_LINES", 3)
    tap = LogTap()
    for index in range(10):
        tap.add("INFO", str(index))
    assert (len(tap.lines), tap.dropped) == (3, 7)


def test_progress_never_goes_back_and_reaches_the_end() -> None:
    progress = BuildProgress()
    seen = []
    progress.start("all", None, 2)
    for child in ("a", "b"):
        progress.start(child, "all", 10)
        for step in range(10):
            progress.step(child, step)
            seen.append(progress.fraction)
        progress.finish(child)
        progress.step("all", "ab".index(child))
        seen.append(progress.fraction)
    assert seen == sorted(seen)
    assert seen[4] == pytest.approx(0.25)
    assert seen[-1] == 1.0
    progress.step("never started", 3)
    progress.cancel()
    assert progress.step("all", 1) is False


def test_layer_lines_of_both_forms_are_read_and_others_ignored() -> None:
    text = (
        "Name: a, LayerType: CaskConvolution, Inputs: [ { Name: x, Dimensions: [1], Format/Datatype: Row major linear "
        "FP16 format }], Outputs: [ { Name: y, Dimensions: [1], Format/Datatype: Thirty-two wide Int8 format }], "
        "TacticName: t, Metadata: [ONNX Layer: n]"
    )
    (layer,) = read_layers([("VERBOSE", text), ("VERBOSE", "Name: broken, LayerType: x"), ("INFO", "LayerType: none")])
    assert (layer.inputs, layer.outputs, layer.nodes) == (("Half",), ("Int8",), ("n",))
    assert node_precisions([layer]) == {"n": "Half"}
