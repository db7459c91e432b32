"""Progress of a build and its cancellation, over TensorRT's IProgressMonitor.

TensorRT reports nested phases, each with a number of steps; ``step_complete`` returning False cancels. Callbacks come
from C++, so they only take a lock, count and return.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildProgress:
    """Fraction of a build that is done, never decreasing, and a request to cancel. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phases: dict[str, _Phase] = {}
        self._fraction = 0.0
        self._cancelled = threading.Event()

    @property
    def fraction(self) -> float:
        with self._lock:
            return self._fraction

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the build to stop at its next step."""
        self._cancelled.set()

    def start(self, name: str, parent: str | None, steps: int) -> None:
        with self._lock:
            self._phases[name] = _Phase(parent=parent or None, steps=max(int(steps), 1))

    def step(self, name: str, step: int) -> bool:
        """Count a step; False when the build is to stop."""
        with self._lock:
            phase = self._phases.get(name)
            if phase is not None:
                phase.done = min(step + 1, phase.steps)
            self._update()
        return not self._cancelled.is_set()

    def finish(self, name: str) -> None:
        with self._lock:
            # The parent counts this phase by its own step; until that comes the maximum so far holds.
            self._phases.pop(name, None)
            self._update()

    def _update(self) -> None:
        roots = [name for name, phase in self._phases.items() if phase.parent not in self._phases]
        if roots:
            self._fraction = max(self._fraction, min(max(self._done(name, 0) for name in roots), 1.0))

    def _done(self, name: str, depth: int) -> float:
        phase = self._phases[name]
        inner = [other for other, item in self._phases.items() if item.parent == name and other != name]
        below = max((self._done(other, depth + 1) for other in inner), default=0.0) if depth < 8 else 0.0
        return min((phase.done + below) / phase.steps, 1.0)


def make_monitor(trt: ModuleType, progress: BuildProgress) -> Any:
    """A ``trt.IProgressMonitor`` that feeds ``progress``."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)  # pybind classes must be initialised by name

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return progress.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return Monitor()
