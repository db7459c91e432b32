"""The null engine: deterministic, independent of batching, slow as told."""

from __future__ import annotations

import numpy as np
import pytest

from edgeds.engines.base import Engine
from edgeds.engines.null import NullEngine
from edgeds.errors import InputError, SessionClosed, SpecError
from edgeds.specs import TensorSpec

IMAGE = TensorSpec(name="images", dtype="float32", shape=("batch", 3, "h", "w"))
OUT = TensorSpec(name="out", dtype="float32", shape=("batch", 5, None))


def test_rows_do_not_depend_on_the_batch():
    engine = NullEngine([IMAGE], [OUT])
    x = np.random.default_rng(0).random((3, 3, 4, 6)).astype(np.float32)
    whole = engine.infer({"images": x})["out"]
    assert whole.shape == (3, 5, 1)
    for row in range(3):
        np.testing.assert_array_equal(engine.infer({"images": x[row : row + 1]})["out"][0], whole[row])
    assert isinstance(engine, Engine)


def test_latency_goes_through_the_given_sleep():
    slept: list[float] = []
    engine = NullEngine([IMAGE], [OUT], latency_ms=lambda shape: 2.0 * shape[0], sleep=slept.append)
    engine.infer({"images": np.zeros((3, 3, 4, 4), np.float32)})
    assert slept == [0.006]


def test_checks_and_closing():
    with pytest.raises(SpecError, match="latency_ms"):
        NullEngine([IMAGE], [OUT], latency_ms=-1.0)
    with pytest.raises(SpecError, match="at least one"):
        NullEngine([], [OUT])
    engine = NullEngine([IMAGE], [OUT])
    with pytest.raises(InputError, match="images"):
        engine.infer({"images": np.zeros((1, 3, 4, 4))})
    future = engine.infer_async({"images": np.ones((1, 3, 4, 4), np.float32)})
    engine.close()
    assert float(future.result(timeout=5)["out"][0, 0, 0]) == 1.0
    with pytest.raises(SessionClosed):
        engine.infer({"images": np.ones((1, 3, 4, 4), np.float32)})
