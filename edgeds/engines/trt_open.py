"""Open a plan: the engine, its memory and what its tensors are, ready for lanes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from edgeds.engines.cuda import Cuda
from edgeds.engines.trt_context import Machine, follows_batch, largest_bytes, scratch_size
from edgeds.engines.trt_io import make_specs, read_profiles, read_tensors
from edgeds.engines.trt_lane import Lane
from edgeds.engines.trt_load import LoadedPlan, load_plan
from edgeds.engines.trt_plan import LaneRules
from edgeds.engines.trt_pool import LanePool
from edgeds.errors import DeviceError, SpecError
from edgeds.specs import TensorSpec


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How an engine runs.

    ``lanes`` requests are in work at once. ``graphs`` False never captures CUDA graphs; else they are captured where
    possible. ``zero_copy`` None lets the GPU work in mapped host memory where it shares the CPU's memory.
    ``dla_core`` is for plans built for the DLA, ``allow_host_code`` for trusted version-compatible plans only.
    """

    lanes: int = 2
    graphs: bool = True
    zero_copy: bool | None = None
    dla_core: int | None = None
    allow_host_code: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.lanes, bool) or not isinstance(self.lanes, int) or not 1 <= self.lanes <= 16:
            raise SpecError(f"lanes: expected a whole number from 1 to 16, got {self.lanes!r}")


@dataclass(frozen=True, kw_only=True)
class OpenedPlan:
    """A plan on the device. ``specs`` are all tensors by name in the engine's order."""

    machine: Machine
    rules: LaneRules
    pool: LanePool
    specs: Mapping[str, TensorSpec]
    metadata: Mapping[str, str]


def open_plan(
    path: Path,
    *,
    trt: ModuleType,
    cuda: Cuda,
    specs: Sequence[TensorSpec],
    options: RunOptions,
    stack: contextlib.ExitStack,
) -> OpenedPlan:
    """Deserialize a plan and make its first lane, sized to the largest profile. ``stack`` gets what to undo."""
    zero_copy = cuda.is_integrated and cuda.can_map if options.zero_copy is None else options.zero_copy
    if zero_copy and not cuda.can_map:
        raise DeviceError(f"zero_copy was asked for, but {cuda.name} cannot map host memory")
    free_mib = cuda.memory().free_mib
    with cuda.current():
        loaded = load_plan(
            path, trt=trt, dla_core=options.dla_core, allow_host_code=options.allow_host_code, free_mib=free_mib
        )
    stack.callback(_release, cuda, loaded)
    tensors = read_tensors(loaded, where=path.name)
    compute = cuda.stream()
    stack.callback(compute.close)
    scratch = cuda.device_buffer(scratch_size(loaded))
    stack.callback(scratch.close)
    machine = Machine(
        trt=trt,
        cuda=cuda,
        loaded=loaded,
        tensors={info.name: info for info in tensors},
        profiles=read_profiles(loaded, tensors),
        compute=compute.handle,
        scratch_address=scratch.address,
        scratch_bytes=scratch.nbytes,
        where=path.name,
    )
    rules = LaneRules(
        zero_copy=zero_copy, graph_problem=None if options.graphs else "CUDA graphs were not asked for", largest={}
    )
    lock = threading.Lock()
    batched: set[str] = set()

    def make_lane() -> Lane:
        with contextlib.ExitStack() as on_failure:
            lane = Lane(machine, rules, gpu_lock=lock)
            on_failure.callback(lane.close)
            if not rules.largest:
                batched.update(_measure(machine, rules, lane))
            lane.reserve()
            on_failure.pop_all()
        return lane

    closed = f"the engine of {path.name} is closed; open it again"
    pool = LanePool(make_lane, limit=options.lanes, closed_text=closed)
    stack.callback(pool.close)
    named = make_specs(tensors, machine.profiles, named=specs, batched=frozenset(batched))
    return OpenedPlan(machine=machine, rules=rules, pool=pool, specs=named, metadata=loaded.metadata)


def _measure(machine: Machine, rules: LaneRules, lane: Lane) -> frozenset[str]:
    """Fill in the largest size of every tensor; returns the tensors whose axis 0 is the batch."""
    batched: list[frozenset[str]] = []
    with machine.cuda.current():
        for profile in machine.profiles:
            context = lane.context(profile.index)
            for name, nbytes in largest_bytes(machine, context, profile).items():
                rules.largest[name] = max(nbytes, rules.largest.get(name, 0))
            batched.append(follows_batch(machine, context, profile))
    known = [names for names in batched if names]
    return frozenset.intersection(*known) if known else frozenset()


def _release(cuda: Cuda, loaded: LoadedPlan) -> None:
    # TensorRT frees device memory here, so the context must be current; the engine goes before its runtime.
    with cuda.current():
        loaded.engine = None
        loaded.runtime = None
