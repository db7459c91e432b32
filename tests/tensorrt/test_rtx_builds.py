"""The builder against the real TensorRT-RTX libraries, without a GPU: small models, refusals, profiles, cancelling."""

import contextlib
import signal
import threading
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import rtx_models as models
from onnx import TensorProto, numpy_helper
from rtx_models import options_for, save, shapes

from edgeds.engines.builder import BuildOptions, BuildReport, build_plan
from edgeds.engines.plan_file import split_engine
from edgeds.errors import BuildError, EdgedsError, ModelError, OutOfMemory, SpecError

pytestmark = pytest.mark.tensorrt

IMAGE = {"x": shapes((1, 3, 32, 32))}


def build(rtx: ModuleType, path: Path, options: BuildOptions, *, isolate: bool = False) -> BuildReport:
    return build_plan(path, path.with_suffix(".plan"), options, trt=rtx, quiet=True, isolate=isolate)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_conv_builds_to_a_plan_of_this_version(rtx: ModuleType, tmp_path: Path, isolate: bool) -> None:
    path = save(models.conv(), tmp_path)
    report = build(rtx, path, options_for(IMAGE), isolate=isolate)
    plan = Path(report.plan)
    assert plan.read_bytes()[:4] == b"vtrt"
    assert split_engine(plan) == ({}, 0, report.plan_bytes)
    assert report.typing == "strong"
    assert report.applied["compute_capabilities"] == "SM86"
    assert report.precision_of_nodes() == {"conv1": "Float"}
    assert report.inputs[0].shape == ("n", 3, "h", "w")
    assert report.memory_mib["weights"] >= 0
    assert not any("cudaError" in warning for warning in report.warnings)


def test_the_same_build_gives_the_same_bytes(rtx: ModuleType, tmp_path: Path) -> None:
    path = save(models.conv(), tmp_path)
    first = Path(build(rtx, path, options_for(IMAGE)).plan).read_bytes()
    assert Path(build(rtx, path, options_for(IMAGE)).plan).read_bytes() == first


def test_qdq_computes_in_int8(rtx: ModuleType, tmp_path: Path) -> None:
    report = build(rtx, save(models.qdq_conv(), tmp_path), options_for(IMAGE))
    assert report.precision == "int8"
    assert "conv1" in report.int8_nodes


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (models.qdq_conv(zero=3), r"node 'quant_x' \(QuantizeLinear\): Non-zero zero point.*edgeds quantize"),
        (models.qdq_conv(kind=np.uint8, zero=128), r"node 'quant_x'.*Non-zero zero point.*edgeds quantize"),
        (models.qdq_conv(kind=np.uint8), r"Defaulting to INT8 instead.*quantized to uint8"),
        (models.qdq_conv(scale=-0.1), r"node 'quant_x'.*positive.*above 0"),
        (models.qdq_conv(int32_bias=True), r"node 'dequant_bias'.*Int32.*biases must stay float"),
        (models.mixed_types(), r"node 'add1' \(Add\).*same input types.*int8_fp16"),
        (models.custom_op(), r"node 'fancy1' \(Fancy\): Plugin not found.*no such operator"),
        (models.nameless_custom_op(), r"node 0 \(Fancy, output 'y'\)"),
        (models.nms(), r"nms.*no runners that implement it.*outside the engine"),
        (models.input_of(TensorProto.INT16), "a type that TensorRT does not take"),
        (models.input_of(TensorProto.STRING), "a type that TensorRT does not take"),
    ],
    ids=lambda value: None if isinstance(value, onnx.ModelProto) else str(value)[:24],
)
def test_refusals_name_the_node_and_the_fix(
    rtx: ModuleType, tmp_path: Path, model: onnx.ModelProto, message: str
) -> None:
    path = save(model, tmp_path)
    dynamic = any(dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim)
    with pytest.raises(BuildError, match=f"(?i){message}") as caught:
        build(rtx, path, options_for(*([IMAGE] if dynamic else [])))
    text = str(caught.value)
    assert text.startswith(str(path))
    for leak in ("cudaError", "/_src/", ".cpp", "Error Code", "Begin node"):
        assert leak not in text
    assert not path.with_suffix(".plan").exists()


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        # TensorRT only warns about these two and builds an engine that cannot run them.
        (shapes((1, 3, 32, 32), (1, 3, 32, 32), (2, 3, 64, 64)), r"kMAX values are not self-consistent.*stride"),
        (shapes((1, 3, 16, 16), (1, 3, 32, 32), (1, 3, 32, 32)), r"kMIN values are not self-consistent.*stride"),
        (shapes((1, 3, 32, 32), (1, 3, 64, 64), (2, 3, 64, 64)), r"OPT values for profile 0 violate.*tuned shape"),
    ],
)
def test_impossible_shapes_are_errors_although_tensorrt_only_warns(
    rtx: ModuleType, tmp_path: Path, profile: object, message: str
) -> None:
    path = save(models.baked_size(), tmp_path)
    with pytest.raises(BuildError, match=f"(?s){message}"):
        build(rtx, path, options_for({"x": profile}))
    assert not path.with_suffix(".plan").exists()
    assert build(rtx, path, options_for(IMAGE)).plan_bytes > 0


