"""What engines are built with and for here: TensorRT, the GPU, and the parts that build and open plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from edgeds.engines.base import Engine
from edgeds.engines.fingerprint import DeviceIdentity
from edgeds.engines.jetson import Jetson, read_jetson
from edgeds.errors import DeviceError, SpecError

Builder = Callable[[Path, Path, Any, Any], Any]
"""(model.onnx, plan to write, BuildOptions, layers of cost.json or None) -> BuildReport."""
Opener = Callable[[Path], Engine]

OLDEST_SM = 75
"""TensorRT-RTX knows no GPU older than Turing."""


@dataclass(frozen=True, kw_only=True)
class BuildHost:
    """Where engines are built and for which GPU.

    ``tensorrt`` is the version, numbers only. ``open_plan`` is None where engines cannot run (built ahead of time for
    another machine), and ``cannot_run`` then says why. ``options_type`` is the builder's BuildOptions, ``fixed``
    those of its fields that the host decides.
    """

    product: Literal["tensorrt", "rtx"]
    tensorrt: str
    typing: Literal["strong", "weak"]
    device: DeviceIdentity
    description: str
    options_type: type[Any]
    fixed: dict[str, Any]
    build: Builder
    open_plan: Opener | None
    cannot_run: str | None = None


def parse_sm(text: str) -> str:
    """``86``, ``8.6``, ``sm86`` or ``sm_120`` as a compute capability, "8.6" or "12.0". Raises SpecError."""
    match = re.fullmatch(r"\s*(?:sm_?)?(\d{1,2})\.?(\d)\s*", text, re.IGNORECASE)
    if match is None or int(match.group(1)) * 10 + int(match.group(2)) < OLDEST_SM:
        raise SpecError(
            f"--rtx {text!r}: expected a GPU's compute capability, as in 86 (Ampere), 89 (Ada), 120 (Blackwell)"
        )
    return f"{int(match.group(1))}.{match.group(2)}"


def identify_device(cuda: Any, jetson: Jetson | None) -> DeviceIdentity:
    """The identity of an opened CUDA device (``edgeds.engines.cuda.Cuda``)."""
    major, minor = cuda.capability
    return DeviceIdentity(
        gpu=cuda.name, compute_capability=f"{major}.{minor}", board=jetson.module if jetson is not None else None
    )


def find_host(
    *,
    rtx: str | None = None,
    quiet: bool = False,
    trt: ModuleType | None = None,
    cuda: Any = None,
    root: Path = Path("/"),
) -> BuildHost:
    """This machine, or, with ``rtx`` (a compute capability), RTX GPUs of that kind anywhere.

    ``trt`` and ``cuda`` default to what is installed. Raises DeviceError or MissingDependency saying what is missing:
    TensorRT, the CUDA driver, or a GPU.
    """
    from edgeds.engines.trt_module import describe_tensorrt, load_tensorrt, resolve_typing

    module = trt if trt is not None else load_tensorrt("auto" if rtx is None else "rtx")
    facts = describe_tensorrt(module)
    version = ".".join(map(str, facts.version))
    if rtx is not None and not facts.is_rtx:
        raise SpecError(f"--rtx builds with TensorRT-RTX, but {facts.product} was given")
    jetson = read_jetson(root)
    here, reason = _find_gpu(cuda, jetson)
    if rtx is not None:
        target = parse_sm(rtx)
        if here is not None and here.compute_capability != target:
            reason = f"the GPU here ({here.gpu}) is not of compute capability {target}"
        device = DeviceIdentity(gpu=None, compute_capability=target)
    elif here is None:
        hint = "; for RTX GPUs engines can be built anywhere: edgeds build BUNDLE --rtx 86" if jetson is None else ""
        raise DeviceError(f"{facts.product} is installed, but engines cannot be built for this machine: {reason}{hint}")
    else:
        device = here
    where = jetson.describe() if jetson is not None else (here.gpu if here is not None else "no GPU")
    return BuildHost(
        product="rtx" if facts.is_rtx else "tensorrt",
        tensorrt=version,
        typing=resolve_typing(facts, typing="auto"),
        device=device,
        description=f"{where}, {facts.product}",
        options_type=_options_type(),
        fixed={"compute_capabilities": (int(device.compute_capability.replace(".", "")),)} if rtx is not None else {},
        build=_builder(module, quiet=quiet),
        open_plan=None if reason is not None else _opener(module, cuda),
        cannot_run=reason,
    )


def _find_gpu(cuda: Any, jetson: Jetson | None) -> tuple[DeviceIdentity | None, str | None]:
    """The GPU and None, or None and why there is none.

    A device opened here is closed again: its context would hold memory that the build in the other process needs.
    """
    if cuda is not None:
        return identify_device(cuda, jetson), None
    from edgeds.engines.cuda import open_cuda

    try:
        with open_cuda() as opened:
            return identify_device(opened, jetson), None
    except DeviceError as error:
        return None, str(error)


def _options_type() -> type[Any]:
    from edgeds.engines.build_options import BuildOptions

    return BuildOptions


def _builder(trt: ModuleType, *, quiet: bool) -> Builder:
    def build(onnx: Path, out: Path, options: Any, layers: Any) -> Any:
        from edgeds.engines.builder import build_plan

        # In its own process: when the kernel kills it for memory, this one lives to say so and to clean up.
        return build_plan(onnx, out, options, trt=trt, layers=layers, quiet=quiet, isolate=True)

    return build


def _opener(trt: ModuleType, cuda: Any) -> Opener:
    def open_plan(plan: Path) -> Engine:
        from edgeds.engines.tensorrt import TensorRTEngine

        return TensorRTEngine(plan, trt=trt, cuda=cuda)

    return open_plan
