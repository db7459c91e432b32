"""The session on ONNX Runtime: mixed resolutions, outputs without a batch axis, overhead."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from edgeds.engines.onnxruntime import OnnxRuntimeEngine  # noqa: E402
from edgeds.errors import InputError  # noqa: E402
from edgeds.runtime import BatchPolicy, Session  # noqa: E402
from edgeds.specs import Resolution  # noqa: E402


def save_model(path, nodes, inputs, outputs, inits=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(inits))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path


def floats(name, dims):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)


@pytest.fixture(scope="module")
def anchors_path(tmp_path_factory):
    """Two strided heads joined over anchors, as in detectors: output (N, 6, H*W/256 + H*W/1024)."""
    rng = np.random.default_rng(5)
    inits = [numpy_helper.from_array(np.array([0, 6, -1], np.int64), "shape")]
    nodes = []
    for step in (16, 32):
        weight = rng.normal(0, 0.05, (6, 3, step, step)).astype(np.float32)
        inits.append(numpy_helper.from_array(weight, f"w{step}"))
        nodes.append(helper.make_node("Conv", ["images", f"w{step}"], [f"c{step}"], strides=[step, step]))
        nodes.append(helper.make_node("Reshape", [f"c{step}", "shape"], [f"r{step}"]))
    nodes.append(helper.make_node("Concat", ["r16", "r32"], ["output0"], axis=2))
    path = tmp_path_factory.mktemp("m") / "anchors.onnx"
    return save_model(path, nodes, [floats("images", ["N", 3, "H", "W"])], [floats("output0", ["N", 6, "A"])], inits)


def image(seed, height, width):
    return {"images": np.random.default_rng(seed).random((1, 3, height, width)).astype(np.float32)}


class RecordingEngine(OnnxRuntimeEngine):
    """Notes when each run starts, and of which image size."""

    def __init__(self, path, **options):
        super().__init__(path, **options)
        self.starts = []

    def infer_borrowed(self, feeds):  # every run goes through this
        self.starts.append((time.perf_counter(), feeds["images"].shape[2:]))
        return super().infer_borrowed(feeds)


def test_mixed_resolutions_from_four_threads(anchors_path):
    """B69, B91: two sizes and a rare one; batches form, every answer equals the single answer, order per shape."""
    engine = RecordingEngine(anchors_path, threads=1)
    sizes = [(320, 320), (384, 640)]
    feeds = {(size, seed): image(seed, *size) for size in sizes for seed in range(4)}
    single = {key: engine.infer(value)["output0"] for key, value in feeds.items()}
    rare_feed = image(9, 640, 640)
    rare_single = engine.infer(rare_feed)["output0"]
    order: dict[tuple[int, int], list[tuple[int, float]]] = {size: [] for size in sizes}
    wrong: list[object] = []
    rare, due_s = [], []
    engine.starts.clear()
    with Session(engine, policy=BatchPolicy(max_batch=8, max_delay_ms=20)) as session:

        def work(seed):
            futures = []
            for turn in range(20):
                size = sizes[turn % 2]
                futures.append((size, session.submit(feeds[size, seed])))
                if seed == 0 and turn == 10:
                    rare.append(session.submit(rare_feed))
                    due_s.append(time.perf_counter() + 0.020)
                time.sleep(0.002)
            done = [(size, future.result(20)) for size, future in futures]
            for size, answer in done:
                if not np.allclose(answer.outputs["output0"], single[size, seed], rtol=1e-4, atol=1e-5):
                    wrong.append((size, seed))
            if seed == 0:
                for size, answer in done:
                    order[size].append((len(order[size]), answer.total_ms))

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        answer = rare[0].result(20)
        stats = session.stats()
    assert wrong == []
    np.testing.assert_allclose(answer.outputs["output0"], rare_single, rtol=1e-4, atol=1e-5)
    assert answer.outputs["output0"].shape == (1, 6, 40 * 40 + 20 * 20)
    assert answer.batch_rows == 1
    assert stats.mean_batch_rows > 1
    assert stats.completed == 81
    # Once its delay is over, one run of each other shape may go first, and one more may be on its way. Counted in runs,
    # not in milliseconds, which on a busy machine are anybody's. Without turns it would wait for the whole backlog.
    begin_s = next(at for at, size in engine.starts if size == (640, 640))
    between = [size for at, size in engine.starts if due_s[0] < at < begin_s]
    assert len(between) <= 3
    engine.close()


def test_answers_arrive_in_order_per_shape(anchors_path):
    engine = OnnxRuntimeEngine(anchors_path, threads=1)
    finished: dict[int, list[int]] = {320: [], 352: []}
    with Session(engine, policy=BatchPolicy(max_batch=4, max_delay_ms=5)) as session:
        for index in range(40):
            side = (320, 352)[index % 2]
            future = session.submit(image(index, side, 320))
            future.add_done_callback(lambda _, side=side, index=index: finished[side].append(index))
    engine.close()
    assert finished == {320: list(range(0, 40, 2)), 352: list(range(1, 40, 2))}


def nms_model(path, *, classes_dim="K"):
    """Boxes (N, 4, 4), scores (N, 2, 4) -> NonMaxSuppression: (selected, 3) with the batch in column 0."""
    inits = [
        numpy_helper.from_array(np.array([10], np.int64), "most"),
        numpy_helper.from_array(np.array([0.5], np.float32), "iou"),
        numpy_helper.from_array(np.array([0.1], np.float32), "score"),
    ]
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "iou", "score"], ["picked"])
    info = helper.make_tensor_value_info("picked", TensorProto.INT64, [classes_dim, 3])
    return save_model(path, [node], [floats("boxes", ["N", 4, 4]), floats("scores", ["N", 2, 4])], [info], inits)


def boxes_of(seed, *, picks):
    rng = np.random.default_rng(seed)
    scores = np.zeros((1, 2, 4), np.float32)
    scores[0, rng.integers(0, 2), :picks] = 0.9
    corners = np.arange(4, dtype=np.float32)[:, None] * 10
    return {"boxes": np.concatenate([corners, corners, corners + 5, corners + 5], 1)[None], "scores": scores}


@pytest.mark.parametrize("picks", [1, 2, 3])
def test_outputs_that_are_not_per_row_run_alone(tmp_path, picks):
    """B79: NMS in the graph, batch > 1 and classes > 1. Its rows are not the batch's, even when the counts agree."""
    engine = OnnxRuntimeEngine(nms_model(tmp_path / "nms.onnx"), threads=1)
    feeds = [boxes_of(seed, picks=picks) for seed in range(3)]
    with Session(engine, policy=BatchPolicy(max_batch=8, max_delay_ms=30)) as session:
        futures = [session.submit(feed) for feed in feeds]
        answers = [future.result(10).outputs["picked"] for future in futures]
        for feed, answer in zip(feeds, answers, strict=True):
            np.testing.assert_array_equal(answer, engine.infer(feed)["picked"])
        # A request that is itself a batch passes whole; the batch index in column 0 is its own.
        joined = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
        np.testing.assert_array_equal(session.infer(joined).outputs["picked"], engine.infer(joined)["picked"])
        with pytest.raises(InputError, match="'picked' has no batch axis"):
            session.infer({name: np.repeat(value, 9, axis=0) for name, value in feeds[0].items()})
    engine.close()


