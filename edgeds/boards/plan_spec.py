"""What a plan is made of, as values: forms of a model, limits, choices and what they miss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edgeds.boards.cost_file import ModelWork
from edgeds.boards.footprint import MemoryParts
from edgeds.specs import Budget, Resolution

Objective = Literal["fps_per_watt", "fps", "latency", "energy", "accuracy"]
OBJECTIVES: tuple[Objective, ...] = ("fps_per_watt", "fps", "latency", "energy", "accuracy")
Margin = Literal["mean", "high", "low"]
DEFAULT_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measurement on a device. ``board`` and ``mode`` are named as in the catalogue; ``power_w`` of the module."""

    board: str
    mode: str
    variant: str
    precision: str
    batch: int
    size: str | None
    latency_ms: float
    power_w: float | None = None
    memory_mib: float | None = None
    date: str = ""
    device: str = ""

    def is_of(self, choice: PlanChoice, *, board: str) -> bool:
        """Whether this is ``choice`` on ``board``; a row without a size is of any. Rows are of the GPU."""
        mine = (self.board, self.mode, self.precision, self.batch)
        same = mine == (board, choice.mode, choice.precision, choice.batch)
        return same and choice.device == "gpu" and self.size in (None, choice.size)


@dataclass(frozen=True, kw_only=True)
class BoardScale:
    """Measured / predicted on one board (``boards/refit.py``). ``power`` None: it was not measured there. ``spread``:
    the factor that the worst row still lies away."""

    board: str
    latency: float
    power: float | None
    rows: int
    spread: float = 1.0
    date: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One form of the model: its costs, the precision it would run in, and its accuracy in points (None: unknown).

    ``device``: ``gpu`` or ``dla`` (one core, the rest on the GPU). ``context``: tokens in the cache of a language
    model, whose costs are those of one decode step; its FPS are tokens per second.
    """

    name: str
    precision: str
    work: ModelWork
    accuracy: float | None = None
    measured: tuple[Measured, ...] = ()
    scale: BoardScale | None = None
    device: Literal["gpu", "dla"] = "gpu"
    context: int | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is asked. ``modes`` None: all of the board, or the target's own. ``sizes`` () : as the costs were counted.

    ``margin`` says which edge of a prediction's band is held against the limits: ``high`` latency is the careful one.
    """

    budget: Budget = field(default_factory=Budget)
    objective: Objective = "fps_per_watt"
    modes: tuple[str, ...] | None = None
    batches: tuple[int, ...] = DEFAULT_BATCHES
    sizes: tuple[Resolution, ...] = ()
    margin: Margin = "mean"


@dataclass(frozen=True, kw_only=True)
class Miss:
    """A limit that a choice does not meet; ``got`` None means unknown."""

    limit: str
    wanted: float
    got: float | None

    @property
    def shortfall(self) -> float:
        """How far off, as a share of what is wanted; 1 when unknown."""
        return 1.0 if self.got is None else abs(self.got - self.wanted) / max(abs(self.wanted), 1e-9)

    def __str__(self) -> str:
        return f"{self.limit}: {'unknown' if self.got is None else f'{self.got:.4g}'}, asked for {self.wanted:.4g}"


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """One way to run the model. ``latency_ms`` is one inference of the batch; ``response_ms`` adds the time that the
    first item of a batch waits for the others at the rate asked for. ``power_w`` is the module's while it runs without
    a pause, ``energy_mj`` per item then; ``mean_power_w`` is an estimate at ``rate_fps``, the rate asked for (None
    without one). ``status`` tells whether latency was predicted or measured."""

    candidate: str
    mode: str
    precision: str
    batch: int
    size: str | None
    latency_ms: float
    latency_low_ms: float
    latency_high_ms: float
    response_ms: float
    fps: float
    power_w: float | None
    energy_mj: float | None
    memory_mib: float | None
    accuracy: float | None
    limited_by: str | None
    status: Literal["predicted", "measured"]
    notes: tuple[str, ...] = ()
    misses: tuple[Miss, ...] = ()
    rate_fps: float | None = None
    mean_power_w: float | None = None
    device: Literal["gpu", "dla"] = "gpu"
    memory: MemoryParts | None = None

    @property
    def waiting_ms(self) -> float:
        return self.response_ms - self.latency_ms

    @property
    def fps_per_watt(self) -> float | None:
        """At the rate asked for, where one was and the device keeps it; else while it runs without a pause."""
        if self.rate_fps is not None and self.mean_power_w is not None:
            return min(self.rate_fps, self.fps) / self.mean_power_w
        return self.fps / self.power_w if self.power_w else None

    def __str__(self) -> str:
        size = f" {self.size}" if self.size else ""
        power = "power unknown" if self.power_w is None else f"{self.power_w:.3g} W"
        place = " on DLA" if self.device == "dla" else ""
        what = f"{self.mode} {self.candidate} {self.precision}{place}{size} batch {self.batch}"
        return f"{what}: {self.fps:.4g} FPS, {self.latency_ms:.3g} ms, {power} ({self.status})"


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """``plan`` is None when nothing meets all limits; ``nearest`` then holds the closest, with what they miss.
    ``alternatives`` are the other choices that meet the limits and that no other one beats in everything."""

    target: str
    objective: str
    feasible: bool
    plan: PlanChoice | None
    alternatives: tuple[PlanChoice, ...]
    nearest: tuple[PlanChoice, ...]
    reasons: tuple[str, ...]
    tried: int
