"""TensorRT engines: one plan, numpy in, numpy out, from any thread.

A call borrows a lane (``trt_lane``) from its first copy to its last, so nobody sees another's results. The CUDA
context is pushed on the calling thread around each piece of GPU work and popped again, also on exceptions; handing
every call to an owner thread would cost more than the call. In serving the session's thread is the only caller.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType

import numpy as np

from edgeds.engines.base import Array, check_feeds
from edgeds.engines.cuda import Cuda, open_cuda
from edgeds.engines.cuda_driver import CudaCallError
from edgeds.engines.cuda_memory import DeviceBuffer, HostBuffer
from edgeds.engines.trt_buffers import Bound
from edgeds.engines.trt_io import Allowed, choose_profile, max_batch
from edgeds.engines.trt_lane import Lane
from edgeds.engines.trt_layers import LayerClock, LayerTime
from edgeds.engines.trt_load import is_rtx_plan
from edgeds.engines.trt_module import load_tensorrt
from edgeds.engines.trt_open import OpenedPlan, RunOptions, open_plan
from edgeds.engines.trt_plan import ShapePlan
from edgeds.errors import DeviceError, InputError, ModelError, SessionClosed, SpecError
from edgeds.specs import TensorSpec

__all__ = ["Derive", "EngineStats", "LayerTime", "RunOptions", "TensorRTEngine"]

Derive = Callable[[Mapping[str, tuple[int, ...]]], Array]
"""Makes an input from the shapes of the others."""

MAX_PLANS = 256
BIND_ALIGNMENT = 256
"""Bytes; TensorRT's own rule for addresses of tensors."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What the engine holds now and how its calls ran. ``graph_problem`` says why no graphs are captured."""

    calls: int
    graph_runs: int
    lanes: int
    graphs: int
    scratch_bytes: int
    zero_copy: bool
    graph_problem: str | None


