"""Fusion and kernel times: what vanishes, what bounds a kernel, and the formula against a second writing of it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeds.boards.coefficients import load_table
from edgeds.boards.cost_file import LayerWork, ModelWork
from edgeds.boards.fusion import fuse_layers
from edgeds.boards.resize import scale_layer
from edgeds.boards.roofline import Machine, choose_precision, moved_bytes, time_kernel

MACHINE = Machine(sm=8, gpu_mhz=1000.0, dram_gb_s=100.0, peak_flops={"fp32": 8e12, "fp16": 16e12, "int8": 32e12})


def layer(op: str = "Conv", *, elements: int = 10_000, flops: int = 10_000_000, params: int = 5_000) -> LayerWork:
    is_conv = op == "Conv"
    return LayerWork(
        node=op, op=op, flops=flops, params=params if is_conv else 0, int8_eligible=is_conv, precision="float32",
        bytes_read=4 * (elements + (params if is_conv else 0)), bytes_written=4 * elements,
    )  # fmt: skip


def work(*layers: LayerWork, batch: int = 1) -> ModelWork:
    return ModelWork(inputs={"x": (batch, 3, 8, 8)}, layers=layers)


def test_activation_chain_and_qdq_fold_into_the_convolution() -> None:
    names = (
        "QuantizeLinear",
        "DequantizeLinear",
        "Conv",
        "BatchNormalization",
        "Sigmoid",
        "Mul",
        "Reshape",
        "Conv",
        "Relu",
    )
    kernels = fuse_layers(work(*(layer(name) for name in names)), batch=1)
    assert [kernel.op for kernel in kernels] == ["Conv", "Conv"]
    assert [kernel.is_smooth for kernel in kernels] == [True, False]


def test_pointwise_runs_become_one_kernel_and_pools_stay() -> None:
    kernels = fuse_layers(work(*(layer(name) for name in ("MaxPool", "Add", "Mul", "Relu", "MaxPool"))), batch=1)
    assert [kernel.op for kernel in kernels] == ["MaxPool", "Add", "MaxPool"]


def test_batch_scales_activations_and_flops_not_weights() -> None:
    one, eight = (fuse_layers(work(layer(), batch=2), batch=batch)[0] for batch in (2, 16))
    assert eight.flops == 8 * one.flops
    assert eight.written == 8 * one.written
    assert eight.params == one.params
    assert eight.depth == one.depth


def test_formula_agrees_with_an_independent_writing() -> None:
    kernel = fuse_layers(work(layer(), layer("Sigmoid")), batch=1)[0]
    c = load_table().time
    compute = 1e7 / (16e12 * c.efficiency_fp16) * (1 + c.fill * 8 / 1e4) * (1 + c.shallow / 500) + c.smooth * 1e4 / 8e9
    memory = (2 * 5_000 + 2 * 20_000) / (100e9 * c.bandwidth_efficiency)
    wanted = c.launch_us + c.cycles / 1000 + math.sqrt(compute**2 + memory**2) * 1e6
    assert time_kernel(kernel, MACHINE, precision="fp16", coefficients=c).latency_us == pytest.approx(wanted)


def chained(*rows: tuple[str, tuple[int, ...]]) -> ModelWork:
    return work(*(replace(layer(op), reads=reads) for op, reads in rows))


def test_edges_fold_a_pointwise_layer_into_what_it_reads_not_into_what_stands_before_it() -> None:
    # Conv 0 and 1 run side by side; the activation of 0 comes after 1 in order.
    kernels = fuse_layers(chained(("Conv", ()), ("Conv", ()), ("Sigmoid", (0,)), ("MaxPool", (2,))), batch=1)
    assert [kernel.op for kernel in kernels] == ["Conv", "Conv", "MaxPool"]
    assert [kernel.is_smooth for kernel in kernels] == [True, False, False]
    assert kernels[2].sources == (0,)


def test_an_activation_folds_into_an_int8_convolution_that_writes_floats() -> None:
    # Costs count the convolution's input in INT8 and its output in FP32: only the elements tell that sizes are equal.
    conv = replace(layer(), precision="int8", bytes_read=15_000, elements=(10_000, 10_000), reads=())
    silu = (replace(layer("Sigmoid"), reads=(0,)), replace(layer("Mul"), reads=(0, 1)))
    kernels = fuse_layers(work(conv, *silu), batch=1)
    assert [(kernel.op, kernel.read, kernel.written) for kernel in kernels] == [("Conv", 10_000, 10_000)]
    assert scale_layer(conv, 4.0).elements == (40_000, 40_000)


def test_edges_see_through_views_and_drop_what_follows_from_shapes_alone() -> None:
    rows = (("Conv", ()), ("Shape", (0,)), ("Gather", (1,)), ("Expand", (2,)), ("Reshape", (0, 3)), ("Concat", (4, 3)))
    kernels = fuse_layers(chained(*rows), batch=1)
    assert [kernel.op for kernel in kernels] == ["Conv", "Concat"]
    assert kernels[1].sources == (0,)


@pytest.mark.parametrize(
    ("elements", "flops", "limit"),
    [(10, 1_000, "launch"), (10_000_000, 10_000, "memory"), (100_000, 10**12, "compute")],
)
def test_what_bounds_a_kernel(elements: int, flops: int, limit: str) -> None:
    kernel = fuse_layers(work(layer(elements=elements, flops=flops)), batch=1)[0]
    assert time_kernel(kernel, MACHINE, precision="fp16", coefficients=load_table().time).limited_by == limit


def test_precision_per_kernel() -> None:
    conv, pool = fuse_layers(work(layer(), layer("MaxPool")), batch=1)
    assert choose_precision(conv, precision="int8", is_quantized=False) == "int8"
    assert choose_precision(pool, precision="int8", is_quantized=False) == "fp16"
    assert choose_precision(conv, precision="int8", is_quantized=True) == "fp16"  # the file left it in float
    assert choose_precision(conv, precision="int4", is_quantized=False) == "int4"
    assert moved_bytes(conv, precision="int4") == 5_000 * 0.5625 + 20_000 * 2


@given(elements=st.integers(1, 10**8), flops=st.integers(1, 10**12), params=st.integers(0, 10**8))
def test_more_machine_is_never_slower(elements: int, flops: int, params: int) -> None:
    kernel = fuse_layers(work(layer(elements=elements, flops=flops, params=params)), batch=1)[0]
    faster = Machine(
        sm=8, gpu_mhz=2000.0, dram_gb_s=200.0, peak_flops={k: 2 * v for k, v in MACHINE.peak_flops.items()}
    )
    c = load_table().time
    for precision in ("fp32", "fp16", "int8"):
        slow = time_kernel(kernel, MACHINE, precision=precision, coefficients=c).latency_us
        assert 0 < time_kernel(kernel, faster, precision=precision, coefficients=c).latency_us < slow < math.inf
