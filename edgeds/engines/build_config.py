"""Options written into TensorRT's IBuilderConfig, each read back: its setters log and ignore, they do not raise."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeds.engines.build_memory import MIB, BuildMemory
from edgeds.engines.build_options import BuildOptions
from edgeds.engines.trt_module import TrtFacts, enum_member
from edgeds.errors import BuildError
from edgeds.files import atomic_path

MAX_CACHE_BYTES = 1 << 30
DLA_SRAM_BYTES = 1 << 20
"""One Orin core's own memory; NVIDIA, "Customizing DLA Memory Pools"."""


@dataclass
class Settings:
    """What TensorRT holds after setting: ``applied`` values, and ``skipped`` with the reason."""

    applied: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def configure(
    trt: ModuleType,
    config: Any,
    options: BuildOptions,
    *,
    facts: TrtFacts,
    typing: str,
    precision: str,
    memory: BuildMemory,
) -> Settings:
    """Write all options into ``config``. Raises BuildError when one that decides what the engine is was not taken;
    those that only tune it are reported as skipped."""
    done = Settings()
    # Without it the log has no layers, so no precision could be proven.
    _set(config, "profiling_verbosity", trt.ProfilingVerbosity.DETAILED, label="profiling_verbosity", done=done)
    _set_pools(trt, config, memory, done=done)
    _set_optional(trt, config, options, facts=facts, done=done)
    if typing == "weak":
        for name in {"int8": ("FP16", "INT8"), "float16": ("FP16",)}.get(precision, ()):
            _set_flag(trt, config, name, done=done, needed_for=f"weakly typed {precision} build", facts=facts)
    if options.dla_core is not None:
        _set_dla(trt, config, options.dla_core, options=options, facts=facts, done=done)
    if options.compute_capabilities:
        _set_targets(trt, config, options.compute_capabilities, facts=facts, done=done)
    return done


def load_timing_cache(config: Any, path: Path, *, facts: TrtFacts, done: Settings) -> Any:
    """Give the config a timing cache from a file, or an empty one. Returns the object to keep alive, or None."""
    if not facts.has_timing_cache:
        done.skipped["timing_cache"] = f"{facts.product} does not use it"
        return None
    content = b""
    try:
        if path.exists() and path.stat().st_size <= MAX_CACHE_BYTES:
            content = path.read_bytes()
    except OSError as error:
        done.skipped["timing_cache"] = f"{path} cannot be read ({error.strerror}); every kernel is timed again"
        return None
    cache = config.create_timing_cache(content) or config.create_timing_cache(b"")
    if cache is None or not config.set_timing_cache(cache, False):
        done.skipped["timing_cache"] = f"TensorRT did not take {path}; every kernel is timed again"
        return None
    done.applied["timing_cache"] = f"{path} ({'reused' if content else 'new'})"
    return cache


def save_timing_cache(config: Any, path: Path, *, done: Settings) -> None:
    """Keep the timings for the next build. A folder that cannot be written costs time later, so it is told."""
    cache = config.get_timing_cache()
    if cache is None:
        return
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(bytes(cache.serialize()))
    except OSError as error:
        done.applied.pop("timing_cache", None)
        done.skipped["timing_cache"] = (
            f"{path} cannot be written ({error.strerror or error}): the next build will take as long as this one; "
            "give a folder that can be written"
        )


def timing_cache_file(folder: Path, *, facts: TrtFacts, device: str, compute_capability: str) -> Path:
    """Where the cache of one TensorRT version and one kind of GPU is kept; timings of others are wrong, not slow."""
    safe = "".join(char if char.isalnum() or char in "._" else "-" for char in f"{device}-sm{compute_capability}")
    return folder / f"timing-{facts.version_text}-{safe}.cache"


def _set_pools(trt: ModuleType, config: Any, memory: BuildMemory, *, done: Settings) -> None:
    _set_pool(trt, config, "WORKSPACE", memory.workspace_mib * MIB, done=done)
    if memory.tactic_dram_mib is not None:
        _set_pool(trt, config, "TACTIC_DRAM", memory.tactic_dram_mib * MIB, done=done)


def _set_pool(trt: ModuleType, config: Any, name: str, size: int, *, done: Settings) -> None:
    pool = enum_member(trt, f"MemoryPoolType.{name}")
    label = name.lower()
    if pool is None:
        done.skipped[label] = "this TensorRT has no such pool"
        return
    config.set_memory_pool_limit(pool, size)
    held = config.get_memory_pool_limit(pool)
    if held == size:
        done.applied[label] = f"{size // MIB} MiB"
    else:
        done.skipped[label] = f"asked for {size} bytes, TensorRT holds {held}"