class TensorRTEngine:
    """See Engine. ``specs`` (a bundle's inputs and outputs) give names to dynamic dims; ``metadata`` is what the model
    said of itself, which a plan does not keep.

    ``derive`` maps inputs the caller does not feed to functions of the other inputs' shapes. ``trt`` and ``cuda``
    default to what is installed; a ``cuda`` that is given stays the caller's to close.

    Raises ModelError, EngineMismatch, OutOfMemory or DeviceError when the plan cannot run here.
    """

    backend = "tensorrt"
    threads = 1

    def __init__(
        self,
        plan: Path | str,
        *,
        trt: ModuleType | None = None,
        cuda: Cuda | None = None,
        specs: Sequence[TensorSpec] = (),
        metadata: Mapping[str, str] | None = None,
        derive: Mapping[str, Derive] | None = None,
        options: RunOptions | None = None,
        precision: str | None = None,
        fallback_reason: str | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.path = Path(plan)
        self.precision = precision
        self.fallback_reason = fallback_reason
        options = options or RunOptions()
        if not self.path.is_file():
            raise ModelError(f"{self.path}: no such engine file; build it with 'edgeds build BUNDLE'")
        trt = trt if trt is not None else load_tensorrt("rtx" if is_rtx_plan(self.path) else "tensorrt")
        with contextlib.ExitStack() as stack:
            self.cuda = cuda if cuda is not None else stack.enter_context(open_cuda())
            self._opened: OpenedPlan = open_plan(
                self.path, trt=trt, cuda=self.cuda, specs=specs, options=options, stack=stack
            )
            self._derive = self._check_derive(derive or {})
            if on_close is not None:
                # Runs last: an exit stack undoes in reverse order.
                outer = contextlib.ExitStack()
                outer.callback(on_close)
                outer.push(stack.pop_all())
                stack = outer
            # A forgotten engine gives its memory back when it is collected, or before the interpreter leaves.
            self._finalizer = weakref.finalize(self, _close_all, stack.pop_all(), os.getpid())
        self.metadata = {**self._opened.metadata, **(metadata or {})}
        self._profiles = self._opened.machine.profiles
        self._lock = threading.Lock()
        self._closed = False
        self._broken: str | None = None
        self._workers = options.lanes
        self._pool: ThreadPoolExecutor | None = None
        self._plans: dict[tuple[object, ...], ShapePlan] = {}
        self._list_tensors()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What callers feed: neither derived nor bound inputs."""
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What ``infer`` returns: outputs that are not bound."""
        return self._outputs

    @property
    def profiles(self) -> tuple[Mapping[str, Allowed], ...]:
        """Allowed shapes by input, one mapping for each optimization profile."""
        return tuple(profile.shapes for profile in self._profiles)

    @property
    def max_batch(self) -> int | None:
        """Most rows of one run; None when the batch is fixed."""
        return max_batch(self._profiles)

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once; see Engine.infer. Waits while all lanes are busy."""
        full = self._complete(feeds)
        pool = self._opened.pool
        lane = pool.borrow()
        try:
            return lane.run(self._find_plan(lane, full), full)
        except BaseException as error:
            if isinstance(error, CudaCallError) and error.is_sticky:
                self._broken = str(error)
            lane.settle()
            raise
        finally:
            pool.give_back(lane)

    def infer_async(self, feeds: Mapping[str, Array]) -> Future[dict[str, Array]]:
        """``infer`` on a worker thread; see Engine.infer_async."""
        with self._lock:
            if self._closed:
                raise SessionClosed(f"the engine of {self.path.name} is closed; open it again")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="edgeds-trt")
            return self._pool.submit(self.infer, feeds)

    def bind(
        self,
        name: str,
        buffer: DeviceBuffer | HostBuffer | None,
        *,
        shape: Sequence[int] | None = None,
        offset: int = 0,
    ) -> None:
        """Let a tensor live in the caller's device memory from the next call on: neither fed nor returned.

        It begins ``offset`` bytes into the buffer, which may be mapped host memory. Inputs need their ``shape``. One
        buffer may be an input and an output (a cache updated in place). None unbinds. Calls under way are finished
        first; the buffer must stay open while it is bound.

        Raises SpecError for an unknown tensor, a missing or unfit shape, or a buffer that is too small.
        """
        bound = self._check_bound(name, buffer, shape, offset)
        with self._opened.pool.exclusive() as lanes:
            if bound is None:
                self._opened.rules.bound.pop(name, None)
            else:
                self._opened.rules.bound[name] = bound
            for lane in lanes:
                lane.forget()
            self._plans.clear()
            self._list_tensors()

    def profile_layers(self, feeds: Mapping[str, Array], *, runs: int = 20) -> tuple[LayerTime, ...]:
        """Mean and least time of each layer over ``runs`` runs after a warm-up; other calls wait meanwhile."""
        if isinstance(runs, bool) or not isinstance(runs, int) or not 1 <= runs <= 10_000:
            raise SpecError(f"runs: expected a whole number from 1 to 10000, got {runs!r}")
        full = self._complete(feeds)
        clock = LayerClock()
        with self._opened.pool.exclusive() as lanes:
            lane = lanes[0]
            plan = self._find_plan(lane, full)
            with lane.timed(plan.profile.index, clock):
                lane.run(plan, full)
                clock.clear()
                for _ in range(runs):
                    lane.run(plan, full)
        return clock.result()

    def stats(self) -> EngineStats:
        """Counters and sizes at this moment."""
        opened = self._opened
        return EngineStats(
            calls=opened.rules.calls,
            graph_runs=opened.rules.graph_runs,
            lanes=opened.pool.count,
            graphs=sum(lane.graph_count for lane in opened.pool.lanes),
            scratch_bytes=opened.machine.scratch_bytes,
            zero_copy=opened.rules.zero_copy,
            graph_problem=opened.rules.graph_problem or (None if opened.rules.graph_runs else opened.rules.graph_note),
        )

    def close(self) -> None:
        """Let running calls finish, then free everything in order. Safe to call twice and from several threads."""
        with self._lock:
            first, self._closed = not self._closed, True
            pool, self._pool = self._pool, None
            self._opened.pool.refuse_new()
        if pool is not None:
            pool.shutdown(wait=True)
        if first:
            self._finalizer()

    def __enter__(self) -> TensorRTEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _complete(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Checked feeds with the derived inputs."""
        if self._closed:
            raise SessionClosed(f"the engine of {self.path.name} is closed; open it again")
        if self._broken is not None:
            raise DeviceError(f"the engine of {self.path.name} failed before and cannot go on: {self._broken}")
        full = check_feeds(self._inputs, feeds)
        if not self._derive:
            return full
        shapes = {name: tuple(array.shape) for name, array in full.items()}
        for name, derive in self._derive.items():
            try:
                full |= check_feeds((self._opened.specs[name],), {name: derive(shapes)})
            except InputError as error:
                raise SpecError(f"what 'derive' gave for {name!r} does not fit: {error}") from error
        return full

    def _find_plan(self, lane: Lane, full: Mapping[str, Array]) -> ShapePlan:
        """The plan for these shapes (and values of shape inputs), kept for the next time."""
        tensors = self._opened.machine.tensors
        key = tuple(array.tobytes() if tensors[name].on_host else array.shape for name, array in full.items())
        plan = self._plans.get(key)
        if plan is None:
            shapes = {name: tuple(array.shape) for name, array in full.items()}
            bound = self._opened.rules.bound
            shapes |= {name: taken.shape for name, taken in bound.items() if taken.shape is not None}
            values = {
                name: tuple(int(value) for value in array.reshape(-1))
                for name, array in full.items()
                if tensors[name].on_host
            }
            plan = lane.plan(key, choose_profile(self._profiles, shapes, values), full)
            with self._lock:
                while len(self._plans) >= MAX_PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[key] = plan
        return plan

    def _list_tensors(self) -> None:
        hidden = {*self._derive, *self._opened.rules.bound}
        specs, tensors = self._opened.specs, self._opened.machine.tensors
        shown = [info for name, info in tensors.items() if name not in hidden]
        self._inputs = tuple(specs[info.name] for info in shown if info.is_input)
        self._outputs = tuple(specs[info.name] for info in shown if not info.is_input)

    def _check_derive(self, derive: Mapping[str, Derive]) -> dict[str, Derive]:
        for name in derive:
            info = self._opened.machine.tensors.get(name)
            if info is None or not info.is_input:
                raise SpecError(f"derive: the engine has no input {name!r}")
        return dict(derive)

    def _check_bound(
        self, name: str, buffer: DeviceBuffer | HostBuffer | None, shape: Sequence[int] | None, offset: int
    ) -> Bound | None:
        info = self._opened.machine.tensors.get(name)
        if info is None:
            known = ", ".join(self._opened.machine.tensors)
            raise SpecError(f"bind: the engine has no tensor {name!r}; it has {known}")
        if buffer is None:
            return None
        if info.on_host:
            raise SpecError(f"bind: {name!r} is read by the CPU; feed it instead of giving it device memory")
        if buffer.is_closed or buffer.cuda is not self.cuda:
            raise SpecError(f"bind: the buffer for {name!r} is closed or of another CUDA device")
        address = buffer.device_address if isinstance(buffer, HostBuffer) else buffer.address
        if not address:
            raise SpecError(f"bind: the host buffer for {name!r} is not mapped; the device cannot see it")
        if not 0 <= offset < buffer.nbytes or offset % BIND_ALIGNMENT:
            raise SpecError(
                f"bind: {name!r} at byte {offset} of a buffer of {buffer.nbytes}: needs a multiple of {BIND_ALIGNMENT} "
                "inside it"
            )
        address, room = address + offset, buffer.nbytes - offset
        if not info.is_input:
            return Bound(address=address, nbytes=room, shape=None)
        if shape is None:
            raise SpecError(f"bind: input {name!r} needs the shape of what its buffer holds")
        wanted = tuple(int(dim) for dim in shape)
        nbytes = int(np.prod(wanted, dtype=np.int64)) * np.dtype(info.dtype).itemsize
        if not any(profile.shapes[name].admits(wanted) for profile in self._profiles):
            ranges = " or ".join(dict.fromkeys(str(profile.shapes[name]) for profile in self._profiles))
            raise SpecError(
                f"bind: input {name!r} of shape {list(wanted)} is outside what the engine allows ({ranges})"
            )
        if nbytes > room:
            raise SpecError(f"bind: input {name!r} needs {nbytes} bytes, its buffer has {room}")
        return Bound(address=address, nbytes=room, shape=wanted)


def _close_all(stack: contextlib.ExitStack, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the device is still the parent's
        stack.close()
