"""Memory before a build: measured free memory, estimate, early refusal, pools; the scan of the ONNX (report B62)."""

import contextlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgeds.engines.build_memory import FreeMemory, plan_memory, read_free_memory
from edgeds.engines.onnx_scan import scan_onnx
from edgeds.errors import ModelError, OutOfMemory, SpecError

NANO = FreeMemory(total_mib=7620, available_mib=5120, swap_mib=3810, is_tegra=True)


def test_b62_three_billion_parameters_on_an_8_gb_board_are_refused_with_both_figures() -> None:
    with pytest.raises(OutOfMemory, match=r"needs about \d+ MiB, 5120 MiB are free") as caught:
        plan_memory(weight_bytes=3_000_000_000 * 2, free=NANO)
    text = str(caught.value)
    assert "int8" in text
    assert "swap" in text
    assert "another" in text or "board with more memory" in text


def test_b62_a_detector_fits_and_both_pools_are_set_on_a_jetson() -> None:
    plan = plan_memory(weight_bytes=11 << 20, free=NANO, profiles=4)
    assert plan.needed_mib < NANO.available_mib
    assert 256 <= plan.workspace_mib <= 4096
    assert plan.tactic_dram_mib is not None
    assert plan.workspace_mib <= plan.tactic_dram_mib < NANO.available_mib
    desktop = FreeMemory(total_mib=32000, available_mib=24000, swap_mib=0, is_tegra=False)
    assert plan_memory(weight_bytes=11 << 20, free=desktop).tactic_dram_mib is None


def test_a_workspace_that_does_not_fit_is_refused_and_a_wrong_one_too() -> None:
    with pytest.raises(OutOfMemory, match="lower the workspace"):
        plan_memory(weight_bytes=1 << 20, free=NANO, workspace_mib=6000)
    for wrong in (0, -1, True, 1 << 30):
        with pytest.raises(SpecError, match="workspace_mib"):
            plan_memory(weight_bytes=1 << 20, free=NANO, workspace_mib=wrong)


def test_nothing_is_refused_where_free_memory_cannot_be_read() -> None:
    assert plan_memory(weight_bytes=50 << 30, free=None).workspace_mib > 0


@given(weights=st.integers(0, 1 << 33), available=st.integers(0, 1 << 17), profiles=st.integers(0, 16))
def test_an_accepted_plan_always_fits_and_more_profiles_never_need_less(
    weights: int, available: int, profiles: int
) -> None:
    free = FreeMemory(total_mib=1 << 17, available_mib=available, swap_mib=0, is_tegra=True)
    try:
        plan = plan_memory(weight_bytes=weights, free=free, profiles=profiles)
    except OutOfMemory:
        with pytest.raises(OutOfMemory):
            plan_memory(weight_bytes=weights, free=free, profiles=profiles + 1)
        return
    assert plan.needed_mib <= plan.free_mib
    assert plan.weights_mib << 20 >= weights


def meminfo(root: Path, text: str) -> Path:
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(text)
    return root


def test_free_memory_is_mem_available_not_mem_free(tmp_path: Path) -> None:
    root = meminfo(tmp_path, "MemTotal: 8000000 kB\nMemFree: 100000 kB\nMemAvailable: 4096000 kB\nSwapFree: 2048 kB\n")
    found = read_free_memory(root)
    assert found == FreeMemory(total_mib=7812, available_mib=4000, swap_mib=2, is_tegra=False)
    (root / "proc/device-tree").mkdir()
    (root / "proc/device-tree/compatible").write_bytes(b"nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0")
    assert read_free_memory(root).is_tegra


def test_a_container_limit_counts_and_its_page_cache_does_not(tmp_path: Path) -> None:
    root = meminfo(tmp_path, "MemTotal: 8000000 kB\nMemAvailable: 7000000 kB\n")
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{2048 << 20}\n")
    (group / "memory.current").write_text(f"{1024 << 20}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {512 << 20}\n")
    assert read_free_memory(root).available_mib == 1536
    (group / "memory.max").write_text("max\n")
    assert read_free_memory(root).available_mib == 7000000 // 1024


@pytest.mark.parametrize("text", ["", "MemTotal: x kB\n", "\x00\xff garbage"])
def test_unreadable_meminfo_is_unknown(tmp_path: Path, text: str) -> None:
    assert read_free_memory(meminfo(tmp_path, text)) is None
    assert read_free_memory(tmp_path / "nowhere") is None


def small_model() -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    branch = helper.make_graph(
        [helper.make_node("Neg", ["y"], ["t"])], "b", [], [helper.make_tensor_value_info("t", TensorProto.FLOAT, None)]
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="mm"),
        helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch),
        helper.make_node("Fancy", ["z"], ["o"], domain="my.ops"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])
    c = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    out = helper.make_tensor_value_info("o", TensorProto.FLOAT, None)
    return helper.make_model(helper.make_graph(nodes, "g", [x, c], [out], [weight]))


def save_external(path: Path) -> None:
    onnx.save(
        small_model(),
        path,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location="w.bin",
        size_threshold=0,
    )


def test_scan_counts_operators_of_subgraphs_and_bytes_of_side_files(tmp_path: Path) -> None:
    inline, outside = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(small_model(), inline)
    save_external(outside)
    scan = scan_onnx(inline)
    assert scan.operators == {"MatMul": 1, "If": 1, "Neg": 2, "my.ops.Fancy": 1}
    assert not scan.is_quantized
    scan = scan_onnx(outside)
    assert scan.external_files == ("w.bin",)
    assert scan.external_bytes == 64 * 64 * 4
    assert scan.weight_bytes == pytest.approx(scan_onnx(inline).weight_bytes, rel=0.05)


def test_scan_refuses_side_files_that_are_missing_cut_or_outside(tmp_path: Path) -> None:
    path = tmp_path / "m" / "b.onnx"
    path.parent.mkdir()
    save_external(path)
    side = path.parent / "w.bin"
    side.write_bytes(side.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"'w' keeps its data in 'w\.bin': that file has 16383 bytes but 16384 are"):
        scan_onnx(path)
    side.unlink()
    (tmp_path / "elsewhere.bin").write_bytes(b"0" * 16384)
    side.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(ModelError, match="a link that leads out"):
        scan_onnx(path)
    side.unlink()
    with pytest.raises(ModelError, match="missing beside the model"):
        scan_onnx(path)
    model = onnx.load(path, load_external_data=False)
    for location in ("../secret.bin", "/etc/passwd", "..\\x", ""):
        next(entry for entry in model.graph.initializer[0].external_data if entry.key == "location").value = location
        path.write_bytes(model.SerializeToString())
        with pytest.raises(ModelError, match="outside the model's folder"):
            scan_onnx(path)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 20000), flip=st.integers(0, 20000), value=st.integers(0, 255))
def test_scan_of_damaged_files_never_fails_with_anything_else(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int, value: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.onnx"
    data = bytearray(small_model().SerializeToString())
    data[flip % len(data)] = value
    path.write_bytes(bytes(data[: max(cut % (len(data) + 1), 1)]))
    with contextlib.suppress(ModelError):
        scan_onnx(path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 100, b"{}"])
def test_scan_refuses_what_tensorrt_would_take_for_an_empty_network(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.onnx"):
        scan_onnx(path)
    with pytest.raises(ModelError, match="no such file"):
        scan_onnx(tmp_path)
