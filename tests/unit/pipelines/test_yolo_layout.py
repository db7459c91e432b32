"""Layouts: metadata first, shapes second, ambiguity is an error (B84, B91, B92)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgeds.errors import SpecError
from edgeds.pipelines.yolo import HeadLayout, choose_layout, default_buckets, default_preprocess, layout_to_json
from edgeds.pipelines.yolo.metadata import parse_metadata, parse_names
from edgeds.specs import Resolution, TensorSpec


def spec(*shape: Any, name: str = "output0") -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape)


FIXED = spec("n", 3, 640, 640, name="images")
DYNAMIC = spec("n", 3, "h", "w", name="images")
PROTO = spec(1, 32, 160, 160, name="proto")


def names(count: int) -> str:
    return str({index: f"it's {index}" for index in range(count)})


def choose(outputs: Any, metadata: dict | None = None, source: TensorSpec = FIXED, **options: Any) -> HeadLayout:
    outputs = [outputs] if isinstance(outputs, TensorSpec) else outputs
    return choose_layout(metadata or {}, outputs, input_spec=source, **options)


@pytest.mark.parametrize(
    ("output", "source", "family", "classes", "rows_first"),
    [
        (spec(1, 84, 8400), FIXED, "v8", 80, True),
        (spec("n", 84, "a"), DYNAMIC, "v8", 80, True),
        (spec(1, 8400, 84), spec(1, 3, 640, 640), None, None, None),  # v8 with 80 or YOLOX with 79 classes
        (spec(1, 25200, 85), FIXED, "v5", 80, False),
        (spec(1, 15120, 85), spec(1, 3, 384, 640), "v5", 80, False),
        (spec(1, 6, 5040), spec(1, 3, 384, 640), "v8", 2, True),  # B91
        (spec(1, 5, 8400), FIXED, "v8", 1, True),  # B92
        (spec(1, 25200, 6), FIXED, "v5", 1, False),  # B92
        (spec(7, 84, 5), spec(7, 3, 64, 64), "v8", 1, False),  # B92
        (spec("n", 84, 5), DYNAMIC, None, None, None),
        (spec(1, 300, 6), FIXED, "end2end", 0, False),
        (spec("n", 300, 6), DYNAMIC, "end2end", 0, False),
        (spec("n", "m", 6), DYNAMIC, None, None, None),
        (spec(1, 33600, 84), spec(1, 3, 1280, 1280), None, None, None),
        (spec(1, 56, 8400), FIXED, None, None, None),
        (spec(2, 6, 64), spec(2, 3, 8, 8), "v8", 2, True),  # B36: sizes that no stride explains
    ],
)
def test_bare_shapes(output, source, family, classes, rows_first) -> None:
    if family is None:
        with pytest.raises(SpecError, match=r"head="):
            choose(output, source=source)
        return
    layout = choose(output, source=source)
    assert (layout.family, layout.classes, layout.rows_first) == (family, classes, rows_first)
    assert layout.task == "detect"


@pytest.mark.parametrize("count", [1, 2, 80])
def test_b92_class_names_settle_every_family(count: int) -> None:
    ultralytics = {"names": names(count), "task": "detect", "description": "Ultralytics YOLOv8n model"}
    legacy = {"names": names(count), "stride": "32"}
    for output, metadata, family in [
        (spec(1, 4 + count, 8400), ultralytics, "v8"),
        (spec(1, 8400, 4 + count), ultralytics, "v8"),
        (spec(1, "a", 4 + count), ultralytics, "v8"),
        (spec(1, 25200, 5 + count), legacy, "v5"),
        (spec("n", "a", 5 + count), {**legacy, "description": "YOLOv5s"}, "v5"),
        (spec(1, 8400, 5 + count), {}, "yolox"),
        (spec(1, 300, 6), {**ultralytics, "description": "Ultralytics YOLOv10n model"}, "end2end"),
        (spec("n", "m", 6), {**ultralytics, "end2end": "True"}, "end2end"),
        (spec("n", "m", 6), {**ultralytics, "args": "{'nms': True}"}, "end2end"),
        (spec(1, 3, 20, 20, 5 + count), legacy, "v5_raw"),
        (spec(1, 3 * (5 + count), 20, 20), legacy, "v5_raw"),
    ]:
        outputs = [output]
        if family == "v5_raw":
            outputs = [spec(*output.shape, name=f"level{index}") for index in range(3)]
        layout = choose(outputs, metadata, classes=count)
        assert (layout.family, layout.classes) == (family, count), (output, metadata)


def test_b84_pose_rows_come_from_the_class_count() -> None:
    layout = choose(spec(1, 22, 8400), {"task": "pose", "names": names(3)})
    assert (layout.classes, layout.keypoints, layout.keypoint_dims) == (3, 5, 3)
    layout = choose(spec(1, 56, 8400), {"task": "pose", "names": names(1), "kpt_shape": "[17, 3]"})
    assert (layout.keypoints, layout.keypoint_dims, layout.extra) == (17, 3, 51)
    layout = choose(spec(1, 13, 8400), {"task": "pose", "names": names(1), "kpt_shape": "[4, 2]"})
    assert (layout.keypoints, layout.keypoint_dims) == (4, 2)
    with pytest.raises(SpecError, match="2 x 3 or 3 x 2"):
        choose(spec(1, 13, 8400), {"task": "pose", "names": names(3)})
    with pytest.raises(SpecError, match="fit no known"):
        choose(spec(1, 14, 8400), {"task": "pose", "names": names(3)})
    with pytest.raises(SpecError, match="keypoints"):
        choose(spec(1, 57, 8400), {"task": "pose", "names": names(1), "kpt_shape": "[17, 3]"})
    with pytest.raises(SpecError, match="fit no known"):
        choose(spec(1, 22, 8400), {"task": "pose"})


def test_other_tasks() -> None:
    segment = choose([spec(1, 116, 8400), PROTO])
    assert (segment.task, segment.classes, segment.mask_coefficients, segment.proto) == ("segment", 80, 32, "proto")
    segment = choose([spec(1, 25200, 117), PROTO], {"names": names(80)})
    assert (segment.family, segment.task, segment.classes) == ("v5", "segment", 80)
    segment = choose([spec(1, 300, 38), PROTO], {"task": "segment", "end2end": "True", "names": names(2)})
    assert (segment.family, segment.task, segment.extra) == ("end2end", "segment", 32)
    oriented = choose(spec(1, 20, 21504), {"task": "obb", "names": names(15)}, spec(1, 3, 1024, 1024))
    assert (oriented.task, oriented.classes, oriented.extra) == ("obb", 15, 1)
    classifier = choose(spec("n", 1000), {"task": "classify"}, spec("n", 3, 224, 224))
    assert (classifier.family, classifier.task, classifier.classes) == ("classify", "classify", 1000)


def test_override_forms() -> None:
    unclear = spec("n", "m", 6)
    assert choose(unclear, source=DYNAMIC, override="yolov5").classes == 1
    assert choose(unclear, source=DYNAMIC, override="v11").classes == 2
    assert choose(unclear, source=DYNAMIC, override="yolo26").family == "end2end"
    assert choose(unclear, source=DYNAMIC, override={"family": "yolox", "strides": [8, 16, 32, 64]}).strides[-1] == 64
    pose = choose(spec(1, 13, 8400), override={"task": "pose", "classes": 3, "keypoints": 2, "keypoint_dims": 3})
    assert (pose.task, pose.keypoints) == ("pose", 2)
    raw = [spec(1, 255, s, s, name=f"o{s}") for s in (80, 40, 20)]
    assert choose(raw, override="v7_raw").anchors[0] == (12, 16, 19, 36, 40, 28)
    for layout in (pose, choose(raw, override="v5_raw")):
        again = json.loads(json.dumps(layout_to_json(layout)))
        outputs = raw if layout.levels else [spec(1, 13, 8400)]
        assert choose(outputs, override=again) == layout


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("v99", "unknown family"),
        ({"famly": "v8"}, "unknown key 'famly'"),
        ({"task": "track"}, "task"),
        ({"classes": 0}, "classes"),
        ({"classes": 7}, "fit no known"),
        ({"family": "v8", "classes": 80, "output": "nothing"}, "no output 'nothing'"),
        ({"family": "v8", "classes": "x", "output": "output0"}, "expected int"),
    ],
)
def test_bad_overrides_are_refused(override: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        choose(spec(1, 84, 8400), override=override)


@pytest.mark.parametrize("anchors", [[[1, 2]], [["a"] * 6] * 3, [[0] * 6] * 3, 5])
def test_bad_anchors_are_refused(anchors: Any) -> None:
    raw = [spec(1, 3, s, s, 7, name=f"o{s}") for s in (80, 40, 20)]
    with pytest.raises(SpecError, match="anchors"):
        choose(raw, override={"family": "v5_raw", "anchors": anchors})


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [spec(1)],
        [spec(1, 84, 8400), spec(1, 84, 8400, name="b")],
        [spec(1, 5), spec(1, 6, name="b")],
        [spec(1, 4, 8400)],
        [spec("n", "a", "b")],
        [spec(1, 3, 640, 640)],
        [spec(1, 84, 8400), PROTO, spec(1, 2, name="x")],
    ],
)
def test_outputs_of_other_models_are_refused(outputs: Any) -> None:
    if len(outputs) == 3:
        with pytest.raises(SpecError):
            choose(outputs, {"names": names(80)})
        return
    with pytest.raises(SpecError):
        choose(outputs)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("names", "__import__('os').system('x')"),
        ("names", "{0: 'a', 2: 'b'}"),
        ("names", "5"),
        ("names", "{'x': 'a'}"),
        ("names", "[" * 5000),
        ("imgsz", "[640]"),
        ("stride", "-3"),
        ("kpt_shape", "[17, 3, 2]"),
        ("task", "juggle"),
        ("channels", "'three'"),
    ],
)
def test_malformed_metadata_is_refused(key: str, value: str) -> None:
    with pytest.raises(SpecError, match=key):
        parse_metadata({key: value})


def test_metadata_values() -> None:
    known = parse_metadata(
        {
            "names": names(2),
            "imgsz": "[384, 640]",
            "stride": "32",
            "channels": "1",
            "description": "Ultralytics YOLO11n model trained on x",
            "author": "y",
        }
    )
    assert known.names == {0: "it's 0", 1: "it's 1"}
    assert (known.size, known.stride, known.channels, known.generation) == ((384, 640), 32, 1, "v11")
    assert parse_names(["a", "b"]) == {0: "a", 1: "b"} == parse_names({"1": "b", "0": "a"})


def test_b90_defaults_follow_the_input() -> None:
    layout = choose(spec(1, 84, 8400))
    gray = default_preprocess(layout, metadata=parse_metadata({}), input_spec=spec(1, 1, 640, 640))
    assert (gray.channels, gray.channel_count) == ("gray", 1)
    with pytest.raises(SpecError, match="channels-last"):
        default_preprocess(layout, metadata=parse_metadata({}), input_spec=spec(1, 640, 640, 3))
    yolox = choose(spec(1, 8400, 85), override="yolox")
    chosen = default_preprocess(yolox, metadata=parse_metadata({}), input_spec=FIXED)
    assert (chosen.channels, chosen.scale) == ("bgr", 1.0)
    known = parse_metadata({"imgsz": "[300, 500]", "stride": "32"})
    assert default_buckets(layout, metadata=known, input_spec=DYNAMIC, stride=32) == (Resolution(320, 512),)
    assert default_buckets(layout, metadata=known, input_spec=FIXED, stride=32) == (Resolution(640, 640),)
