"""The TensorRT engine on a machine with an NVIDIA GPU and TensorRT: run with ``pytest tests/device -m gpu``.

Takes less than three minutes with test_device_prove.py. Never run on a GPU where this was written; there it runs on
the simulated device (tests/unit/engines/test_engines_sim.py), which proves the script, not the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edgeds.bundle import open_bundle
from edgeds.doctor_proof import write_proof_bundle
from edgeds.engines.cuda import Cuda, open_cuda
from edgeds.engines.golden_check import golden_feeds
from edgeds.engines.install import find_host, install_engine
from edgeds.engines.tensorrt import RunOptions, TensorRTEngine
from edgeds.errors import InputError

pytestmark = pytest.mark.gpu

ERROR_SHARE = 0.02
"""Of the output's range: INT8 kernels may round differently, and differently for each batch size."""


@pytest.fixture(scope="module")
def cuda() -> Iterator[Cuda]:
    with open_cuda() as opened:
        yield opened


@pytest.fixture(scope="module")
def plan(cuda: Cuda, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device")
    with open_bundle(write_proof_bundle(folder / "bundle")) as bundle:
        host = find_host(cuda=cuda, quiet=True)
        found = install_engine(bundle, host=host, keep_in=folder / "engines", measure_seconds=0.0, quiet=True)
    return found.plan


@pytest.fixture(scope="module")
def feeds(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """Golden inputs and others of the same shapes with one to four rows."""
    with open_bundle(write_proof_bundle(tmp_path_factory.mktemp("feeds") / "bundle")) as bundle:
        golden = [next(iter(feed.values())) for _, feed in golden_feeds(bundle.golden())]
    return [np.repeat(array[:1], rows, axis=0) * (0.5 + 0.1 * rows) for array in golden for rows in (1, 2, 3, 4)]


def check_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name, array in want.items():
        span = float(np.ptp(array)) or 1.0
        assert np.max(np.abs(got[name].astype(np.float64) - array)) <= ERROR_SHARE * span


@pytest.fixture(scope="module")
def wanted(plan: Path, cuda: Cuda, feeds: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Answers of the plainest way: one lane, copies, no graphs. Their truth is the golden check's business."""
    with TensorRTEngine(plan, cuda=cuda, options=RunOptions(lanes=1, graphs=False, zero_copy=False)) as engine:
        return [engine.infer({"x": x}) for x in feeds]


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_eight_threads_over_changing_shapes(
    plan: Path, cuda: Cuda, feeds: list[np.ndarray], wanted: list[dict[str, np.ndarray]], zero_copy: bool, graphs: bool
) -> None:
    before = cuda.open_count
    with TensorRTEngine(plan, cuda=cuda, options=RunOptions(graphs=graphs, zero_copy=zero_copy)) as engine:

        def work(start: int) -> None:
            for turn in range(60):
                index = (start * 5 + turn // 4) % len(feeds)
                check_close(engine.infer({"x": feeds[index]}), wanted[index])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        stats = engine.stats()
        assert stats.calls == 480
        assert (stats.graph_runs > 0) == graphs, stats.graph_problem
    assert cuda.open_count == before


def test_opening_and_closing_gives_all_memory_back(plan: Path, cuda: Cuda, feeds: list[np.ndarray]) -> None:
    free = []
    for _ in range(6):
        with TensorRTEngine(plan, cuda=cuda) as engine:
            for x in feeds * 3:
                engine.infer({"x": x})
        with cuda.current():
            free.append(cuda.driver.memory_info()[0])
    # The first rounds may load kernels; what grows with every round is a leak.
    assert free[-1] >= free[2] - (16 << 20), free


def test_a_bound_output_stays_on_the_device(
    plan: Path, cuda: Cuda, feeds: list[np.ndarray], wanted: list[dict[str, np.ndarray]]
) -> None:
    with TensorRTEngine(plan, cuda=cuda) as engine:
        (name, array), *_ = wanted[0].items()
        buffer = cuda.device_buffer(array.nbytes)
        engine.bind(name, buffer)
        assert name not in engine.infer({"x": feeds[0]})
        check_close({name: buffer.read(array.shape, dtype=array.dtype)}, {name: array})
        engine.bind(name, None)
        check_close(engine.infer({"x": feeds[0]}), wanted[0])
        buffer.close()


def test_layers_are_timed(plan: Path, cuda: Cuda, feeds: list[np.ndarray]) -> None:
    with TensorRTEngine(plan, cuda=cuda) as engine:
        layers = engine.profile_layers({"x": feeds[0]}, runs=5)
        assert layers
        assert all(layer.mean_ms >= 0 for layer in layers)


def test_a_shape_beyond_the_profiles_is_refused(plan: Path, cuda: Cuda, feeds: list[np.ndarray]) -> None:
    with TensorRTEngine(plan, cuda=cuda) as engine:
        rows = (engine.max_batch or 1) + 1
        with pytest.raises(InputError, match="outside what the engine was built for"):
            engine.infer({"x": np.repeat(feeds[0], rows, axis=0)})
        engine.infer({"x": feeds[0]})
