"""On a machine with an NVIDIA GPU and TensorRT: build, golden check, measurement and CUDA graph. Run with -m gpu.

The same as ``edgeds doctor --prove``; takes less than three minutes. Never run where this was written: no GPU.
"""

import pytest

from edgeds.doctor_prove import STEPS, prove


@pytest.mark.gpu
def test_this_machine_proves_itself() -> None:
    checks = prove(seconds=5.0)
    assert [check.name for check in checks] == list(STEPS)
    assert [check.message for check in checks if not check.ok] == []
