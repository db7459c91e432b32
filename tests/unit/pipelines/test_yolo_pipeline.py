"""The pipeline end to end on engines whose answers are known (B49, B78, B79, B81, B82, B89, B90, B91)."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from grid_model import cell_picture, write_grid_model

from edgeds.errors import BundleError, DeviceError, EngineMismatch, InputError, SessionClosed, SpecError
from edgeds.pipelines.sources import open_sources
from edgeds.pipelines.yolo import YoloPipeline
from edgeds.preproc import ImagePreprocess
from edgeds.runtime import BatchPolicy
from edgeds.specs import Resolution, TensorSpec, to_json

cv2 = pytest.importorskip("cv2")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")


class BoxEngine:
    """Finds the bounding box of bright pixels; the class is the brightest channel. v8 layout, any input size."""

    backend, fallback_reason, precision, threads = "test", None, None, 1

    def __init__(self, *, channels: int = 3, shape=("n", None, "h", "w"), dtype: str = "float32", classes: int = 3):
        self.inputs = (TensorSpec(name="images", dtype=dtype, shape=(shape[0], channels, *shape[2:])),)
        self.outputs = (TensorSpec(name="output0", dtype=dtype, shape=(shape[0], 4 + classes, "a")),)
        self.metadata = {"names": str({index: f"c{index}" for index in range(classes)}), "task": "detect"}
        self.classes = classes
        self.shapes: list[tuple[int, ...]] = []
        self.fail = False

    def infer(self, feeds):
        images = feeds["images"].astype(np.float32)
        self.shapes.append(images.shape)
        if self.fail:
            raise DeviceError("the device is gone")
        count, _, height, width = images.shape
        out = np.zeros((count, 4 + self.classes, height * width // 64), np.float32)
        for index, image in enumerate(images):
            rows, columns = np.nonzero(image.max(axis=0) > 0.6)
            if rows.size:
                x1, y1, x2, y2 = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
                label = int(image[:, y1:y2, x1:x2].mean(axis=(1, 2)).argmax()) % self.classes
                out[index, :4, 5] = (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1
                out[index, 4 + label, 5] = 0.9
        return {"output0": out.astype(self.outputs[0].dtype)}

    def close(self) -> None:
        pass


def picture(height: int, width: int, box: tuple[int, int, int, int], channel: int = 2) -> np.ndarray:
    image = np.zeros((height, width, 3), np.uint8)
    image[box[1] : box[3], box[0] : box[2], channel] = 255
    return image


BOX = (30, 40, 90, 120)
SIZES = [(200, 300), (300, 200), (128, 128), (427, 641), (150, 600)]
BUCKETS = [Resolution(128, 192), Resolution(192, 128), Resolution(192, 192)]


def test_b78_b79_mixed_sizes_come_back_in_order_and_equal_their_singles() -> None:
    images = [picture(h, w, BOX, channel=index % 3) for index, (h, w) in enumerate(SIZES * 3)]
    engine = BoxEngine()
    with YoloPipeline.from_engine(engine, buckets=BUCKETS) as pipeline:
        results = pipeline.predict(images)
        singles = [pipeline.predict_one(image) for image in images]
    assert {shape[2:] for shape in engine.shapes} <= {(b.height_px, b.width_px) for b in BUCKETS}
    assert max(shape[0] for shape in engine.shapes) > 1
    for index, (result, single) in enumerate(zip(results, singles, strict=True)):
        np.testing.assert_array_equal(result.xyxy, single.xyxy)
        assert result.cls.tolist() == [2 - index % 3]  # BGR in, RGB to the model
        assert result.size == Resolution(*SIZES[index % len(SIZES)])
        gain = 192 / max(SIZES[index % len(SIZES)])
        np.testing.assert_allclose(result.xyxy[0], BOX, atol=1 / min(gain, 1))
    assert {"prepare", "queue", "compute", "decode"} <= set(results[0].timings_ms)


@pytest.mark.parametrize("mode", ["letterbox", "stretch"])
def test_b81_a_square_in_a_wide_image_stays_square(mode: str) -> None:
    image = picture(200, 800, (300, 50, 400, 150))
    preprocess = ImagePreprocess(mode=mode)
    with YoloPipeline.from_engine(BoxEngine(), preprocess=preprocess, buckets=[320]) as pipeline:
        (result,) = pipeline.predict(image)
    np.testing.assert_allclose(result.xyxy[0], [300, 50, 400, 150], atol=2.6)


def test_b82_a_fixed_model_gets_its_own_shape_only() -> None:
    engine = BoxEngine(shape=("n", None, 96, 160))
    with YoloPipeline.from_engine(engine) as pipeline:
        pipeline.predict([picture(h, w, BOX) for h, w in SIZES])
    assert {shape[2:] for shape in engine.shapes} == {(96, 160)}
    with pytest.raises(EngineMismatch, match="96x160"):
        YoloPipeline.from_engine(engine, buckets=[320])


def test_fixed_batch_and_half_precision_models() -> None:
    engine = BoxEngine(shape=(4, None, 96, 160), dtype="float16")
    with YoloPipeline.from_engine(engine) as pipeline:
        results = pipeline.predict([picture(200, 300, BOX)] * 3)
    assert {shape[0] for shape in engine.shapes} == {4}
    for result in results:
        np.testing.assert_allclose(result.xyxy[0], BOX, atol=2)


def test_b90_a_one_channel_model_gets_gray() -> None:
    engine = BoxEngine(channels=1, classes=1)
    with YoloPipeline.from_engine(engine, buckets=[128]) as pipeline:
        image = np.zeros((128, 128), np.uint8)
        image[40:120, 30:90] = 255
        (result,) = pipeline.predict(image)
    assert engine.shapes[0][1] == 1
    np.testing.assert_allclose(result.xyxy[0], BOX, atol=1)
    with pytest.raises(EngineMismatch, match="3 channels"):
        YoloPipeline.from_engine(engine, preprocess=ImagePreprocess())


@pytest.mark.parametrize("images", [None, 3, 1.5])
def test_what_holds_no_images_is_an_input_error(images) -> None:
    with (
        YoloPipeline.from_engine(BoxEngine(), buckets=BUCKETS) as pipeline,
        pytest.raises(InputError, match="expected a path"),
    ):
        pipeline.predict(images)


def test_b89_a_bad_image_does_not_spoil_its_batch(tmp_path) -> None:
    (tmp_path / "zero.jpg").write_bytes(b"")
    good = picture(200, 300, BOX)
    cv2.imwrite(str(tmp_path / "good.png"), good)
    with YoloPipeline.from_engine(BoxEngine(), buckets=BUCKETS) as pipeline:
        results = pipeline.predict([good, tmp_path / "zero.jpg", str(tmp_path / "good.png"), good.astype(float), None])
        assert [result.ok for result in results] == [True, False, True, False, False]
        assert "zero.jpg" in str(results[1].error)
        assert "image 3" in str(results[3].error)
        np.testing.assert_array_equal(results[0].xyxy, results[2].xyxy)
        np.testing.assert_array_equal(results[0].plot(), results[2].plot())
        with pytest.raises(InputError, match=r"zero\.jpg"):
            pipeline.predict(tmp_path / "zero.jpg")
        assert pipeline.predict([]) == []


def test_stream_keeps_order_isolates_errors_and_bounds_the_window() -> None:
    taken = []

    def frames():
        for index in range(40):
            taken.append(index)
            good = picture(*SIZES[index % 5], BOX)
            yield good if index != 7 else good.astype(np.float32)

    engine = BoxEngine()
    policy = BatchPolicy(max_batch=2, on_full="block")
    with YoloPipeline.from_engine(engine, buckets=BUCKETS, policy=policy) as pipeline:
        seen = []
        for frame, result in pipeline.stream(frames()):
            seen.append(frame.index)
            assert len(taken) - len(seen) <= 4
            assert result.ok == (frame.index != 7)
            assert result.size is None or frame.image_bgr.shape[:2] == (result.size.height_px, result.size.width_px)
    assert seen == list(range(40))


def test_an_abandoned_stream_closes_its_sources(tmp_path) -> None:
    writer = cv2.VideoWriter(str(tmp_path / "a.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 100, (96, 96))
    for _ in range(30):
        writer.write(picture(96, 96, (10, 10, 50, 50)))
    writer.release()
    before = threading.active_count()
    with YoloPipeline.from_engine(BoxEngine(), buckets=[96]) as pipeline:
        stream = pipeline.stream(str(tmp_path / "a.avi"), policy="latest")
        next(stream)
        stream.close()
        with open_sources(tmp_path / "a.avi") as opened:
            pairs = pipeline.stream(opened)
            assert next(pairs)[0].index == 0
            pairs.close()
            assert next(opened).index >= 1  # its owner may go on
    assert threading.active_count() == before


def test_many_threads_get_their_own_results() -> None:
    with YoloPipeline.from_engine(BoxEngine(), buckets=BUCKETS) as pipeline:

        def work(seed: int) -> bool:
            x, y = 10 + seed * 5, 20 + seed * 3
            box = (x, y, x + 40, y + 60)
            results = pipeline.predict([picture(192, 192, box)] * 5)
            return all(np.abs(result.xyxy[0] - box).max() <= 1 for result in results)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(16)))


def test_async_twin() -> None:
    async def work(pipeline: YoloPipeline):
        return await asyncio.gather(*(pipeline.predict_async(picture(192, 192, BOX)) for _ in range(5)))

    with YoloPipeline.from_engine(BoxEngine(), buckets=BUCKETS) as pipeline:
        assert [len(results[0]) for results in asyncio.run(work(pipeline))] == [1] * 5


def test_engine_failures_and_closing() -> None:
    engine = BoxEngine()
    pipeline = YoloPipeline.from_engine(engine, buckets=BUCKETS)
    engine.fail = True
    with pytest.raises(DeviceError, match="gone"):
        pipeline.predict([picture(192, 192, BOX)] * 3)
    engine.fail = False
    assert len(pipeline.predict_one(picture(192, 192, BOX))) == 1
    strict = pipeline.with_options(conf=0.95)
    assert len(strict.predict_one(picture(192, 192, BOX))) == 0
    strict.close()
    assert len(pipeline.predict_one(picture(192, 192, BOX))) == 1
    with pytest.raises(SpecError, match="unknown option 'confidence'"):
        pipeline.with_options(confidence=0.5)
    pipeline.close()
    pipeline.close()
    with pytest.raises(SessionClosed):
        pipeline.predict(picture(192, 192, BOX))


def test_b91_buckets_off_the_stride_and_odd_models_are_refused() -> None:
    with pytest.raises(SpecError, match="multiples"):
        YoloPipeline.from_engine(BoxEngine(), buckets=[100])
    with pytest.raises(SpecError, match="2 names"):
        YoloPipeline.from_engine(BoxEngine(), names=["a", "b"], head={"family": "v8", "classes": 3})
    with pytest.raises(SpecError, match="fit no known"):
        YoloPipeline.from_engine(BoxEngine(), names=["a", "b"])
    with pytest.raises(SpecError, match="float32"):
        YoloPipeline.from_engine(BoxEngine(dtype="uint8"))
    with pytest.raises(SpecError, match="unknown option 'confidence'"):
        YoloPipeline.from_engine(BoxEngine(), confidence=0.5)
    two = BoxEngine()
    two.inputs = (*two.inputs, two.inputs[0])
    with pytest.raises(SpecError, match="2 inputs"):
        YoloPipeline.from_engine(two)


def make_bundle(folder, **changes):
    from edgeds.bundle import Manifest, write_bundle

    model = write_grid_model(folder / "model.onnx")
    preprocess = ImagePreprocess(stride=8)
    values = {
        "task": "detect",
        "models": {"float": "model.onnx"},
        "inputs": (TensorSpec(name="images", dtype="float32", shape=("n", 3, 64, 64)),),
        "outputs": (TensorSpec(name="output0", dtype="float32", shape=("n", 6, 64)),),
        "preprocess": to_json(preprocess),
        "preprocess_digest": preprocess.digest(),
        "names": {0: "red", 1: "green"},
        "buckets": (Resolution(64, 64),),
        "max_batch": 4,
        "precision": "float",
        "license": "Apache-2.0",
    }
    return write_bundle(folder / "b", files={"model.onnx": model}, manifest=Manifest(**{**values, **changes}))


def test_a_bundle_runs_and_finds_what_is_there(tmp_path) -> None:
    bundle = make_bundle(tmp_path)
    image = cell_picture((1, 2, "red"), (5, 6, "green"), scale=3)
    with YoloPipeline.from_bundle(bundle, conf=0.5, threads=1) as pipeline:
        (result,) = pipeline.predict(image)
    found = sorted(zip(map(result.label, range(2)), result.xyxy.tolist(), strict=True))
    assert found[0][0] == "green"
    np.testing.assert_allclose(found[0][1], [120, 144, 144, 168], atol=1e-3)
    np.testing.assert_allclose(found[1][1], [24, 48, 48, 72], atol=1e-3)


def test_b49_foreign_preprocessing_is_refused(tmp_path) -> None:
    changed = to_json(ImagePreprocess(stride=8, scale=1.0))
    with pytest.raises((EngineMismatch, BundleError), match="preprocess"):
        YoloPipeline.from_bundle(make_bundle(tmp_path, preprocess=changed))


def test_bundles_of_other_tasks_are_refused(tmp_path) -> None:
    with pytest.raises(SpecError, match="embed"):
        YoloPipeline.from_bundle(make_bundle(tmp_path, task="embed"))
    with pytest.raises(BundleError):
        YoloPipeline.from_bundle(tmp_path)


def test_import_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys, edgeds.preproc, edgeds.pipelines.yolo, edgeds.pipelines.sources, edgeds.report.accuracy;"
        "print([m for m in ('cv2', 'onnx', 'onnxruntime', 'torch', 'pycocotools') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.zoo
def test_the_zoo_detector_finds_what_its_photographs_show() -> None:
    """Real weights on real pictures: layout from metadata, sensible boxes, equal results alone and in a batch."""
    from edgeds.zoo import fetch_model, fetch_photos

    with YoloPipeline.from_model(fetch_model("yolo11n"), buckets=[320], threads=2) as pipeline:
        photos = fetch_photos()[:4]
        results = pipeline.predict(photos)
        assert sum(len(result) for result in results) >= len(photos)
        for photo, result in zip(photos, results, strict=True):
            alone = pipeline.predict_one(photo)
            np.testing.assert_allclose(alone.xyxy, result.xyxy, atol=0.5)
            assert alone.cls.tolist() == result.cls.tolist()