def _set_optional(trt: ModuleType, config: Any, options: BuildOptions, *, facts: TrtFacts, done: Settings) -> None:
    if options.optimization_level is not None:
        _set(config, "builder_optimization_level", options.optimization_level, label="optimization_level", done=done)
    if options.max_aux_streams is not None:
        _set(config, "max_aux_streams", options.max_aux_streams, label="max_aux_streams", done=done)
    if options.max_tactics is not None:
        _set(config, "max_num_tactics", options.max_tactics, label="max_tactics", done=done)
    if options.tiling is not None:
        if facts.has_tiling:
            level = enum_member(trt, f"TilingOptimizationLevel.{options.tiling.upper()}")
            _set(config, "tiling_optimization_level", level, label="tiling", done=done)
            if options.tiling_l2_kib is not None:
                _set(config, "l2_limit_for_tiling", options.tiling_l2_kib * 1024, label="tiling_l2_kib", done=done)
        else:
            done.skipped["tiling"] = f"{facts.product} has no tiling (TensorRT 10.8 and newer have)"
    if options.sparsity:
        _set_flag(trt, config, "SPARSE_WEIGHTS", done=done, facts=facts)
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
        taken = not config.get_flag(trt.BuilderFlag.TF32)
        (done.applied if taken else done.skipped)["tf32"] = "off" if taken else "TensorRT kept it on"
    if options.strip:
        _set_flag(trt, config, "STRIP_PLAN", done=done, needed_for="stripped plan", facts=facts)
    if options.refit:
        _set_flag(trt, config, "REFIT", done=done, needed_for="refittable plan", facts=facts)
    if options.version_compatible:
        _set_flag(trt, config, "VERSION_COMPATIBLE", done=done, needed_for="version-compatible plan", facts=facts)
    if options.hardware_compatibility is not None:
        level = enum_member(trt, f"HardwareCompatibilityLevel.{options.hardware_compatibility.upper()}")
        label = "hardware_compatibility"
        if level is None or not _set(config, "hardware_compatibility_level", level, label=label, done=done):
            raise BuildError(
                f"{facts.product} does not offer hardware compatibility {options.hardware_compatibility!r}; build "
                "without it, on each kind of GPU"
            )


def _set_dla(
    trt: ModuleType, config: Any, core: int, *, options: BuildOptions, facts: TrtFacts, done: Settings
) -> None:
    device = enum_member(trt, "DeviceType.DLA")
    taken = device is not None and _set(config, "default_device_type", device, label="device", done=done)
    if not taken or not _set(config, "DLA_core", core, label="dla_core", done=done):
        raise BuildError(f"{facts.product} did not take DLA core {core} ({done.skipped}); build for the GPU")
    _set_pool(trt, config, "DLA_MANAGED_SRAM", DLA_SRAM_BYTES, done=done)
    if options.gpu_fallback:
        _set_flag(trt, config, "GPU_FALLBACK", done=done, needed_for="DLA build with GPU fallback", facts=facts)


def _set_targets(trt: ModuleType, config: Any, targets: tuple[int, ...], *, facts: TrtFacts, done: Settings) -> None:
    if not facts.has_compute_capabilities:
        raise BuildError(
            f"{facts.product} builds for the GPU of this machine only; compute_capabilities is for TensorRT-RTX"
        )
    known = {int(name[2:]): name for name in dir(trt.ComputeCapability) if name[:2] == "SM" and name[2:].isdigit()}
    for number in targets:
        if number not in known:
            jetson = "; SM87 is Jetson Orin: build on the board itself" if number == 87 else ""
            raise BuildError(
                f"{facts.product} cannot build for SM{number}; it knows "
                f"{', '.join(known[sm] for sm in sorted(known))}{jetson}"
            )
    config.num_compute_capabilities = len(targets)
    for index, number in enumerate(targets):
        if not config.set_compute_capability(getattr(trt.ComputeCapability, known[number]), index):
            raise BuildError(f"{facts.product} did not take SM{number} as a target")
    done.applied["compute_capabilities"] = ", ".join(known[number] for number in targets)


def _set_flag(
    trt: ModuleType, config: Any, name: str, *, done: Settings, facts: TrtFacts, needed_for: str | None = None
) -> None:
    flag = enum_member(trt, f"BuilderFlag.{name}")
    label = name.lower()
    if flag is not None:
        config.set_flag(flag)
        if config.get_flag(flag):
            done.applied[label] = "on"
            return
    reason = f"{facts.product} has no flag {name}" if flag is None else f"{facts.product} did not take the flag {name}"
    if needed_for is not None:
        raise BuildError(f"a {needed_for} was asked for, but {reason}; leave the option out")
    done.skipped[label] = reason


def _set(config: Any, name: str, value: Any, *, label: str, done: Settings) -> bool:
    if value is None or not hasattr(type(config), name):
        done.skipped[label] = f"this TensorRT has no {name}"
        return False
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # told by what is read back
        setattr(config, name, value)
    held = getattr(config, name)
    text = getattr(held, "name", str(held))
    if held == value:
        done.applied[label] = text
        return True
    done.skipped[label] = f"asked for {getattr(value, 'name', value)}, TensorRT holds {text}"
    return False
