"""Fixtures of all tests. This file also puts ``tests/`` on the import path, for ``simdevice``."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

# On a machine with busy cores a test case of milliseconds takes half a second now and then.
hypothesis.settings.register_profile("edgeds", deadline=None)
hypothesis.settings.load_profile("edgeds")

if TYPE_CHECKING:
    from simdevice.simcuda import SimCuda


def pytest_configure() -> None:
    """Answer Ctrl-C even where the shell that started the tests in the background (``&``, ``nohup``) ignores it.

    An ignored signal stays ignored in every child, and the tests that interrupt one would wait for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def simcuda_library(tmp_path_factory: pytest.TempPathFactory) -> SimCuda:
    """The stand-in CUDA driver, compiled once. Skips where there is no C compiler."""
    from simdevice.simcuda import SimCuda, build_library, find_compiler

    if find_compiler() is None:
        pytest.skip("the simulated device needs a C compiler (gcc)")
    return SimCuda(build_library(tmp_path_factory.mktemp("simcuda")))


@pytest.fixture
def simcuda(simcuda_library: SimCuda) -> Iterator[SimCuda]:
    """The stand-in with default settings; fails the test that leaks anything of the driver."""
    simcuda_library.reset()
    before = simcuda_library.live()
    yield simcuda_library
    simcuda_library.reset()
    assert simcuda_library.live() == before, "the test leaked driver objects"
