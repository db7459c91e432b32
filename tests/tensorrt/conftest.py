"""Real TensorRT-RTX on the CPU: it builds engines without a GPU, and refuses what TensorRT refuses, in its words."""

from types import ModuleType

import pytest

from edgeds.engines.trt_module import load_tensorrt
from edgeds.errors import DeviceError, MissingDependency


@pytest.fixture(scope="session")
def rtx() -> ModuleType:
    """The installed TensorRT-RTX, or a skip that says how to get it."""
    try:
        return load_tensorrt("rtx")
    except (MissingDependency, DeviceError) as error:
        pytest.skip(f"no TensorRT-RTX here: {error}")
