"""Weight-only INT8 and INT4 of language models, in the form TensorRT reads and in the one ONNX Runtime runs fast.

A decode step reads every weight once for a handful of multiplications, so its time is the weights' bytes: halving them
halves it, while activations may stay in float. Weights are rounded in groups along the input channels, in an order that
lets the ones still to come make up for the error so far (``weightonly.py``); the embedding table, which is only looked
up, becomes float16, and the head, which decides about every token, keeps 8 bits.

- TensorRT form: DequantizeLinear in front of each MatMul: INT8 per output channel, INT4 in blocks (opset 21).
- CPU form: ``com.microsoft.MatMulNBits``, which multiplies without writing the weights out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from edgeds.compress.weightonly import GroupedWeight, quantize_grouped
from edgeds.errors import CalibrationError, SpecError
from edgeds.graph.opset import import_domain, require_opset
from edgeds.graph.session import open_session
from edgeds.graph.view import GraphView
from edgeds.progress import track

CPU_GROUP = 32
TENSORRT_GROUP = 64
PER_CHANNEL = 0
"""As a group: one scale per output channel."""
HEAD = "lm_head"
INT4_OPSET = 21
_ACCURACY_LEVEL = 4
"""MatMulNBits with activations rounded to INT8 per block: what makes it faster than float on CPUs with VNNI or dot
product instructions."""

MAX_HESSIAN_BYTES = 1 << 30
"""Statistics held at a time; more layers are done in several passes over the samples."""

Feeds = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How weights are rounded: ``bits`` in groups of ``group`` inputs; the head to ``head_bits`` in ``head_group``
    (default: ``group``). ``symmetric=False`` gives weights of 4 bits zero-points, which TensorRT does not take.

    Raises SpecError for widths other than 4 and 8, and groups that are neither PER_CHANNEL nor a power of two from 16.
    """

    bits: int
    group: int = CPU_GROUP
    head_bits: int = 8
    head_group: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.head_bits not in (4, 8):
            raise SpecError(f"weights: {self.bits} and {self.head_bits} bits; expected 4 or 8")
        for size in (self.group, self.group if self.head_group is None else self.head_group):
            if size != PER_CHANNEL and (size < 16 or size & (size - 1)):
                raise SpecError(f"group {size}: expected a power of two from 16")

    def of(self, layer: str) -> tuple[int, int]:
        """Bits and group of a layer."""
        if layer != HEAD:
            return self.bits, self.group
        return self.head_bits, self.group if self.head_group is None else self.head_group


@dataclass(frozen=True, kw_only=True)
class QuantizedWeights:
    """Grouped weights by the name of their MatMul, with what was left in float and why."""

    weights: Mapping[str, GroupedWeight]
    left: tuple[tuple[str, str], ...]


def collect_hessians(
    model: ModelProto,
    tensors: Sequence[str],
    samples: Iterable[Feeds],
    *,
    threads: int | None = None,
    quiet: bool = False,
) -> dict[str, NDArray[np.float64]]:
    """Sum of x x^T over all rows x of each of ``tensors`` [..., K]: [K, K] by name.

    Raises CalibrationError without any sample.
    """
    session = open_session(model, outputs=list(tensors), threads=threads)
    sums: dict[str, NDArray[np.float64]] = {}
    count = 0
    for sample in track(samples, what="collecting statistics", unit="sample", quiet=quiet):
        count += 1
        for name, value in zip(tensors, session.run(list(tensors), dict(sample)), strict=True):
            rows = value.reshape(-1, value.shape[-1])
            product = (rows.T @ rows).astype(np.float64)
            sums[name] = sums[name] + product if name in sums else product
    if not count:
        raise CalibrationError("error compensation needs calibration samples: there were none")
    return sums


def linear_layers(view: GraphView) -> list[NodeProto]:
    """MatMuls with a constant float32 matrix on the right, in graph order."""
    found = []
    for node in view.nodes:
        value = view.constant(node.input[1]) if node.op_type == "MatMul" and view.is_constant(node.input[1]) else None
        if value is not None and value.ndim == 2 and value.dtype == np.float32:
            found.append(node)
    return found


def quantize_weights(
    model: ModelProto,
    roundings: Sequence[Rounding],
    *,
    samples: Iterable[Feeds] | None = None,
    threads: int | None = None,
    quiet: bool = False,
) -> list[QuantizedWeights]:
    """Round the weights of every linear layer to the nearest, once for each of ``roundings``. ``samples`` (iterated
    once for every GiB of statistics) let all layers but the head make up for their rounding."""
    view = GraphView(model, copy=False)
    found: list[dict[str, GroupedWeight]] = [{} for _ in roundings]
    left: list[list[tuple[str, str]]] = [[] for _ in roundings]
    for part in _parts(view, linear_layers(view)):
        hessians: dict[str, NDArray[np.float64]] = {}
        tensors = list(dict.fromkeys(node.input[0] for node in part if node.name != HEAD))
        if samples is not None and tensors:
            hessians = collect_hessians(model, tensors, samples, threads=threads, quiet=quiet)
        for node in track(part, what="rounding weights", total=len(part), unit="layer", quiet=quiet):
            value = view.constant(node.input[1])
            assert value is not None  # linear_layers saw it
            inputs, hessian = value.shape[0], None if node.name == HEAD else hessians.get(node.input[0])
            for rounding, weights, skipped in zip(roundings, found, left, strict=True):
                bits, group = rounding.of(node.name)
                if group and inputs % group:
                    skipped.append((node.name, f"its {inputs} inputs are no multiple of the group of {group}"))
                    continue
                symmetric = rounding.symmetric or bits == 8
                weights[node.name] = quantize_grouped(
                    value.T, hessian=hessian, bits=bits, group=group or inputs, symmetric=symmetric
                )
    return [QuantizedWeights(weights=made, left=tuple(rest)) for made, rest in zip(found, left, strict=True)]


