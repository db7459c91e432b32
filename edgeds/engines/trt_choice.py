"""Whether TensorRT can run here, and which installed engine of a bundle it should run."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.errors import DeviceError, EngineMismatch, MissingDependency

if TYPE_CHECKING:
    from edgeds.bundle import Bundle, Manifest
    from edgeds.engines.base import Engine

PLAN_SUFFIXES = (".engine", ".plan", ".trt")
PACKAGES = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")


def tensorrt_reason() -> str | None:
    """None when TensorRT engines can run here, else why not, in one line.

    What is cheap is looked at first: importing TensorRT takes a second and hundreds of megabytes.
    """
    if not any(_is_installed(name) for name in PACKAGES):
        has_gpu = shutil.which("nvidia-smi") or Path("/etc/nv_tegra_release").exists()
        return f"TensorRT is not installed{'' if has_gpu else ' and no NVIDIA GPU was found'}"
    from edgeds.engines.cuda import cuda_reason

    reason = cuda_reason()
    if reason is not None:
        return f"TensorRT is installed, but {reason}"
    from edgeds.engines.trt_module import load_tensorrt

    try:
        load_tensorrt()
    except (DeviceError, MissingDependency) as error:
        return str(error)
    return None


def open_plan_file(path: Path) -> Engine:
    """Open an engine file, with or without the Ultralytics header."""
    from edgeds.engines.tensorrt import TensorRTEngine

    return TensorRTEngine(path)


def open_installed(bundle: Bundle, *, precision: str, on_close: Callable[[], None] | None) -> Engine:
    """Open the installed engine of ``bundle`` that matches this device; nothing is built.

    ``on_close`` runs with the engine's close, and is not called when opening fails. Raises EngineMismatch when there
    is no such engine or its files were changed, DeviceError when the device cannot run it.
    """
    from edgeds.engines.cuda import open_cuda
    from edgeds.engines.install import explain_missing, find_host, find_installed
    from edgeds.engines.tensorrt import TensorRTEngine
    from edgeds.engines.trt_module import load_tensorrt

    trt = load_tensorrt()
    with contextlib.ExitStack() as stack:
        cuda = stack.enter_context(open_cuda())
        host = find_host(trt=trt, cuda=cuda, quiet=True)
        found = find_installed(bundle, host=host, precision=precision)
        if found is None:
            raise EngineMismatch(explain_missing(bundle, host=host))
        # Last in, first out: the device is closed before the bundle.
        held = contextlib.ExitStack()
        if on_close is not None:
            held.callback(on_close)
        engine = TensorRTEngine(
            found.plan,  # its checksum was compared when it was found
            trt=trt,
            cuda=cuda,
            specs=(*bundle.manifest.inputs, *bundle.manifest.outputs),
            precision=found.manifest.precision,
            metadata=model_facts(bundle.manifest),
            on_close=held.close,
        )
        held.push(stack.pop_all())
    return engine


def model_facts(manifest: Manifest) -> dict[str, str]:
    """The metadata of the model that the bundle's head keeps (those of language models do)."""
    facts = (manifest.head or {}).get("metadata")
    return {str(key): str(value) for key, value in facts.items()} if isinstance(facts, dict) else {}


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
        # Without an origin it is a folder that happens to have the name, not an installed package.
        return spec is not None and spec.origin is not None
    except ValueError:  # already imported by other means, without a spec
        return True