def test_a_split_request_of_unprovable_rows_is_refused(tmp_path):
    engine = OnnxRuntimeEngine(nms_model(tmp_path / "nms.onnx"), threads=1)
    with Session(engine, policy=BatchPolicy(max_batch=2, max_delay_ms=0)) as session:
        feed = {name: np.repeat(value, 5, axis=0) for name, value in boxes_of(0, picks=2).items()}
        with pytest.raises(InputError, match="'picked' has no batch axis"):
            session.infer(feed, timeout_s=10)
    engine.close()


def test_undeclared_batch_names_are_proven_and_batched(tmp_path):
    """Exporters often name the output's batch differently; it is batched all the same."""
    path = save_model(
        tmp_path / "relu.onnx",
        [helper.make_node("Relu", ["x"], ["y"])],
        [floats("x", ["batch", 3])],
        [floats("y", ["unk__7", 3])],
    )
    engine = OnnxRuntimeEngine(path, threads=1)
    with Session(engine, policy=BatchPolicy(max_batch=4, max_delay_ms=50)) as session:
        futures = [session.submit({"x": np.full((1, 3), mark, np.float32)}) for mark in range(4)]
        assert [float(future.result(10).outputs["y"][0, 0]) for future in futures] == [0, 1, 2, 3]
        assert session.stats().batch_size_histogram == {4: 1}
    engine.close()


