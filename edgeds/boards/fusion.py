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
_SHAPE_TYPES = ("int64", "int32", "bool")
_REACH = 4
_VOCABULARY = 30_000


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch: operations, weights and activation elements. ``precision`` is what the file says it computes in;
    ``is_smooth``: it also evaluates an exponential per output."""

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

    @property
    def depth(self) -> float:
        """Multiply-adds per output element: input channels times the window of a convolution."""
        return self.flops / (2 * self.written) if self.is_matrix and self.written else 0.0

    @property
    def is_vocabulary(self) -> bool:
        """Whether it projects onto a vocabulary; engines keep that in FP16 when weights are quantized."""
        return self.op in ("MatMul", "Gemm") and self.params > 0 and self.params >= _VOCABULARY * max(self.depth, 1)


def fuse_layers(work: ModelWork, *, batch: int) -> tuple[Kernel, ...]:
    """Kernels at ``batch``, in order.

    Pointwise layers after a matrix product fold into it; Q/DQ, views and arithmetic on shapes vanish;
    runs of other pointwise layers
    become one kernel. A costs file holds no edges, so the order of the layers stands for them.
    """
    scale = batch / work.batch
    kernels: list[Kernel] = []
    for layer in work.layers:
        if layer.op in _FREE or layer.precision in _SHAPE_TYPES or layer.bytes_read + layer.bytes_written == 0:
            continue
        kernel = _kernel(layer, scale)
        host = _host(kernels, kernel) if layer.op in _FUSED else None
        if host is None:
            kernels.append(kernel)
        elif layer.op in _SMOOTH:
            kernels[host] = replace(kernels[host], is_smooth=True)
    return tuple(kernels)


def _host(kernels: list[Kernel], layer: Kernel) -> int | None:
    """Which kernel a pointwise layer folds into: one just before it, of as many outputs. Branches may interleave."""
    recent = range(len(kernels) - 1, max(len(kernels) - 1 - _REACH, -1), -1)
    fits = [index for index in recent if kernels[index].written == layer.written]
    matrix = [index for index in fits if kernels[index].is_matrix]
    if layer.op in _SMOOTH:
        matrix = [index for index in matrix if not kernels[index].is_smooth] or matrix
    if matrix:
        return matrix[0]
    return fits[0] if fits and fits[0] == len(kernels) - 1 and kernels[fits[0]].op in _FUSED else None


def _kernel(layer: LayerWork, scale: float) -> Kernel:
    size = _BYTES.get(layer.precision, 4)
    is_matrix = layer.op in MATRIX_OPS
    return Kernel(
        node=layer.node,
        op=layer.op,
        flops=layer.flops * scale,
        params=layer.params,
        read=max(layer.bytes_read / size - layer.params, 0) * scale,
        written=layer.bytes_written / size * scale,
        is_matrix=is_matrix,
        int8_eligible=layer.int8_eligible and layer.params > 0,
        precision=layer.precision,
    )