def test_missing_profiles_and_other_models_are_refused_before_tensorrt_sees_them(
    rtx: ModuleType, tmp_path: Path
) -> None:
    path = save(models.conv(), tmp_path)
    with pytest.raises(SpecError, match="needs at least one profile"):
        build(rtx, path, options_for())
    for content in (b"garbage", b"", b"\0" * 64):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.onnx"):
            build(rtx, path, options_for(IMAGE))


def test_a_workspace_that_is_too_small_is_told_as_memory(rtx: ModuleType, tmp_path: Path) -> None:
    path = save(wide_conv(), tmp_path)
    with pytest.raises(OutOfMemory, match=r"workspace 1 MiB.*Raise the workspace"):
        build(rtx, path, options_for({"x": shapes((4, 3, 640, 640))}, workspace_mib=1))
    assert build(rtx, path, options_for({"x": shapes((4, 3, 640, 640))}, workspace_mib=512)).plan_bytes > 0


def wide_conv() -> onnx.ModelProto:
    """Two convolutions whose middle tensor does not fit into 1 MiB."""
    weights = np.random.default_rng(1).standard_normal((32, 3, 3, 3)).astype(np.float32)
    second = np.random.default_rng(2).standard_normal((8, 32, 3, 3)).astype(np.float32)
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["middle"], name="conv1", pads=[1] * 4),
        onnx.helper.make_node("Conv", ["middle", "v"], ["y"], name="conv2", pads=[1] * 4),
    ]
    return models.model_of(nodes, w=weights, v=second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": (87,)}, "cannot build for SM87.*board itself"),
        ({"hardware_compatibility": "ampere_plus"}, "does not offer hardware compatibility"),
        ({"dla_core": 0}, "TensorRT-RTX has no DLA support"),
        ({"typing": "weak"}, "strongly typed networks only"),
    ],
)
def test_what_rtx_cannot_do_is_refused(rtx: ModuleType, tmp_path: Path, options: dict, message: str) -> None:
    path = save(models.conv(), tmp_path)
    with pytest.raises(EdgedsError, match=message):
        build(rtx, path, options_for(IMAGE, **options))
    assert not path.with_suffix(".plan").exists()


def test_several_targets_go_into_one_plan(rtx: ModuleType, tmp_path: Path) -> None:
    report = build(rtx, save(models.conv(), tmp_path), options_for(IMAGE, targets=(80, 86, 89)))
    assert report.applied["compute_capabilities"] == "SM80, SM86, SM89"


def test_tuning_is_read_back_from_the_real_config(rtx: ModuleType, tmp_path: Path) -> None:
    options = options_for(
        IMAGE,
        optimization_level=5,
        sparsity=True,
        tf32=False,
        tiling="fast",
        max_tactics=8,
        max_aux_streams=0,
        timing_cache=tmp_path / "t.cache",
        workspace_mib=256,
    )
    report = build(rtx, save(models.conv(), tmp_path), options)
    assert report.applied["optimization_level"] == "5"
    assert report.applied["workspace"] == "256 MiB"
    assert {"sparse_weights", "tf32", "max_tactics", "max_aux_streams"} <= set(report.applied)
    assert "does not use it" in report.skipped["timing_cache"]
    assert "tiling" in report.skipped
    assert not (tmp_path / "t.cache").exists()


