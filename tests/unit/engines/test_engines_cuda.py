"""The CUDA layer on the stand-in driver (tests/simdevice): our reading of the API, no GPU is involved."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from simdevice.simcuda import build_library, missing_symbols

from edgeds.engines import cuda as cuda_layer
from edgeds.engines.cuda import RESERVE_BYTES, Cuda, cuda_reason, open_cuda
from edgeds.engines.cuda_driver import CudaCallError
from edgeds.engines.cuda_memory import MIB, allocate_chunks
from edgeds.errors import CudaError, DeviceError, InputError, OutOfMemory, SpecError

TESTS = Path(__file__).parents[2]


@pytest.fixture
def cuda(simcuda):
    with open_cuda(driver="ctypes", library=str(simcuda.path)) as opened:
        yield opened


def test_device_facts(simcuda):
    simcuda.set(integrated=0, sm=86)
    with open_cuda(driver="ctypes", library=str(simcuda.path)) as cuda:
        assert cuda.capability == (8, 6)
        assert not cuda.is_integrated
        assert "simulated" in cuda.name
        assert "discrete" in repr(cuda)
        assert cuda.driver.driver_version() == 12060
    cuda.close()
    with pytest.raises(DeviceError, match="closed"):
        cuda.device_buffer(1)


def test_buffers_hold_what_was_written(cuda, simcuda):
    data = np.random.default_rng(0).random((3, 5)).astype(np.float32)
    buffer = cuda.device_buffer(data.nbytes)
    buffer.write(data)
    np.testing.assert_array_equal(buffer.read((3, 5), dtype=np.float32), data)
    with pytest.raises(InputError, match="60 bytes"):
        buffer.write(np.zeros(100))
    with pytest.raises(InputError, match="60 bytes"):
        buffer.read((16,), dtype=np.float32)
    assert simcuda.count("device") == 1
    buffer.close()
    buffer.close()
    assert simcuda.count("device") == 0
    assert cuda.open_count == 0


def test_mapped_memory_is_one_memory_with_two_addresses(cuda, simcuda):
    mapped = cuda.host_buffer(64, mapped=True)
    pinned = cuda.host_buffer(64)
    mapped.array[:] = 7
    assert mapped.device_address != mapped.address
    assert simcuda.resolve(mapped.device_address) == (mapped.address, 64)
    assert pinned.device_address == 0
    mapped.close()
    pinned.close()


def test_nothing_runs_before_it_is_waited_for(cuda):
    """The stand-in is as late as a GPU may be: data is there after the wait and not before."""
    stream, host, device = cuda.stream(), cuda.host_buffer(16), cuda.device_buffer(16)
    device.write(np.full(16, 3, np.uint8))
    host.array[:] = 1
    with cuda.current():
        cuda.driver.copy_out(host.address, device.address, 16, stream.handle)
    assert host.array.tolist() == [1] * 16
    with cuda.current():
        cuda.driver.sync_stream(stream.handle)
    assert host.array.tolist() == [3] * 16


def test_an_event_orders_two_streams_and_measures_time(cuda):
    first, second = cuda.stream(), cuda.stream()
    event, begin, end = cuda.event(), cuda.event(timing=True), cuda.event(timing=True)
    source, target, device = cuda.host_buffer(8), cuda.host_buffer(8), cuda.device_buffer(8)
    source.array[:] = 9
    driver = cuda.driver
    with cuda.current():
        driver.record_event(begin.handle, first.handle)
        driver.copy_in(device.address, source.address, 8, first.handle)
        driver.record_event(event.handle, first.handle)
        driver.wait_event(second.handle, event.handle)
        driver.copy_out(target.address, device.address, 8, second.handle)
        driver.record_event(end.handle, second.handle)
        driver.sync_event(end.handle)
        assert driver.elapsed_ms(begin.handle, end.handle) >= 0
    assert target.array.tolist() == [9] * 8


def test_a_graph_repeats_what_was_recorded(cuda, simcuda):
    stream, host, device = cuda.stream(), cuda.host_buffer(4), cuda.device_buffer(4)
    device.write(np.full(4, 5, np.uint8))
    host.array[:] = 0
    graph = cuda.graph(stream.handle, lambda: cuda.driver.copy_out(host.address, device.address, 4, stream.handle))
    with cuda.current():
        cuda.driver.sync_stream(stream.handle)
    assert host.array.tolist() == [0] * 4
    for value in (5, 6):
        device.write(np.full(4, value, np.uint8))
        with cuda.current():
            cuda.driver.launch_graph(graph.handle, stream.handle)
            cuda.driver.sync_stream(stream.handle)
        assert host.array.tolist() == [value] * 4
    assert simcuda.count("graphs") == 0
    assert simcuda.count("execs") == 1


def test_a_failed_capture_leaves_the_stream_usable(cuda, simcuda):
    stream, host, device = cuda.stream(), cuda.host_buffer(4), cuda.device_buffer(4)
    device.write(np.arange(4, dtype=np.uint8))

    def allocate() -> None:
        cuda.device_buffer(16)

    def give_up() -> None:
        raise KeyboardInterrupt

    with pytest.raises(CudaError, match="STREAM_CAPTURE_UNSUPPORTED"):
        cuda.graph(stream.handle, allocate)
    with pytest.raises(KeyboardInterrupt):
        cuda.graph(stream.handle, give_up)
    simcuda.fail("cuGraphInstantiateWithFlags")
    with pytest.raises(CudaError, match="cuGraphInstantiate failed"):
        cuda.graph(stream.handle, lambda: None)
    with cuda.current():
        cuda.driver.copy_out(host.address, device.address, 4, stream.handle)
        cuda.driver.sync_stream(stream.handle)
    assert host.array.tolist() == [0, 1, 2, 3]
    assert (simcuda.count("graphs"), simcuda.count("execs")) == (0, 0)


def test_b71_any_thread_may_call_and_the_context_is_popped_again(cuda, simcuda):
    """B71: opened in one thread, used in others; also an exception pops the context."""
    results: list[object] = []

    def work() -> None:
        buffer = cuda.device_buffer(4)
        buffer.write(np.arange(4, dtype=np.uint8))
        results.append(buffer.read((4,), dtype=np.uint8).tolist())
        buffer.close()
        try:
            with cuda.current():
                raise ValueError("in the block")
        except ValueError:
            results.append(simcuda.count("depth"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count([0, 1, 2, 3]) == 4
    assert results.count(0) == 4
    assert simcuda.count("depth") == 0


def test_a_call_without_a_context_is_told_plainly(cuda):
    with pytest.raises(CudaCallError, match=r"cuMemAlloc.*INVALID_CONTEXT \(201\).*no CUDA context") as caught:
        cuda.driver.alloc(16)
    assert caught.value.code == 201
    assert not caught.value.is_sticky


def test_errors_name_call_code_and_remedy(cuda, simcuda):
    simcuda.fail("cuStreamCreate", code=999)
    with pytest.raises(
        CudaCallError, match=r"cuStreamCreate failed with CUDA_ERROR_UNKNOWN \(999\).*restart"
    ) as caught:
        cuda.stream()
    assert caught.value.is_sticky
    simcuda.fail("cuMemHostGetDevicePointer_v2", code=801)
    with pytest.raises(CudaCallError, match="does not support"):
        cuda.host_buffer(16, mapped=True)
    assert simcuda.count("host") == 0


def test_out_of_memory_states_needed_and_free(cuda, simcuda, tmp_path):
    simcuda.set(mem_mb=64)
    with pytest.raises(OutOfMemory, match=r"device memory: 100 MiB needed, \d+ of \d+ MiB free"):
        cuda.device_buffer(100 * MIB)
    with pytest.raises(OutOfMemory, match="page-locked host memory"):
        cuda.host_buffer(100 * MIB)


def test_b106_large_allocations_are_refused_though_memory_is_free(cuda, simcuda):
    """B106: one call above 1 GB fails; weights in chunks work, and the message names fragmentation."""
    simcuda.set(limit_mb=1024, integrated=0, mem_mb=8192)
    with open_cuda(driver="ctypes", library=str(simcuda.path)) as discrete:
        with pytest.raises(OutOfMemory, match=r"1536 MiB needed.*fragmented.*L4T 36\.4\.7"):
            discrete.device_buffer(1536 * MIB)
        chunks = allocate_chunks(discrete, 1536 * MIB, chunk_bytes=4096 * MIB)
        assert chunks.nbytes == 1536 * MIB
        assert chunks.chunk_bytes <= 1024 * MIB
        chunks.close()
        simcuda.set(limit_mb=0, mem_mb=100)
        with pytest.raises(OutOfMemory, match=r"of 300 MiB could be allocated in pieces"):
            allocate_chunks(discrete, 300 * MIB, chunk_bytes=64 * MIB)
        assert simcuda.count("device") == 0
        with pytest.raises(SpecError):
            allocate_chunks(discrete, 0)


def test_b105_free_memory_is_the_systems_on_a_jetson_and_the_cards_elsewhere(simcuda, tmp_path):
    """B105: shared memory counts caches the kernel would give up, minus a reserve; a card has its own figure."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8000000 kB\nMemFree:  900000 kB\nMemAvailable:  3000000 kB\nCached: 2000000 kB\n")
    with open_cuda(driver="ctypes", library=str(simcuda.path)) as orin:
        memory = orin.memory(meminfo=meminfo)
        assert memory.is_shared
        assert memory.free_bytes == 3000000 * 1024 - RESERVE_BYTES
        assert orin.memory(meminfo=tmp_path / "absent").free_mib == 8192
    simcuda.set(integrated=0, mem_mb=16384)
    with open_cuda(driver="ctypes", library=str(simcuda.path)) as desktop:
        memory = desktop.memory(meminfo=meminfo)
        assert not memory.is_shared
        assert memory.free_mib == 16384


