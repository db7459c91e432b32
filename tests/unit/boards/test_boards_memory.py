"""B105: shared memory and a GPU's own memory are told apart by what the machine is, not by size."""

from pathlib import Path

import pytest
from jetson_tree import write

from edgeds.boards.memory import read_memory

MEMINFO = "MemTotal:  8000000 kB\nMemFree:  1048576 kB\nMemAvailable:  3145728 kB\nCached:  2097152 kB\n"


def test_orin_gives_available_less_the_reserve_b105(tmp_path: Path) -> None:
    """3 GB available with 2 GB of cache in it: caches count, and the system keeps its part."""
    write(tmp_path, "proc/meminfo", MEMINFO)
    reading = read_memory("jetson", root=tmp_path, reserve_mib=512)
    assert (reading.kind, reading.free_mib) == ("shared", 3072 - 512)
    assert read_memory("jetson", root=tmp_path, reserve_mib=99_999).free_mib == 0


def test_a_discrete_gpu_gives_its_own_number_b105(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", MEMINFO)
    reading = read_memory("nvidia", root=tmp_path, run=lambda command, timeout_s: (0, "12288, 16384\n\n"))
    assert (reading.kind, reading.free_mib, reading.total_mib) == ("device", 12288, 16384)


@pytest.mark.parametrize("answer", [(127, ""), (0, "[N/A], [N/A]"), (6, "No devices were found")])
def test_a_gpu_that_does_not_tell_is_unknown_and_not_the_host_b105(tmp_path: Path, answer: tuple[int, str]) -> None:
    write(tmp_path, "proc/meminfo", MEMINFO)
    reading = read_memory("nvidia", root=tmp_path, run=lambda command, timeout_s: answer)
    assert (reading.free_mib, reading.kind) == (None, "device")
    assert read_memory("nvidia", root=tmp_path).free_mib is None


def test_without_a_gpu_it_is_the_hosts(tmp_path: Path) -> None:
    assert read_memory("cpu", root=tmp_path).free_mib is None
    write(tmp_path, "proc/meminfo", MEMINFO)
    assert read_memory("cpu", root=tmp_path).free_mib == 3072
    write(tmp_path, "proc/meminfo", "\x00garbage")
    assert "no MemAvailable" in read_memory("cpu", root=tmp_path).source
