"""What one set of input shapes means for an engine, and how a lane is wired to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeds.engines.base import Array
from edgeds.engines.cuda_memory import Resource
from edgeds.engines.trt_buffers import Bound
from edgeds.engines.trt_context import LiveContext
from edgeds.engines.trt_io import Profile, Shape


@dataclass(frozen=True, kw_only=True)
class ShapePlan:
    """What one set of input shapes means: the profile that runs it and the outputs' shapes (-1: depends on data)."""

    key: tuple[object, ...]
    profile: Profile
    shapes: dict[str, Shape]
    outputs: dict[str, Shape]

    @property
    def is_data_dependent(self) -> bool:
        return any(-1 in shape for shape in self.outputs.values())


@dataclass(kw_only=True)
class Ready:
    """A shape plan wired to one lane's memory. ``copies_*`` are (device, host, bytes)."""

    plan: ShapePlan
    addresses: dict[str, int]
    host_addresses: dict[str, int]
    inputs: list[tuple[str, Array]]
    outputs: list[tuple[str, Array]]
    copies_in: list[tuple[int, int, int]]
    copies_out: list[tuple[int, int, int]]
    context: LiveContext | None = None
    graph: Resource | None = None
    uses: int = 0


@dataclass(kw_only=True)
class LaneRules:
    """How lanes work; shared and changed by the engine, counters under the GPU lock.

    ``graph_problem`` says why graphs are off for good, ``graph_note`` why there were none so far.
    """

    zero_copy: bool
    graph_problem: str | None
    largest: dict[str, int]
    bound: dict[str, Bound] = field(default_factory=dict)
    graph_note: str | None = None
    calls: int = 0
    graph_runs: int = 0


def drop_graph(ready: Ready) -> None:
    """Free a graph and the context it was captured from. A CUDA context must be current, nothing may be running."""
    if ready.graph is not None:
        ready.graph.close()
    if ready.context is not None:
        ready.context.close()
    ready.graph = ready.context = None
    ready.uses = 0
