"""From layers of a model to kernels of an engine: what TensorRT fuses costs nothing of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgeds.boards.cost_file import LayerWork, ModelWork

MATRIX_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger")
_FUSED = (
    *("BatchNormalization", "Relu", "LeakyRelu", "PRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh"),
    *("Add", "Mul", "Sub", "Div", "Elu", "Softplus", "Mish", "Gelu", "Erf", "Cast", "Identity", "Swish"),
)
_FREE = (
    *("QuantizeLinear", "DequantizeLinear", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Shape", "Constant"),
    *("ConstantOfShape", "Range", "Dropout", "Size", "Split"),
)
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}
_SMOOTH = ("Sigmoid", "Tanh", "Erf", "Gelu", "Swish", "Mish", "Softplus", "HardSwish", "Elu")
_SHAPES = ("Shape", "Size")
_SHAPE_TYPES = ("int64", "int32", "bool")
_REACH = 4
VOCABULARY = 30_000
"""Outputs from which on a matrix product counts as the projection onto a vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch: operations, weights and activation elements. ``precision`` is what the file says it computes in;
    ``is_smooth``: it also evaluates an exponential per output. ``sources``: the kernels whose outputs it reads; None
    where the costs hold no edges. ``is_vocabulary``: it projects onto a vocabulary, which engines keep in FP16 when
    weights are quantized."""

    node: str
    op: str
    flops: float
    params: int
    read: float
    written: float
    is_matrix: bool
    int8_eligible: bool
    precision: str
    is_smooth: bool = False
    sparse_24: bool = False
    sources: tuple[int, ...] | None = None
    is_vocabulary: bool = False

    @property
    def depth(self) -> float:
        """Multiply-adds per output element: input channels times the window of a convolution."""
        return self.flops / (2 * self.written) if self.is_matrix and self.written else 0.0


def fuse_layers(work: ModelWork, *, batch: int) -> tuple[Kernel, ...]:
    """Kernels at ``batch``, in order.

    Pointwise layers that read a matrix product fold into it; Q/DQ, views and what follows from shapes alone vanish;
    runs of other pointwise layers become one kernel. Joins stay copies, splits are views. Where the costs hold no
    edges, the order and the sizes of the layers stand for them.
    """
    scale = batch / work.batch
    kernels: list[Kernel] = []
    owners: list[tuple[int, ...]] = []
    fixed: list[bool] = []
    for layer in work.layers:
        before = None if layer.reads is None else _sources(owners, layer.reads)
        fixed.append(layer.op in _SHAPES or (bool(layer.reads) and all(fixed[source] for source in layer.reads or ())))
        if fixed[-1]:
            owners.append(())
            continue
        if layer.op in _FREE or layer.precision in _SHAPE_TYPES or layer.bytes_read + layer.bytes_written == 0:
            owners.append(before or ())
            continue
        kernel = _kernel(layer, scale, before)
        host = _host(kernels, kernel) if layer.op in _FUSED else None
        if host is None:
            kernels.append(kernel)
        elif layer.op in _SMOOTH:
            kernels[host] = replace(kernels[host], is_smooth=True)
        owners.append((len(kernels) - 1 if host is None else host,))
    last = next((index for index in range(len(kernels) - 1, -1, -1) if kernels[index].is_matrix), None)
    if last is not None and _projects(kernels[last]):
        kernels[last] = replace(kernels[last], is_vocabulary=True)
    return tuple(kernels)


def _projects(kernel: Kernel) -> bool:
    """Whether the last product of a network has as many outputs as a vocabulary has words. Only the last one: the inner
    layers of large decoders are as wide."""
    return kernel.op in ("MatMul", "Gemm") and kernel.params > 0 and kernel.params >= VOCABULARY * max(kernel.depth, 1)


def _sources(owners: list[tuple[int, ...]], reads: tuple[int, ...]) -> tuple[int, ...]:
    """The kernels that the layers ``reads`` became part of; views hand on those of their input."""
    return tuple(dict.fromkeys(kernel for layer in reads for kernel in owners[layer]))


def _host(kernels: list[Kernel], layer: Kernel) -> int | None:
    """Which kernel a pointwise layer folds into: the last one that it reads, of as many outputs, matrix products first.

    Without edges, one of the last few kernels: branches may interleave.
    """
    recent = range(len(kernels) - 1, max(len(kernels) - 1 - _REACH, -1), -1)
    near = recent if layer.sources is None else sorted(layer.sources, reverse=True)
    fits = [index for index in near if kernels[index].written == layer.written]
    matrix = [index for index in fits if kernels[index].is_matrix]
    if layer.op in _SMOOTH:
        matrix = [index for index in matrix if not kernels[index].is_smooth] or matrix
    if matrix:
        return matrix[0]
    pointwise = [index for index in fits if kernels[index].op in _FUSED]
    if layer.sources is not None:
        return pointwise[0] if pointwise else None
    return pointwise[0] if pointwise and pointwise[0] == len(kernels) - 1 else None


def _kernel(layer: LayerWork, scale: float, sources: tuple[int, ...] | None) -> Kernel:
    size = _BYTES.get(layer.precision, 4)
    counted = (max(layer.bytes_read / size - layer.params, 0), layer.bytes_written / size)
    read, written = counted if layer.elements is None else layer.elements
    is_matrix = layer.op in MATRIX_OPS
    return Kernel(
        node=layer.node,
        op=layer.op,
        flops=layer.flops * scale,
        params=layer.params,
        read=read * scale,
        written=written * scale,
        is_matrix=is_matrix,
        int8_eligible=layer.int8_eligible and layer.params > 0,
        precision=layer.precision,
        sparse_24=layer.sparse_24,
        sources=sources,
    )
