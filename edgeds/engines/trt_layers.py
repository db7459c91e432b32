"""How long each layer of an engine takes, by TensorRT's own profiler."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """One layer of the built engine (layers of the model may be fused into it). Times of one run in milliseconds."""

    name: str
    mean_ms: float
    min_ms: float
    share: float


class LayerClock:
    """Collects ``(layer, milliseconds)`` of several runs; ``attach`` makes the object TensorRT reports to."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def attach(self, trt: ModuleType, context: Any) -> Any:
        """Make a context report its layers here; keep the returned object as long as the context runs."""
        times = self._times

        class Profiler(trt.IProfiler):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                trt.IProfiler.__init__(self)

            def report_layer_time(self, layer_name: str, ms: float) -> None:
                times.setdefault(layer_name, []).append(ms)

        profiler = Profiler()
        context.profiler = profiler
        return profiler

    def clear(self) -> None:
        self._times.clear()

    def result(self) -> tuple[LayerTime, ...]:
        """Layers in the order they ran; ``share`` is of the sum of all means."""
        means = {name: sum(values) / len(values) for name, values in self._times.items()}
        total = sum(means.values()) or 1.0
        return tuple(
            LayerTime(name=name, mean_ms=mean, min_ms=min(self._times[name]), share=mean / total)
            for name, mean in means.items()
        )