def test_outputs_declared_without_a_batch_run_alone(tmp_path):
    path = save_model(
        tmp_path / "sum.onnx",
        [helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0)],
        [floats("x", ["batch", 3])],
        [floats("s", [])],
    )
    engine = OnnxRuntimeEngine(path, threads=1)
    with Session(engine, policy=BatchPolicy(max_batch=4, max_delay_ms=20)) as session:
        futures = [session.submit({"x": np.full((1, 3), mark, np.float32)}) for mark in range(3)]
        assert [float(future.result(10).outputs["s"]) for future in futures] == [0, 3, 6]
    engine.close()


def test_failing_data_fails_alone(tmp_path):
    path = save_model(
        tmp_path / "gather.onnx",
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        [helper.make_tensor_value_info("i", TensorProto.INT64, ["N"])],
        [floats("y", ["N", 2])],
        [numpy_helper.from_array(np.eye(2, dtype=np.float32), "table")],
    )
    engine = OnnxRuntimeEngine(path, threads=1)
    with Session(engine, policy=BatchPolicy(max_batch=4, max_delay_ms=20)) as session:
        futures = [session.submit({"i": np.array([index], np.int64)}) for index in (0, 7, 1)]
        assert futures[0].result(10).outputs["y"].tolist() == [[1.0, 0.0]]
        assert futures[2].result(10).outputs["y"].tolist() == [[0.0, 1.0]]
        with pytest.raises(InputError, match=r"gather\.onnx"):
            futures[1].result(10)
    engine.close()


def test_warm_up_on_a_real_model(anchors_path):
    engine = OnnxRuntimeEngine(anchors_path, threads=1)
    with Session(engine, policy=BatchPolicy(max_batch=2), buckets=[Resolution(320, 320)]) as session:
        assert set(session.warm_up(quiet=True)["3x320x320"]) == {1, 2}
    engine.close()


@pytest.mark.slow
def test_throughput_against_ideal_batches(anchors_path):
    """Issue target: over mixed resolutions >= 0.95 of calling ONNX Runtime directly with the same ideal batches."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(0, 0.05, (24, 3 if i == 0 else 24, 3, 3)).astype(np.float32) for i in range(4)]
    inits = [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)]
    names = ["images", "a", "b", "c", "out"]
    nodes = [
        helper.make_node("Conv", [names[i], f"w{i}"], [names[i + 1]], pads=[1, 1, 1, 1], strides=[2, 2])
        for i in range(4)
    ]
    path = save_model(
        anchors_path.with_name("convs.onnx"),
        nodes,
        [floats("images", ["N", 3, "H", "W"])],
        [floats("out", ["N", 24, "h", "w"])],
        inits,
    )
    engine = OnnxRuntimeEngine(path, threads=1)
    sizes = [(320, 320), (256, 320)]
    frames = [image(index, *sizes[index % 2]) for index in range(64)]
    ratios = []
    for _ in range(5):
        begin = time.perf_counter()
        for size in range(2):
            mine = [frame["images"] for frame in frames[size::2]]
            for at in range(0, len(mine), 8):
                engine.infer({"images": np.concatenate(mine[at : at + 8])})
        direct_s = time.perf_counter() - begin
        with Session(engine, policy=BatchPolicy(max_batch=8, max_delay_ms=50)) as session:
            begin = time.perf_counter()
            for future in [session.submit(frame) for frame in frames]:
                future.result(30)
            ratios.append(direct_s / (time.perf_counter() - begin))
    engine.close()
    assert max(ratios) >= 0.95, ratios