def test_side_files_are_found_beside_the_model_and_their_loss_is_told(rtx: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(models.conv(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert build(rtx, path, options_for(IMAGE)).plan_bytes > 0
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match=r"'w\.bin'.*missing"):
        build(rtx, path, options_for(IMAGE))


@pytest.mark.parametrize("isolate", [True, False])
def test_ctrl_c_cancels_a_real_build_and_leaves_nothing(rtx: ModuleType, tmp_path: Path, isolate: bool) -> None:
    """Within a second in a process of its own; in this one when TensorRT's current step ends (2 s here)."""
    path = save(models.paged_attention(layers=24), tmp_path)
    options = options_for(*(paged_profile(blocks) for blocks in (2, 4, 8, 16)))
    main = threading.main_thread().ident
    assert main is not None
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    timer = threading.Timer(1.2 if isolate else 0.4, press)
    timer.start()
    with contextlib.ExitStack() as stack:
        stack.callback(timer.cancel)
        with pytest.raises(KeyboardInterrupt):
            build(rtx, path, options, isolate=isolate)
    assert time.monotonic() - pressed[0] < (1.0 if isolate else 20.0)
    assert [item.name for item in tmp_path.iterdir()] == ["model.onnx"]


def paged_profile(blocks: int) -> dict:
    pool = {"k": (64, 2, 16, 8), "v": (64, 2, 8, 16)}
    return {
        "x": shapes((1, 64), (2, 64), (4, 64)),
        "table": shapes((1, 1), (2, blocks), (4, blocks)),
        **{f"{kind}_pool{layer}": shapes(pool[kind]) for layer in range(24) for kind in "kv"},
    }


def test_paged_attention_builds_and_equals_attention_over_contiguous_keys(rtx: ModuleType, tmp_path: Path) -> None:
    """The decoder's form of issue 6: plain operators over pages, dynamic batch, block count and pool size."""
    model = models.paged_attention(layers=2)
    profile = {
        "x": shapes((1, 64), (2, 64), (4, 64)),
        "table": shapes((1, 1), (2, 4), (4, 16)),
        **{f"k_pool{layer}": shapes((8, 2, 16, 8), (64, 2, 16, 8), (256, 2, 16, 8)) for layer in range(2)},
        **{f"v_pool{layer}": shapes((8, 2, 8, 16), (64, 2, 8, 16), (256, 2, 8, 16)) for layer in range(2)},
    }
    report = build(rtx, save(model, tmp_path), options_for(profile))
    assert report.plan_bytes > 0
    assert [spec.dtype for spec in report.inputs][:2] == ["float32", "int64"]
    rng = np.random.default_rng(3)
    feeds = {"x": rng.standard_normal((2, 64)).astype(np.float32), "table": np.array([[5, 0, 3], [7, 6, 1]], np.int64)}
    for layer in range(2):
        feeds[f"k_pool{layer}"] = rng.standard_normal((8, 2, 16, 8)).astype(np.float32)
        feeds[f"v_pool{layer}"] = rng.standard_normal((8, 2, 8, 16)).astype(np.float32)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    (found,) = session.run(None, feeds)
    np.testing.assert_allclose(found, attend(feeds), rtol=1e-4, atol=1e-5)


def attend(feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The same with the pages of each sequence laid side by side, in float64."""
    state = feeds["x"].astype(np.float64)
    for layer in range(2):
        rows = []
        for row, pages in zip(state, feeds["table"], strict=True):
            query = row.reshape(2, 2, 16)  # kv_heads, group, head
            keys = np.concatenate([feeds[f"k_pool{layer}"][page] for page in pages], axis=-1)  # kv_heads, head, tokens
            values = np.concatenate([feeds[f"v_pool{layer}"][page] for page in pages], axis=-2)
            scores = np.einsum("kgd,kdt->kgt", query, keys) / 4.0
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            rows.append(np.einsum("kgt,ktd->kgd", scores / scores.sum(-1, keepdims=True), values).reshape(-1))
        state = np.stack(rows)
    return state


def test_initializers_of_the_models_are_what_the_tests_assume() -> None:
    names = {item.name: numpy_helper.to_array(item).dtype for item in models.qdq_conv().graph.initializer}
    assert names["z"] == np.int8