def test_close_frees_what_was_forgotten(simcuda):
    cuda = open_cuda(driver="ctypes", library=str(simcuda.path))
    buffer = cuda.device_buffer(16)
    cuda.stream(), cuda.event(), cuda.host_buffer(16)
    assert cuda.open_count == 4
    cuda.close()
    buffer.close()
    assert simcuda.count("contexts") == 0


def test_missing_driver_device_and_binding_are_named(simcuda, tmp_path, monkeypatch):
    with pytest.raises(DeviceError, match=r"absent\.so.*install the NVIDIA driver"):
        open_cuda(driver="ctypes", library=str(tmp_path / "absent.so"))
    with pytest.raises(SpecError, match="'opencl'"):
        open_cuda(driver="opencl")
    with pytest.raises(DeviceError, match="device 3: this machine has 1"):
        open_cuda(3, driver="ctypes", library=str(simcuda.path))
    simcuda.set(devices=0)
    with pytest.raises(DeviceError, match=r"NO_DEVICE.*no NVIDIA GPU"):
        open_cuda(driver="ctypes", library=str(simcuda.path))
    if importlib.util.find_spec("pycuda") is None:
        with pytest.raises(DeviceError, match="pycuda"):
            open_cuda(driver="pycuda")
    monkeypatch.setattr(cuda_layer, "_load_driver", lambda kind, library: (_ for _ in ()).throw(DeviceError("no luck")))
    assert cuda_reason() == "no luck"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_told_instead_of_crashing(cuda):
    child = os.fork()
    if child == 0:
        try:
            cuda.device_buffer(1)
        except DeviceError as error:
            os._exit(0 if "spawn" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


FLOW = """
import sys, numpy as np
sys.path[:0] = sys.argv[3:]
from edgeds.engines.cuda import open_cuda
from edgeds.errors import OutOfMemory
from simdevice.simcuda import SimCuda
name, library = sys.argv[1:3]
sim = SimCuda(library)
with open_cuda(driver=name) as cuda:
    assert cuda.driver.name == name and cuda.capability == (8, 7) and cuda.is_integrated
    stream, event, begin = cuda.stream(), cuda.event(), cuda.event(timing=True)
    data = np.arange(1000, dtype=np.float32)
    device, host, mapped = cuda.device_buffer(4000), cuda.host_buffer(4000), cuda.host_buffer(64, mapped=True)
    assert sim.resolve(mapped.device_address) == (mapped.address, 64)
    device.write(data)
    d = cuda.driver
    with cuda.current():
        d.record_event(begin.handle, stream.handle)
        d.record_event(event.handle, stream.handle)
        d.wait_event(stream.handle, event.handle)
        d.sync_event(event.handle)
    copy = lambda: d.copy_out(host.address, device.address, 4000, stream.handle)
    graph = cuda.graph(stream.handle, copy)
    host.array[:] = 0
    with cuda.current():
        d.launch_graph(graph.handle, stream.handle)
        d.sync_stream(stream.handle)
    assert (host.array.view(np.float32) == data).all()
    with cuda.current():
        assert d.memory_info()[1] == 8192 << 20 and d.driver_version() == 12060
    assert cuda.memory().total_bytes > 0
    try:
        cuda.device_buffer(1 << 40)
    except OutOfMemory as error:
        assert "needed" in str(error)
    else:
        raise AssertionError("no error")
print({key: value for key, value in sim.live().items() if value})
"""


@pytest.mark.parametrize(("name", "module"), [("cuda-bindings", "cuda"), ("pycuda", "pycuda"), ("ctypes", "ctypes")])
def test_every_binding_runs_the_same_flow_and_leaks_nothing(simcuda_library, tmp_path, name, module):
    """In a process of its own, where the stand-in is the only libcuda.so.1."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{name} is not installed")
    library = simcuda_library.path
    if name == "pycuda":  # its extension module is linked against the whole driver
        (extension,) = Path(importlib.util.find_spec(module).origin).parent.glob("_driver*.so")
        library = build_library(tmp_path, also=missing_symbols(extension))
    # Preloaded too: an extension module may be linked against another file name of the driver.
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "LD_PRELOAD": str(library)}
    command = [sys.executable, "-c", FLOW, name, str(library), str(TESTS), str(TESTS.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{}", done.stderr


def test_auto_takes_a_binding_that_can_be_imported(simcuda, monkeypatch):
    tried: list[str] = []

    def load(kind, library):
        tried.append(kind)
        if kind != "ctypes":
            raise ImportError(kind)
        return real(kind, library)

    real = cuda_layer._load_driver
    monkeypatch.setattr(cuda_layer, "_load_driver", load)
    with open_cuda(library=str(simcuda.path)) as cuda:
        assert isinstance(cuda, Cuda)
        assert cuda.driver.name == "ctypes"
    assert tried == ["pycuda", "cuda-bindings", "ctypes"]