def _parts(view: GraphView, layers: Sequence[NodeProto]) -> Iterator[list[NodeProto]]:
    """Runs of layers whose statistics fit together; layers that read one tensor stay together."""
    part: list[NodeProto] = []
    sizes: dict[str, int] = {}
    for node in layers:
        value = view.constant(node.input[1])
        size = 0 if value is None or node.name == HEAD else 8 * value.shape[0] ** 2
        if node.input[0] not in sizes and sum(sizes.values()) + size > MAX_HESSIAN_BYTES and part:
            yield part
            part, sizes = [], {}
        part.append(node)
        sizes[node.input[0]] = size
    if part:
        yield part


def to_cpu_form(model: ModelProto, quantized: QuantizedWeights) -> ModelProto:
    """Every quantized MatMul as MatMulNBits, embeddings as float16. Groups have to be powers of two."""
    view = GraphView(model)
    for node in linear_layers(view):
        weight = quantized.weights.get(node.name)
        if weight is None:
            continue
        base, (outputs, inputs) = node.input[1], weight.values.shape
        stored = view.add_constant(
            f"{base}_q{weight.bits}", _packed(weight.codes().reshape(outputs, -1, weight.group), bits=weight.bits)
        )
        scales = view.add_constant(f"{base}_scales", weight.scale.reshape(-1))
        tensors = [node.input[0], stored, scales]
        if weight.zero is not None:
            tensors.append(view.add_constant(f"{base}_zero", _packed(weight.zero, bits=weight.bits).reshape(-1)))
        made = helper.make_node(
            "MatMulNBits",
            tensors,
            list(node.output),
            node.name,
            domain="com.microsoft",
            K=inputs,
            N=outputs,
            bits=weight.bits,
            block_size=weight.group,
            accuracy_level=_ACCURACY_LEVEL,
        )
        view.remove_node(node)
        view.add_node(made)
    import_domain(view.model, "com.microsoft")
    _halve_embedding(view)
    return view.finish()


def to_tensorrt_form(model: ModelProto, quantized: QuantizedWeights) -> ModelProto:
    """A DequantizeLinear in front of every quantized MatMul; opset 21 where there are blocks.

    TensorRT takes blocks of INT4 only (facts measured with TensorRT 11), so INT8 has to be quantized PER_CHANNEL.
    """
    blocked = not all(_is_per_channel(weight) for weight in quantized.weights.values())
    view = GraphView(require_opset(model, INT4_OPSET) if blocked else model)
    for node in linear_layers(view):
        weight = quantized.weights.get(node.name)
        if weight is None:
            continue
        values = np.ascontiguousarray(weight.values.T)
        scale = weight.scale.T.astype(np.float32)
        inputs = [_add_integers(view, f"{node.input[1]}_quantized", values, bits=weight.bits)]
        if _is_per_channel(weight):
            how = {"axis": 1}
            inputs.append(view.add_constant(f"{node.input[1]}_scale", scale.reshape(-1)))
            inputs.append(view.add_constant(f"{node.input[1]}_zero", np.zeros(scale.size, np.int8)))
        else:
            how = {"axis": 0, "block_size": weight.group}
            inputs.append(view.add_constant(f"{node.input[1]}_scale", np.ascontiguousarray(scale)))
        output = view.fresh_name(f"{node.input[1]}_dequantized")
        view.make_node("DequantizeLinear", inputs, [output], name=f"{node.name}_DequantizeLinear", **how)
        view.set_input(node, 1, output)
    _halve_embedding(view)
    return view.finish()


def _is_per_channel(weight: GroupedWeight) -> bool:
    """INT4 is in blocks always, if only one."""
    return weight.bits == 8 and weight.group >= weight.values.shape[1]


def _packed(codes: NDArray[np.uint8], *, bits: int) -> NDArray[np.uint8]:
    """uint8 [..., bytes]: of 4 bits two to a byte, the first in its lower half."""
    if bits == 8:
        return codes
    even = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    packed: NDArray[np.uint8] = even[..., 0::2] | (even[..., 1::2] << np.uint8(4))
    return packed


def _add_integers(view: GraphView, base: str, values: NDArray[np.int8], *, bits: int) -> str:
    if bits == 8:
        return view.add_constant(base, values)
    halves = np.pad(values.reshape(-1).view(np.uint8) & np.uint8(0xF), (0, values.size % 2))
    raw = (halves[0::2] | (halves[1::2] << np.uint8(4))).astype(np.uint8).tobytes()
    name, dims = view.fresh_name(base), list(values.shape)
    return view.add_tensor(TensorProto(name=name, data_type=TensorProto.INT4, dims=dims, raw_data=raw))


def _halve_embedding(view: GraphView) -> None:
    """The table that token ids look up, as float16: half the bytes, and more exact than any weight that reads it."""
    for node in view.nodes:
        if node.op_type != "Gather" or not view.is_constant(node.input[0]):
            continue
        table = view.constant(node.input[0])
        if table is None or table.ndim != 2 or table.dtype != np.float32 or len(view.consumers(node.input[0])) != 1:
            continue
        if np.abs(table).max(initial=0.0) > np.finfo(np.float16).max:
            continue
        view.set_input(node, 0, view.add_constant(f"{node.input[0]}_half", table.astype(np.float16)))
        result = node.output[0]
        half = view.fresh_name(f"{result}_half")
        view.set_output(node, result, half)
        view.make_node("Cast", [half], [result], name=f"{node.name}_Cast", to=TensorProto.FLOAT)
