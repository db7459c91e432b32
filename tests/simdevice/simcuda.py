"""Build and steer the stand-in CUDA driver (simcuda.c): our reading of the driver API, never a GPU run."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("simcuda.c")
LIVE = ("device", "host", "streams", "events", "graphs", "execs", "contexts", "depth", "pending")


def find_compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def build_library(folder: Path, *, also: Sequence[str] = ()) -> Path:
    """Compile the stand-in as ``libcuda.so.1`` in ``folder`` (for LD_LIBRARY_PATH); it carries no SONAME.

    Without one, loading it by path in this process cannot shadow a real driver. ``also`` names driver functions that
    must exist for a library to load and that answer CUDA_ERROR_NOT_SUPPORTED.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C compiler")
    target = folder / "libcuda.so.1"
    extra = folder / "extra.c"
    extra.write_text("\n".join(f"int {name}(void) {{ return 801; }}" for name in also), encoding="ascii")
    command = [compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", str(target), str(SOURCE), str(extra)]
    subprocess.run([*command, "-lpthread", "-ldl"], check=True, capture_output=True, timeout=120)
    return target


def missing_symbols(library: Path) -> list[str]:
    """Driver functions that a compiled library wants and the stand-in does not have."""
    listing = subprocess.run(["nm", "-D", "--undefined-only", str(library)], check=True, capture_output=True, text=True)
    wanted = {line.split()[-1] for line in listing.stdout.splitlines() if line.split()[-1].startswith("cu")}
    return sorted(name for name in wanted if f" {name}(" not in SOURCE.read_text(encoding="utf-8"))


def simulated_environment(library: Path) -> dict[str, str]:
    """Environment variables for a process that sees the simulated device: its libcuda and its ``tensorrt``."""
    tests = Path(__file__).parents[1]
    paths = [str(tests / "simdevice" / "packages"), str(tests), str(tests.parent)]
    return {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": os.pathsep.join(paths)}


class SimCuda:
    """Counters, settings and failures of a loaded stand-in."""

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.sim_count.argtypes, self.library.sim_count.restype = (ctypes.c_char_p,), ctypes.c_long
        self.library.sim_set.argtypes = (ctypes.c_char_p, ctypes.c_long)
        self.library.sim_fail.argtypes, self.library.sim_fail.restype = (
            (ctypes.c_char_p, ctypes.c_long, ctypes.c_int),
            None,
        )
        self.library.sim_resolve.argtypes = (ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p))
        self.library.sim_resolve.restype = ctypes.c_size_t

    def count(self, what: str) -> int:
        value = self.library.sim_count(what.encode())
        assert value >= 0, f"unknown counter {what}"
        return value

    def live(self) -> dict[str, int]:
        """Everything that exists now; equal before and after when nothing leaked."""
        return {name: self.count(name) for name in LIVE}

    def set(self, **values: int) -> None:
        for name, value in values.items():
            assert self.library.sim_set(name.encode(), value) == 0, f"unknown setting {name}"

    def reset(self) -> None:
        self.set(integrated=1, sm=87, mem_mb=8192, devices=1, limit_mb=0, poison=0)
        self.fail("", 0, 0)

    def fail(self, call: str, nth: int = 1, code: int = 999) -> None:
        """Let the nth coming call of an exported function fail with ``code``."""
        self.library.sim_fail(call.encode(), nth, code)

    def resolve(self, address: int) -> tuple[int, int]:
        """Where a device address really is and how many bytes are usable from there; (0, 0) for any other address."""
        host = ctypes.c_void_p()
        nbytes = self.library.sim_resolve(address, ctypes.byref(host))
        return (host.value or 0, nbytes) if nbytes else (0, 0)
