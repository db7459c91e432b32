"""One lane of a TensorRT engine: its own buffers, execution contexts and graphs, for one request at a time.

Two lanes let the CPU copy one request's data, and on discrete GPUs the copy engines move it, while the GPU computes
the other's. Inference itself runs on the one compute stream of all lanes.

A CUDA graph is captured when a shape comes a second time. Each graph has an execution context of its own: NVIDIA's
guide states that changing a context makes the graphs captured from it undefined.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from edgeds.engines.base import Array
from edgeds.engines.trt_buffers import IoBuffer
from edgeds.engines.trt_context import LiveContext, Machine, make_allocator
from edgeds.engines.trt_io import Profile, Shape
from edgeds.engines.trt_layers import LayerClock
from edgeds.engines.trt_plan import LaneRules, Ready, ShapePlan, drop_graph
from edgeds.errors import DeviceError, InputError

LOGGER = logging.getLogger("edgeds.tensorrt")

MAX_PREPARED = 64
MAX_GRAPHS = 16
CAPTURE_AT_USE = 2
CAPTURE_RETRY_USES = 50


class Lane:
    """Call ``run`` from one thread at a time. ``gpu_lock`` orders the lanes' work on the compute stream."""

    def __init__(self, machine: Machine, rules: LaneRules, *, gpu_lock: threading.Lock) -> None:
        self._machine = machine
        self._rules = rules
        self._lock = gpu_lock
        cuda = machine.cuda
        self._copy = cuda.stream()
        self._loaded, self._computed, self._done = cuda.event(), cuda.event(), cuda.event()
        self._buffers = {
            info.name: IoBuffer(
                cuda, name=info.name, kind="host" if info.on_host else "mapped" if rules.zero_copy else "staged"
            )
            for info in machine.tensors.values()
        }
        self._contexts: dict[int, LiveContext] = {}
        self._wired: dict[int, Ready | None] = {}
        self._ready: OrderedDict[tuple[object, ...], Ready] = OrderedDict()
        self._found: dict[str, Shape] = {}
        self._allocator: Any = None

    def context(self, profile: int) -> LiveContext:
        """This lane's context for one profile. The GPU lock and a CUDA context must be held."""
        if profile not in self._contexts:
            self._contexts[profile] = LiveContext(self._machine, profile)
        self._wired[profile] = None  # the caller may change it
        return self._contexts[profile]

    def plan(self, key: tuple[object, ...], profile: Profile, feeds: Mapping[str, Array]) -> ShapePlan:
        """Ask TensorRT for the outputs' shapes. Raises InputError for shapes the model cannot process."""
        machine = self._machine
        shapes = {name: tuple(array.shape) for name, array in feeds.items()}
        shapes |= {name: bound.shape for name, bound in self._rules.bound.items() if bound.shape is not None}
        with self._lock, machine.cuda.current():
            hosts = self._write_host_inputs(feeds)
            outputs = self.context(profile.index).set_shapes(shapes, host_addresses=hosts)
        for name, shape in outputs.items():
            bound = self._rules.bound.get(name)
            if bound is not None and -1 in shape:
                raise InputError(
                    f"output {name!r}: its shape depends on the data, so no buffer can be bound to it; unbind it"
                )
            need = machine.nbytes(name, shape)
            if bound is not None and need > bound.nbytes:
                raise InputError(
                    f"output {name!r} needs {need} bytes for these inputs, the buffer bound to it has {bound.nbytes}; "
                    "bind a larger one"
                )
        return ShapePlan(key=key, profile=profile, shapes=shapes, outputs=outputs)

    def run(self, plan: ShapePlan, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Copy in, infer, copy out; the returned arrays belong to the caller."""
        machine = self._machine
        cuda = machine.cuda
        ready = self._ready.get(plan.key) or self._prepare(plan)
        self._ready.move_to_end(plan.key)
        for name, view in ready.inputs:
            view[...] = feeds[name]
        with self._lock, cuda.current():
            self._enqueue(ready)
        with cuda.current():
            cuda.driver.sync_event(self._done.handle)
            if plan.is_data_dependent:
                return self._collect_found(plan)
        return {name: view.copy() for name, view in ready.outputs}

    @contextlib.contextmanager
    def timed(self, profile: int, clock: LayerClock) -> Iterator[None]:
        """Let runs of one profile report their layers to ``clock``, without graphs. Nothing may be running."""
        held = self._rules.graph_problem
        self.forget()
        with self._lock, self._machine.cuda.current():
            profiler = self.context(profile).set_profiler(lambda raw: clock.attach(self._machine.trt, raw))
        self._rules.graph_problem = held or "layers are being timed"
        try:
            yield
        finally:
            self._rules.graph_problem = held
            self.forget()
            with self._machine.cuda.current():
                self._contexts.pop(profile).close()  # a context with a profiler waits after each run
                self._wired.pop(profile, None)
            del profiler

    def settle(self) -> None:
        """Wait for whatever is still running after a failure, so that the buffers can be used again."""
        cuda = self._machine.cuda
        try:
            with cuda.current():
                cuda.driver.sync_stream(self._copy.handle)
                cuda.driver.sync_stream(self._machine.compute)
        except DeviceError as error:
            LOGGER.warning("%s: after a failure: %s", self._machine.where, error)
        self._wired = dict.fromkeys(self._wired)

    def forget(self) -> None:
        """Drop everything that was wired to addresses: graphs, views, contexts' bindings. Nothing may be running."""
        with self._machine.cuda.current():  # TensorRT frees memory when a context goes
            for ready in self._ready.values():
                drop_graph(ready)
        self._ready.clear()
        self._wired = dict.fromkeys(self._wired)

    def close(self) -> None:
        """Free contexts, graphs and memory. Nothing may be running."""
        self.forget()
        with self._machine.cuda.current():
            for context in self._contexts.values():
                context.close()
            self._contexts.clear()
            self._allocator = None
        for buffer in self._buffers.values():
            buffer.close()
        for resource in (self._done, self._computed, self._loaded, self._copy):
            resource.close()

    @property
    def graph_count(self) -> int:
        return sum(ready.graph is not None for ready in self._ready.values())

    def reserve(self) -> None:
        """Allocate every buffer at the size of the largest profile."""
        for name, buffer in self._buffers.items():
            if name not in self._rules.bound:
                buffer.ensure(0, want=self._rules.largest.get(name, 0))

    def _prepare(self, plan: ShapePlan) -> Ready:
        """Size the buffers for a plan and make its views and copy lists."""
        machine, bound = self._machine, self._rules.bound
        sizes = {name: machine.nbytes(name, shape) for name, shape in (plan.shapes | plan.outputs).items()}
        own = [
            (self._buffers[name], nbytes, self._rules.largest.get(name, 0))
            for name, nbytes in sizes.items()
            if name not in bound
        ]
        if not all(buffer.holds(nbytes) for buffer, nbytes, _ in own):
            self.forget()  # first: views of memory that moves, or is lost in the attempt, must not stay
            for buffer, nbytes, want in own:
                buffer.ensure(nbytes, want=want)
        ready = Ready(plan=plan, addresses={}, host_addresses={}, inputs=[], outputs=[], copies_in=[], copies_out=[])
        for name, shape in (plan.shapes | plan.outputs).items():
            info, buffer = machine.tensors[name], self._buffers[name]
            if name in bound:
                ready.addresses[name] = bound[name].address
                continue
            ready.addresses[name] = buffer.address
            if info.on_host and info.is_input:
                ready.host_addresses[name] = buffer.address
            if -1 in shape:
                continue
            views, copies = (ready.inputs, ready.copies_in) if info.is_input else (ready.outputs, ready.copies_out)
            views.append((name, buffer.view(shape, dtype=info.dtype)))
            if buffer.kind == "staged" and sizes[name]:
                copies.append((buffer.address, buffer.host_address, sizes[name]))
        self._ready[plan.key] = ready
        if len(self._ready) > MAX_PREPARED:
            _, oldest = self._ready.popitem(last=False)
            with machine.cuda.current():
                drop_graph(oldest)
        return ready

    def _enqueue(self, ready: Ready) -> None:
        self._rules.calls += 1
        driver, compute, copy = self._machine.cuda.driver, self._machine.compute, self._copy.handle
        if ready.copies_in:
            for device, host, nbytes in ready.copies_in:
                driver.copy_in(device, host, nbytes, copy)
            driver.record_event(self._loaded.handle, copy)
            driver.wait_event(compute, self._loaded.handle)
        self._launch(ready)
        if ready.copies_out:
            driver.record_event(self._computed.handle, compute)
            driver.wait_event(copy, self._computed.handle)
            for device, host, nbytes in ready.copies_out:
                driver.copy_out(host, device, nbytes, copy)
            driver.record_event(self._done.handle, copy)
        else:
            driver.record_event(self._done.handle, compute)

    def _launch(self, ready: Ready) -> None:
        machine = self._machine
        if ready.graph is not None:
            machine.cuda.driver.launch_graph(ready.graph.handle, machine.compute)
            self._rules.graph_runs += 1
            return
        ready.uses += 1
        index = ready.plan.profile.index
        if ready.uses >= CAPTURE_AT_USE and self._may_capture(ready, index):
            self._capture(ready)
            return
        if self._wired.get(index) is not ready:
            self._wire(self.context(index), ready)
            self._wired[index] = ready
        try:
            self._contexts[index].execute()
        except DeviceError:
            self._wired[index] = None
            self._raise_allocator_error()
            raise
        self._raise_allocator_error()

    def _wire(self, context: LiveContext, ready: Ready) -> None:
        context.set_shapes(ready.plan.shapes, host_addresses=ready.host_addresses)
        fixed = {n: a for n, a in ready.addresses.items() if -1 not in ready.plan.outputs.get(n, ())}
        context.set_addresses(fixed)
        if ready.plan.is_data_dependent:
            if self._allocator is None:
                self._allocator = make_allocator(self._machine.trt, grow=self._grow, shapes=self._found)
            for name, shape in ready.plan.outputs.items():
                if -1 in shape:
                    context.set_allocator(name, self._allocator)

    def _may_capture(self, ready: Ready, profile: int) -> bool:
        if self._rules.graph_problem is not None or ready.plan.is_data_dependent:
            return False
        if profile not in self._contexts or self._contexts[profile].is_capturable():
            return True
        # TensorRT-RTX compiles kernels for a shape while the first calls run; later it may say yes.
        self._rules.graph_note = "TensorRT says that this engine cannot be captured"
        ready.uses = CAPTURE_AT_USE - CAPTURE_RETRY_USES
        return False

    def _capture(self, ready: Ready) -> None:
        """Run once in a context of its own, then record the same run as a graph for the next calls."""
        machine = self._machine
        context = LiveContext(machine, ready.plan.profile.index)
        ready.context = context  # kept even if capturing fails: this call's work runs in it
        self._wire(context, ready)
        context.execute()  # also does what TensorRT puts off until the first run with new shapes
        try:
            ready.graph = machine.cuda.graph(machine.compute, context.execute)
        except DeviceError as error:
            self._rules.graph_problem = f"CUDA graphs are off: {error}"
            LOGGER.warning("%s: %s", machine.where, self._rules.graph_problem)
            return
        if self.graph_count > MAX_GRAPHS:
            # Earlier work of this lane is done, since a lane runs one request at a time.
            drop_graph(next(other for other in self._ready.values() if other.graph and other is not ready))

    def _grow(self, name: str, nbytes: int) -> int:
        self._buffers[name].ensure(nbytes)
        return self._buffers[name].address

    def _raise_allocator_error(self) -> None:
        if self._allocator is not None and self._allocator.error is not None:
            error, self._allocator.error = self._allocator.error, None
            raise error from None

    def _collect_found(self, plan: ShapePlan) -> dict[str, Array]:
        """Outputs of a run whose shapes were known only afterwards; they are copied out now."""
        machine, results = self._machine, {}
        for name, planned in plan.outputs.items():
            if name in self._rules.bound:
                continue
            shape, buffer = self._found.get(name, planned), self._buffers[name]
            if -1 in shape:
                raise DeviceError(f"{machine.where}: TensorRT did not tell the shape of output {name!r}")
            nbytes = machine.nbytes(name, shape)
            if buffer.kind == "staged" and nbytes and -1 in planned:
                driver = machine.cuda.driver
                driver.copy_out(buffer.host_address, buffer.address, nbytes, self._copy.handle)
                driver.sync_stream(self._copy.handle)
            results[name] = buffer.view(shape, dtype=machine.tensors[name].dtype).copy()
        return results

    def _write_host_inputs(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        addresses = {}
        for name, array in feeds.items():
            if self._machine.tensors[name].on_host:
                if not self._buffers[name].holds(array.nbytes):
                    self.forget()
                    self._buffers[name].ensure(array.nbytes, want=self._rules.largest.get(name, 0))
                self._buffers[name].view(array.shape, dtype=array.dtype)[...] = array
                addresses[name] = self._buffers[name].address
        return addresses
