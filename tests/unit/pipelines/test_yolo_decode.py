"""Decoding and suppression against slow, independent references (B79, B88, B91, B92)."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.errors import ModelError
from edgeds.pipelines.yolo import HeadLayout, decode, nms
from edgeds.pipelines.yolo.decode import decode_scores
from edgeds.pipelines.yolo.suppress import box_iou
from edgeds.specs import Resolution

SIZE = Resolution(64, 96)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def xyxy_of(x: float, y: float, w: float, h: float) -> list[float]:
    return [x - w / 2, y - h / 2, x + w / 2, y + h / 2]


def slow_iou(a: np.ndarray, b: np.ndarray) -> float:
    width = max(0.0, float(min(a[2], b[2]) - max(a[0], b[0])))
    height = max(0.0, float(min(a[3], b[3]) - max(a[1], b[1])))
    union = float((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])) - width * height
    return width * height / union if union > 0 else 0.0


def slow_nms(boxes, scores, classes, iou, max_det) -> list[int]:
    kept: list[int] = []
    for index in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        rivals = [k for k in kept if classes is None or classes[k] == classes[index]]
        if all(slow_iou(boxes[k], boxes[index]) <= iou for k in rivals):
            kept.append(index)
    return kept[:max_det]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 120),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    st.sampled_from([1, 7, 300]),
    st.booleans(),
)
def test_nms_equals_a_slow_reference(seed, count, classes, iou, max_det, agnostic) -> None:
    random = rng(seed)
    corner = random.integers(0, 40, (count, 2))
    boxes = np.concatenate([corner, corner + random.integers(0, 30, (count, 2))], axis=1).astype(np.float32)
    scores = (random.integers(0, 20, count) / 20).astype(np.float32)
    labels = None if agnostic else random.integers(0, classes, count)
    got = nms(boxes, scores, classes=labels, iou=iou, max_det=max_det)
    assert got.tolist() == slow_nms(boxes, scores, labels, iou, max_det)


def test_nms_beyond_one_block_equals_the_reference() -> None:
    random = rng(3)
    corner = random.random((900, 2)) * 200
    boxes = np.concatenate([corner, corner + 20 + random.random((900, 2)) * 20], axis=1).astype(np.float32)
    scores = random.random(900).astype(np.float32)
    for iou in (0.2, 0.6):
        assert nms(boxes, scores, iou=iou, max_det=900).tolist() == slow_nms(boxes, scores, None, iou, 900)


def test_b88_class_aware_by_default_agnostic_on_request() -> None:
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 10]], np.float32)
    scores = np.array([0.9, 0.8], np.float32)
    assert nms(boxes, scores, classes=np.array([0, 1])).tolist() == [0, 1]
    assert nms(boxes, scores, classes=np.array([1, 1])).tolist() == [0]
    assert nms(boxes, scores).tolist() == [0]


def test_large_coordinates_and_class_numbers_do_not_interact() -> None:
    """The trick of shifting boxes by class times an offset loses float32 precision here."""
    base = np.array([[65000, 65000, 65004, 65004], [65002, 65000, 65006, 65004], [65000, 65000, 65004, 65004]])
    boxes = base.astype(np.float32)
    got = nms(boxes, np.array([0.9, 0.8, 0.7]), classes=np.array([999, 999, 0]), iou=0.4)
    assert got.tolist() == [0, 1, 2]


def test_empty_degenerate_and_limit_cases() -> None:
    assert nms(np.zeros((0, 4)), np.zeros(0)).size == 0
    assert nms(np.zeros((3, 4)), np.zeros(3)).size == 3  # empty boxes overlap nothing
    assert box_iou(np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32))[0, 0] == 0


def test_oriented_nms_sees_the_angle() -> None:
    crossed = np.array([[50, 50, 80, 10, 0], [50, 50, 80, 10, np.pi / 2]], np.float32)
    equal = np.array([[50, 50, 80, 10, 0.3], [51, 50, 80, 10, 0.3 + np.pi]], np.float32)
    swapped = np.array([[50, 50, 80, 10, 0.3], [50, 50, 10, 80, 0.3 + np.pi / 2]], np.float32)
    scores = np.array([0.9, 0.8])
    assert nms(crossed, scores, iou=0.5).tolist() == [0, 1]
    assert nms(equal, scores, iou=0.5).tolist() == [0]
    assert nms(swapped, scores, iou=0.5).tolist() == [0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nms(np.zeros((4, 5)), np.ones(4)).size >= 1


def v8_output(boxes, scores, extra=None, *, transposed=False) -> np.ndarray:
    rows = np.concatenate([np.asarray(boxes), np.asarray(scores), *([extra] if extra is not None else [])], axis=1)
    batch = rows.astype(np.float32)[None]
    return batch if transposed else np.ascontiguousarray(batch.transpose(0, 2, 1))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("classes", [1, 3])
def test_v8_layout(classes: int, transposed: bool) -> None:
    scores = np.zeros((5, classes))
    scores[1, classes - 1], scores[3, 0] = 0.9, 0.6
    boxes = rng().random((5, 4)) * 40
    layout = HeadLayout(family="v8", classes=classes, output="o", rows_first=not transposed)
    (found,) = decode({"o": v8_output(boxes, scores, transposed=transposed)}, layout, input_size=SIZE)
    assert found.cls.tolist() == [classes - 1, 0]
    np.testing.assert_allclose(found.conf, [0.9, 0.6], rtol=1e-6)
    np.testing.assert_allclose(found.boxes, [xyxy_of(*boxes[1]), xyxy_of(*boxes[3])], rtol=1e-5)


@pytest.mark.parametrize("classes", [1, 3])
def test_v5_layout_multiplies_objectness(classes: int) -> None:
    rows = np.zeros((1, 4, 5 + classes), np.float32)
    rows[0, :, :4] = [20, 20, 8, 8]
    rows[0, 1, 4], rows[0, 1, 4 + classes] = 0.8, 0.5
    rows[0, 2, 4], rows[0, 2, 5] = 0.2, 1.0
    layout = HeadLayout(family="v5", classes=classes, output="o", rows_first=False)
    (found,) = decode({"o": rows}, layout, input_size=SIZE)
    assert found.cls.tolist() == [classes - 1]
    assert found.conf[0] == pytest.approx(0.4)
    assert found.boxes[0].tolist() == [16, 16, 24, 24]


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("classes", [1, 3])
def test_v5_raw_equals_the_formula_cell_by_cell(classes: int, channels_first: bool) -> None:
    anchors = ((10.0, 13, 16, 30, 33, 23), (30.0, 61, 62, 45, 59, 119), (116.0, 90, 156, 198, 373, 326))
    random = rng(1)
    levels = [random.normal(0, 1.5, (2, 3, 64 // s, 96 // s, 5 + classes)).astype(np.float32) for s in (8, 16, 32)]
    layout = HeadLayout(
        family="v5_raw", classes=classes, output="a", rows_first=False, levels=("c", "a", "b"), anchors=anchors
    )
    outputs = dict(zip(("a", "b", "c"), levels, strict=True))
    if channels_first:
        outputs = {k: v.transpose(0, 1, 4, 2, 3).reshape(2, -1, *v.shape[2:4]) for k, v in outputs.items()}
    found = decode(outputs, layout, input_size=SIZE, conf=0.3)
    for image in range(2):
        want = []
        for level, stride, sizes in zip(levels, (8, 16, 32), anchors, strict=True):
            for box, row, column in np.ndindex(level.shape[1:4]):
                value = 1 / (1 + np.exp(-level[image, box, row, column].astype(np.float64)))
                score = float(value[4] * value[5:].max())
                if score > 0.3:
                    x, y = (value[0] * 2 - 0.5 + column) * stride, (value[1] * 2 - 0.5 + row) * stride
                    w, h = (value[2] * 2) ** 2 * sizes[2 * box], (value[3] * 2) ** 2 * sizes[2 * box + 1]
                    want.append((score, int(value[5:].argmax()), xyxy_of(x, y, w, h)))
        want.sort(key=lambda item: -item[0])
        assert found[image].cls.tolist() == [item[1] for item in want]
        np.testing.assert_allclose(found[image].conf, [item[0] for item in want], rtol=1e-5)
        np.testing.assert_allclose(found[image].boxes, [item[2] for item in want], rtol=1e-4, atol=1e-3)


def test_yolox_grid_and_its_decoded_form_agree() -> None:
    cells = [(x, y, s) for s in (8, 16, 32) for y in range(64 // s) for x in range(96 // s)]
    raw = rng(2).normal(0, 0.5, (1, len(cells), 7)).astype(np.float32)
    raw[..., 4:] = 1 / (1 + np.exp(-raw[..., 4:] * 3))
    decoded = raw.copy()
    for index, (x, y, stride) in enumerate(cells):
        decoded[0, index, :2] = (raw[0, index, :2] + (x, y)) * stride
        decoded[0, index, 2:4] = np.exp(raw[0, index, 2:4]) * stride
    options = {"classes": 2, "output": "o", "rows_first": False}
    (grid,) = decode({"o": raw}, HeadLayout(family="yolox", **options), input_size=SIZE)
    (plain,) = decode({"o": decoded}, HeadLayout(family="yolox_decoded", **options), input_size=SIZE)
    assert len(grid.conf) > 10
    np.testing.assert_allclose(grid.boxes, plain.boxes, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(grid.cls, plain.cls)
    with pytest.raises(ModelError, match="strides"):
        decode({"o": raw[:, :-1]}, HeadLayout(family="yolox", **options), input_size=SIZE)


def test_end_to_end_layout_drops_padding_and_keeps_extra() -> None:
    rows = np.zeros((1, 300, 6 + 6), np.float32)
    rows[0, 4] = [1, 2, 30, 40, 0.9, 2, *range(6)]
    rows[0, 7] = [5, 5, 9, 9, 0.95, 0, *range(6)]
    layout = HeadLayout(
        family="end2end", task="pose", classes=3, output="o", rows_first=False, keypoints=2, keypoint_dims=3
    )
    (found,) = decode({"o": rows}, layout, input_size=SIZE)
    assert found.cls.tolist() == [0, 2]
    assert found.boxes[1].tolist() == [1, 2, 30, 40]
    assert found.extra[0].tolist() == list(range(6))


def test_multi_label_gives_a_box_once_per_class() -> None:
    layout = HeadLayout(family="v8", classes=3, output="o")
    output = {"o": v8_output([[20, 20, 8, 8]], [[0.6, 0.5, 0.1]])}
    assert decode(output, layout, input_size=SIZE)[0].cls.tolist() == [0]
    assert decode(output, layout, input_size=SIZE, multi_label=True)[0].cls.tolist() == [0, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_rows_are_dropped_and_the_rest_stays(bad: float) -> None:
    boxes = np.full((4, 4), 20.0)
    scores = np.full((4, 2), 0.8)
    boxes[0, 2], scores[1, 0] = bad, bad
    layout = HeadLayout(family="v8", classes=2, output="o")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = decode({"o": v8_output(boxes, scores)}, layout, input_size=SIZE)
    assert np.isfinite(found.boxes).all()
    assert 2 <= found.conf.size <= 3
    np.testing.assert_allclose(found.conf, 0.8, rtol=1e-6)


def test_candidates_are_bounded_and_the_best_are_kept() -> None:
    scores = rng().random((500, 1)).astype(np.float32)
    layout = HeadLayout(family="v8", classes=1, output="o")
    output = {"o": v8_output(np.full((500, 4), 9.0), scores)}
    (found,) = decode(output, layout, input_size=SIZE, conf=0.0, max_candidates=50)
    np.testing.assert_array_equal(found.conf, np.sort(scores[:, 0])[::-1][:50])


@pytest.mark.parametrize("family", ["v8", "v5", "end2end", "yolox_decoded"])
def test_b79_a_batch_equals_its_singles(family: str) -> None:
    """Three images, two classes, boxes that would overlap across images."""
    values = {"v8": 6, "end2end": 6}.get(family, 7)
    output = rng(5).random((3, 40, values)).astype(np.float32)
    if family == "end2end":
        output[..., 5] = rng(6).integers(0, 2, (3, 40))
    output[..., :4] *= 60
    layout = HeadLayout(family=family, classes=2, output="o", rows_first=False)
    together = decode({"o": output}, layout, input_size=SIZE)
    for index in range(3):
        (alone,) = decode({"o": output[index : index + 1]}, layout, input_size=SIZE)
        for name in ("boxes", "conf", "cls"):
            np.testing.assert_array_equal(getattr(together[index], name), getattr(alone, name))


def test_outputs_that_do_not_fit_are_refused() -> None:
    layout = HeadLayout(family="v8", classes=3, output="o")
    for outputs, message in [
        ({}, "no output 'o'"),
        ({"o": np.zeros((1, 6, 5))}, "6 values per box"),
        ({"o": np.zeros((7, 5))}, "shape"),
    ]:
        with pytest.raises(ModelError, match=message):
            decode(outputs, layout, input_size=SIZE)
    raw = HeadLayout(family="v5_raw", classes=1, output="a", levels=("a",), anchors=((1.0,) * 6,))
    with pytest.raises(ModelError, match=r"expected \[N, 3, H, W, 6\]"):
        decode({"a": np.zeros((1, 3, 8, 8, 7))}, raw, input_size=SIZE)
    classifier = HeadLayout(family="classify", task="classify", classes=3, output="o")
    with pytest.raises(ModelError, match="4 scores"):
        decode_scores({"o": np.zeros((1, 4))}, classifier)


def test_classifier_scores_and_logits() -> None:
    layout = HeadLayout(family="classify", task="classify", classes=3, output="o")
    probs = np.array([[0.2, 0.7, 0.1]], np.float32)
    np.testing.assert_array_equal(decode_scores({"o": probs}, layout), probs)
    logits = np.log(probs) + 5
    np.testing.assert_allclose(decode_scores({"o": logits}, layout), probs, rtol=1e-5)
