"""Results: coordinates of every task come back to the source image (B80), pictures and JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edgeds.errors import InputError, ModelError, SpecError
from edgeds.pipelines.yolo import DetectOptions, HeadLayout, Result
from edgeds.pipelines.yolo.draw import class_color
from edgeds.pipelines.yolo.masks import Masks
from edgeds.pipelines.yolo.postprocess import results_from_outputs
from edgeds.pipelines.yolo.result import corners_of
from edgeds.preproc import place_image, read_image
from edgeds.specs import Resolution

cv2 = pytest.importorskip("cv2")

SOURCE, TARGET = Resolution(427, 641), Resolution(320, 320)
NAMES = {0: "cat", 1: "dog"}


def run(rows, layout, *, place=None, extra_outputs=None, **options) -> Result:
    place = place or place_image(SOURCE, TARGET)
    outputs = {"o": np.asarray(rows, np.float32)[None], **(extra_outputs or {})}
    (result,) = results_from_outputs(outputs, layout, placements=[place], names=NAMES, options=DetectOptions(**options))
    return result


def test_boxes_come_back_and_are_clipped() -> None:
    place = place_image(SOURCE, TARGET)
    x1, y1, x2, y2 = place.boxes_to_target(np.array([100.0, 50, 300, 200]))
    rows = [
        [(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1, 0.1, 0.9],
        [0, 0, 900, 900, 0.8, 0.1],
    ]
    result = run(rows, HeadLayout(family="v8", classes=2, output="o", rows_first=False))
    np.testing.assert_allclose(result.xyxy[0], [100, 50, 300, 200], atol=1e-2)
    assert result.xyxy[1, :2].tolist() == [0, 0]
    assert (result.xyxy[:, 2] <= 641).all()
    assert (result.xyxy[:, 3] <= 427).all()
    assert result.xyxy.dtype == result.conf.dtype == np.float32
    assert [result.label(index) for index in range(2)] == ["dog", "cat"]


def test_b88_agnostic_and_max_det_reach_the_result() -> None:
    rows = [[100, 100, 50, 50, 0.9, 0.1], [100, 100, 50, 50, 0.1, 0.8]]
    layout = HeadLayout(family="v8", classes=2, output="o", rows_first=False)
    assert len(run(rows, layout)) == 2
    assert len(run(rows, layout, agnostic=True)) == 1
    assert len(run(rows, layout, max_det=1)) == 1


@pytest.mark.parametrize("dims", [2, 3])
def test_b80_keypoints_use_the_same_inverse(dims: int) -> None:
    place = place_image(SOURCE, TARGET)
    points = np.array([[10.0, 20], [300, 200], [640, 426]])
    moved = place.to_target(points)
    if dims == 3:
        moved = np.column_stack([moved, [0.9, 0.2, 0.7]])
    layout = HeadLayout(
        family="v8", task="pose", classes=1, output="o", rows_first=False, keypoints=3, keypoint_dims=dims
    )
    result = run([[100, 100, 50, 50, 0.9, *moved.ravel()]], layout, place=place)
    assert result.keypoints is not None
    assert result.keypoints.shape == (1, 3, dims)
    np.testing.assert_allclose(result.keypoints[0, :, :2], points, atol=1e-3)
    if dims == 3:
        np.testing.assert_allclose(result.keypoints[0, :, 2], [0.9, 0.2, 0.7], rtol=1e-6)


@pytest.mark.parametrize("source", [Resolution(427, 641), Resolution(480, 642), Resolution(1571, 3775)])
def test_b80_masks_lie_on_their_boxes(source: Resolution) -> None:
    place = place_image(source, Resolution(640, 640))
    box = np.array([[0.2, 0.3, 0.6, 0.8]]) * ([source.width_px, source.height_px] * 2)
    x1, y1, x2, y2 = place.boxes_to_target(box)[0] / 4
    # A plane whose zero crossing is exactly the box edge: logits fall off linearly from it.
    ys, xs = np.mgrid[0:160, 0:160] + 0.5
    inside = np.minimum.reduce([xs - x1, x2 - xs, ys - y1, y2 - ys]).astype(np.float32)
    wide = box + np.array([-30, -30, 30, 30])
    masks = Masks(np.ones((1, 1), np.float32), prototypes=inside[None], boxes_xyxy=wide, placement=place)
    mask = masks[0]
    assert mask.shape == (source.height_px, source.width_px)
    rows, columns = np.nonzero(mask)
    got = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    assert np.abs(got - box[0]).max() <= 0.5 / min(place.gain_x, place.gain_y) + 0.5
    assert masks.data.shape == (1, source.height_px, source.width_px)
    (outline,) = masks.polygons(0)
    np.testing.assert_allclose(outline.min(axis=0), got[:2] + 0.5, atol=1.5)


def test_segmentation_result_and_empty_masks() -> None:
    layout = HeadLayout(
        family="v8", task="segment", classes=1, output="o", rows_first=False, proto="p", mask_coefficients=2
    )
    proto = {"p": np.ones((1, 2, 80, 80), np.float32)}
    rows = [[160, 160, 60, 60, 0.9, 1, 1], [160, 60, 20, 20, 0.8, -1, -1]]
    result = run(rows, layout, extra_outputs=proto)
    assert result.masks is not None
    assert len(result.masks) == 2
    left, top, part = result.masks.crop(0)
    assert part.all()
    assert (left, top) == tuple(np.floor(result.xyxy[0, :2]).astype(int))
    assert not result.masks[1].any()
    assert result.masks.polygons(1) == []
    assert run(np.zeros((1, 7)), layout, extra_outputs=proto).masks.data.shape == (0, 427, 641)
    with pytest.raises(ModelError, match="prototypes"):
        run(rows, layout)


@pytest.mark.parametrize("mode", ["letterbox", "stretch"])
def test_oriented_boxes_come_back(mode: str) -> None:
    place = place_image(SOURCE, TARGET, mode=mode)
    layout = HeadLayout(family="v8", task="obb", classes=1, output="o", rows_first=False)
    result = run([[160, 160, 80, 30, 0.9, 0.5]], layout, place=place)
    corners = place.to_source(corners_of(np.array([[160, 160, 80, 30, 0.5]], np.float32)))
    assert result.corners is not None
    if mode == "letterbox":
        np.testing.assert_allclose(result.corners, corners, atol=0.1)
    np.testing.assert_allclose(result.corners.mean(axis=1), corners.mean(axis=1), atol=1e-3)
    np.testing.assert_allclose(result.xyxy[0, :2], result.corners[0].min(axis=0), rtol=1e-5)


def everything() -> list[Result]:
    image = np.full((427, 641, 3), 90, np.uint8)
    segment = HeadLayout(
        family="v8", task="segment", classes=1, output="o", rows_first=False, proto="p", mask_coefficients=2
    )
    pose = HeadLayout(family="v8", task="pose", classes=1, output="o", rows_first=False, keypoints=17, keypoint_dims=3)
    obb = HeadLayout(family="v8", task="obb", classes=1, output="o", rows_first=False)
    detect = HeadLayout(family="v8", classes=2, output="o", rows_first=False)
    proto = {"p": np.ones((1, 2, 80, 80), np.float32)}
    points = np.random.default_rng(0).random(51) * 300
    points[3] = 1e30
    from dataclasses import replace

    results = [
        run([[160, 160, 60, 60, 0.9, 1, 1]], segment, extra_outputs=proto),
        run([[160, 160, 60, 60, 0.9, *points]], pose),
        run([[160, 160, 80, 30, 0.9, 0.5]], obb),
        run([[160, 160, 80, 30, 0.9, 0.5], [0, 0, 5, 5, 0.3, 0.9]], detect),
        run(np.zeros((1, 6)), detect),
        Result(names=NAMES, task="classify", size=SOURCE, probs=np.array([0.3, 0.7], np.float32)),
    ]
    return [replace(result, image=image, source="x.jpg") for result in results]


@pytest.mark.parametrize("index", range(6))
def test_every_task_plots_and_serialises(index: int, tmp_path) -> None:
    result = everything()[index]
    picture = result.plot()
    assert picture.shape == (427, 641, 3)
    assert (picture != result.image).any() == (index != 4)
    assert (result.image == 90).all()
    plain = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert plain["size"] == [427, 641]
    for detection in plain["detections"]:
        assert {"xyxy", "conf", "cls", "label"} <= set(detection)
    assert len(plain["detections"]) == len(result)
    assert bool(result)
    if index == 5:
        assert plain["classes"][0] == {"cls": 1, "label": "dog", "conf": 0.7}
    written = result.save(tmp_path / "out" / "ä.png")
    np.testing.assert_array_equal(read_image(written), picture)
    assert [path.name for path in written.parent.iterdir()] == ["ä.png"]


def test_saving_and_plotting_refusals(tmp_path) -> None:
    result = everything()[3]
    with pytest.raises(SpecError, match="choose a name"):
        result.save(tmp_path / "x.gif")
    with pytest.raises(InputError, match="plot"):
        Result(names=NAMES).plot()
    failed = Result(names=NAMES, error=InputError("x.jpg: broken"))
    assert not failed.ok
    assert failed.to_json()["error"] == "x.jpg: broken"
    with pytest.raises(InputError, match="broken"):
        failed.plot()


def test_drawing_survives_tiny_pictures_and_odd_labels() -> None:
    result = Result(
        names={0: "Straßenbahn 電車 " * 10},
        size=Resolution(3, 2),
        xyxy=np.array([[0, 0, 2, 3]], np.float32),
        conf=np.ones(1, np.float32),
        cls=np.zeros(1, np.int64),
        image=np.zeros((3, 2, 3), np.uint8),
    )
    assert result.plot().shape == (3, 2, 3)
    assert len({class_color(index) for index in range(80)}) == 80


@pytest.mark.parametrize(
    "options", [{"conf": 1.5}, {"iou": -1}, {"conf": float("nan")}, {"max_det": 0}, {"max_det": 2.5}, {"conf": "x"}]
)
def test_bad_thresholds_are_refused(options) -> None:
    with pytest.raises(SpecError, match=next(iter(options))):
        DetectOptions(**options)
