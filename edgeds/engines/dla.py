"""The deep-learning accelerator of Orin modules: where there is one, and which layers it would take.

TensorRT takes a DLA request in silence where there is none, and with GPU fallback moves every layer it cannot place to
the GPU, also in silence; such engines are often slower than the GPU alone (report B61). So both are told before the
build, from tables. Sources: NVIDIA's TensorRT pages "Working with DLA" (10.7 last of 10.x; back in 11.4.1 on AGX Orin
with JetPack 7.2.2) and "DLA Supported Layers and Restrictions". Nothing here was run on a DLA.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeds.boards.dla_ops import PLACEABLE, REASONS
from edgeds.errors import BuildError, SpecError
from edgeds.specs import ShapeRange

CORES = {
    "p3701-0000": 2,
    "p3701-0002": 2,
    "p3701-0004": 2,
    "p3701-0005": 2,
    "p3701-0008": 2,
    "p3767-0000": 2,
    "p3767-0001": 1,
    "p3767-0002": 2,
    "p3767-0003": 0,
    "p3767-0004": 0,
    "p3767-0005": 0,
}
LAST_OF_10 = (10, 7)
FIRST_OF_11 = (11, 4, 1)

MAX_BATCH = 4096
MAX_SIZE = 8192
MAX_LOADABLES = 16

# Folded into their neighbours or into constants: on neither device.
INVISIBLE = ("QuantizeLinear", "DequantizeLinear", "Constant", "Identity", "Dropout", "Cast", "Shape", "Unsqueeze")


@dataclass(frozen=True, kw_only=True)
class DlaSupport:
    """Number of usable cores; when 0, ``reason`` says why. ``module`` is the part number or None."""

    cores: int
    module: str | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class DlaLayer:
    """Where one layer is expected to run. ``reason`` says why it cannot run on the DLA."""

    node: str
    op: str
    on_dla: bool
    flops: int
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class DlaSplit:
    """The expected placement of all layers, in graph order."""

    layers: tuple[DlaLayer, ...]

    @property
    def dla_flops_share(self) -> float:
        total = sum(layer.flops for layer in self.layers)
        return sum(layer.flops for layer in self.layers if layer.on_dla) / total if total else 0.0

    @property
    def pieces(self) -> int:
        """Runs of DLA layers between GPU layers: each is a loadable, with a copy before and after it."""
        return sum(on_dla for on_dla, _ in itertools.groupby(self.layers, key=lambda layer: layer.on_dla))

    def describe(self) -> str:
        """One line for people: share, pieces, and the operators that stay on the GPU."""
        gpu = Counter(layer.op for layer in self.layers if not layer.on_dla)
        rest = ", ".join(f"{count} {op}" for op, count in gpu.most_common(6))
        placed = len(self.layers) - gpu.total()
        share = f"{100 * self.dla_flops_share:.0f} % of the operations"
        text = f"expected: {placed} of {len(self.layers)} layers ({share}) on the DLA in {self.pieces} pieces"
        return f"{text}; on the GPU: {rest}" if rest else text


def dla_support(
    version: tuple[int, ...], *, module: str | None, is_rtx: bool = False, libraries_present: bool = True
) -> DlaSupport:
    """Whether this TensorRT can use a DLA on this module (part number such as ``p3767-0000``; None: not a Jetson).

    ``libraries_present``: whether libnvdla_compiler is installed (JetPack 7.2 ships without it).
    """

    def none(reason: str) -> DlaSupport:
        return DlaSupport(cores=0, module=module, reason=reason)

    text = ".".join(map(str, version))
    if is_rtx:
        return none("TensorRT-RTX has no DLA support")
    if module is None:
        return none("this machine is not a Jetson, and only Jetson modules have a DLA")
    if module not in CORES:
        return none(f"module {module} is not in the table of modules with a DLA")
    if CORES[module] == 0:
        return none(f"module {module} (Orin Nano) has no DLA")
    if version[:2] > LAST_OF_10 and version[:3] < FIRST_OF_11:
        return none(f"TensorRT {text} does not support the DLA of Orin (10.7 and older do, and 11.4.1 on AGX Orin)")
    if version[:3] >= FIRST_OF_11 and not module.startswith("p3701"):
        return none(f"TensorRT {text} supports the DLA on AGX Orin only, this is {module}")
    if not libraries_present:
        return none("libnvdla_compiler.so is not installed; on JetPack 6 install the package nvidia-l4t-dla-compiler")
    return DlaSupport(cores=CORES[module], module=module)


def split_layers(layers: Sequence[Mapping[str, Any]]) -> DlaSplit:
    """Expected placement of a layer list as ``cost.json`` holds it: ``node``, ``op``, ``flops``, optional ``shapes``.

    ``shapes`` is a list of tensor shapes (lists of ints, None where unknown) of the layer's inputs and outputs.
    Raises SpecError for a list that is not of this form.
    """
    placed = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, Mapping) or not isinstance(layer.get("op"), str):
            raise SpecError(f"layer {index}: expected an object with 'node' and 'op', got {layer!r}")
        op = layer["op"]
        if op in INVISIBLE:
            continue
        reason = _reason(op, layer.get("shapes") or ())
        flops = layer.get("flops", 0)
        placed.append(
            DlaLayer(
                node=str(layer.get("node") or f"layer {index}"),
                op=op,
                on_dla=reason is None,
                flops=flops if isinstance(flops, int) and flops > 0 else 0,
                reason=reason,
            )
        )
    return DlaSplit(layers=tuple(placed))


def check_dla(
    core: int,
    support: DlaSupport,
    *,
    profiles: Sequence[Mapping[str, ShapeRange]],
    is_quantized: bool,
    version: tuple[int, ...],
    split: DlaSplit | None = None,
) -> list[str]:
    """Refuse a DLA build that cannot work (BuildError), return warnings for one that will hardly pay."""
    if isinstance(core, bool) or not isinstance(core, int) or core < 0:
        raise SpecError(f"dla_core: expected a core number from 0 up, got {core!r}")
    if support.cores == 0:
        raise BuildError(f"a DLA build was asked for, but {support.reason}; build for the GPU (leave out the DLA core)")
    if core >= support.cores:
        raise BuildError(
            f"DLA core {core} does not exist: module {support.module} has {support.cores}, numbered from 0"
        )
    if is_quantized and version[:2] <= LAST_OF_10:
        raise BuildError(
            "the DLA of TensorRT 10.7 and older does not take Q/DQ models; build the bundle's float16 or float variant "
            "for the DLA, or the int8 one for the GPU"
        )
    _check_shapes(profiles)
    if split is None:
        return []
    warnings = []
    if not any(layer.on_dla for layer in split.layers):
        raise BuildError(f"a DLA build was asked for, but no layer of this model can run on it; {split.describe()}")
    if split.pieces > MAX_LOADABLES:
        warnings.append(
            f"the DLA part falls into {split.pieces} pieces, a core holds {MAX_LOADABLES}; the rest will run on the GPU"
        )
    if split.dla_flops_share < 0.5 or split.pieces > 4:
        warnings.append(f"the DLA build will probably be slower than the GPU alone ({split.describe()})")
    return warnings


def _check_shapes(profiles: Sequence[Mapping[str, ShapeRange]]) -> None:
    for profile in profiles:
        for name, shapes in profile.items():
            if not shapes.min == shapes.opt == shapes.max:
                raise BuildError(
                    f"the DLA takes fixed shapes only, input {name!r} ranges from {shapes.min} to {shapes.max}; build "
                    "one bucket with one batch size"
                )
            if shapes.max and shapes.max[0] > MAX_BATCH:
                raise BuildError(f"input {name!r}: batch {shapes.max[0]} is above the DLA's limit of {MAX_BATCH}")
            if any(size > MAX_SIZE for size in shapes.max[1:]):
                raise BuildError(f"input {name!r}: {shapes.max} has a side above the DLA's limit of {MAX_SIZE}")
    if len(profiles) > 1:
        raise BuildError(
            f"the DLA takes fixed shapes only, but {len(profiles)} profiles were given; build one bucket per engine"
        )


def _reason(op: str, shapes: Sequence[Any]) -> str | None:
    if op not in PLACEABLE:
        return REASONS.get(op, "this operator has no DLA form")
    for shape in shapes:
        sizes = [size for size in shape if isinstance(size, int)]
        if len(sizes) != len(shape):
            return "a dynamic dimension"
        if len(sizes) > 4:
            return f"{len(sizes)}-dimensional tensors have no DLA form"
        if sizes and (sizes[0] > MAX_BATCH or any(size > MAX_SIZE for size in sizes[1:])):
            return f"a side of {max(sizes)} is above the DLA's limit"
    return None
