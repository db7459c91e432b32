"""Labelled data sets: the forms people have, and refusals with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgeds.errors import SpecError
from edgeds.report.dataset_yaml import read_data_yaml
from edgeds.report.datasets import open_detection_dataset
from edgeds.specs import Resolution


def put(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def yolo(tmp_path):
    for split in ("train2017", "val2017"):
        for name in ("b", "a"):
            put(tmp_path / "images" / split / f"{name}.jpg")
        put(tmp_path / "labels" / split / "a.txt", "0 0.5 0.5 0.2 0.4\n\n1 0.1 0.1 0.2 0.2\n")
    return tmp_path


def test_yolo_folder_prefers_val_and_missing_labels_mean_no_objects(yolo) -> None:
    data = open_detection_dataset(yolo)
    assert (data.split, [sample.path.name for sample in data.samples]) == ("val2017", ["a.jpg", "b.jpg"])
    np.testing.assert_allclose(data.samples[0].boxes[0], [0.4, 0.3, 0.6, 0.7])
    np.testing.assert_allclose(data.samples[0].boxes_px(Resolution(100, 200))[0], [80, 30, 120, 70])
    assert data.samples[0].cls.tolist() == [0, 1]
    assert data.samples[1].cls.size == 0
    assert open_detection_dataset(yolo, split="train").split == "train2017"
    assert len(open_detection_dataset(yolo, limit=1)) == 1


def test_yaml_chooses_the_split_and_names(yolo) -> None:
    put(
        yolo / "data.yaml", "path: .\ntrain: images/train2017\nval: images/val2017  # held out\nnames: [cat, 'a dog']\n"
    )
    data = open_detection_dataset(yolo)
    assert (data.split, dict(data.names)) == ("val", {0: "cat", 1: "a dog"})
    assert open_detection_dataset(yolo / "data.yaml", split="train").samples[0].path.parent.name == "train2017"
    put(yolo / "data.yaml", "path: ../not/here\nval: images/val2017\nnames:\n  0: cat\n  1: dog\n")
    assert dict(open_detection_dataset(yolo / "data.yaml").names) == {0: "cat", 1: "dog"}


@pytest.mark.parametrize("layout", ["flat", "beside", "roboflow", "list"])
def test_other_folder_forms(tmp_path, layout: str) -> None:
    image, label = {
        "flat": ("images/a.jpg", "labels/a.txt"),
        "beside": ("a.jpg", "a.txt"),
        "roboflow": ("valid/images/a.jpg", "valid/labels/a.txt"),
        "list": ("images/x/a.jpg", "labels/x/a.txt"),
    }[layout]
    put(tmp_path / image)
    put(tmp_path / label, "0 0.5 0.5 0.1 0.1")
    if layout == "list":
        put(tmp_path / "val.txt", "./images/x/a.jpg\n")
        put(tmp_path / "data.yaml", "val: val.txt\nnames: [x]\n")
    data = open_detection_dataset(tmp_path)
    assert [sample.cls.size for sample in data.samples] == [1]


def test_polygons_and_poses_become_boxes_and_repeated_lines_count_once(yolo) -> None:
    put(yolo / "labels/val2017/a.txt", "0 0.1 0.2 0.5 0.2 0.3 0.8\n0 0.5 0.5 0.2 0.4\n0 0.5 0.5 0.2 0.4\n")
    data = open_detection_dataset(yolo)
    np.testing.assert_allclose(data.samples[0].boxes, [[0.1, 0.2, 0.5, 0.8], [0.4, 0.3, 0.6, 0.7]], atol=1e-12)
    put(yolo / "data.yaml", "val: images/val2017\nnames: [x]\nkpt_shape: [2, 3]\n")
    put(yolo / "labels/val2017/a.txt", "0 0.5 0.5 0.2 0.4 0.1 0.1 2 0.2 0.2 2\n")
    np.testing.assert_allclose(open_detection_dataset(yolo).samples[0].boxes, [[0.4, 0.3, 0.6, 0.7]])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 0.5 0.5 0.2", "4 values"),
        ("0 0.5 0.5 0.2 0.2 0.9", "6 values"),
        ("cat 0.5 0.5 0.2 0.2", "expected numbers"),
        ("0.5 0.5 0.5 0.2 0.2", "whole number"),
        ("-1 0.5 0.5 0.2 0.2", "whole number"),
        ("2 0.5 0.5 0.2 0.2", "2 classes"),
        ("0 50 50 20 20", "0 to 1"),
        ("0 0.5 0.5 0 0.2", "positive"),
        ("0 nan 0.5 0.1 0.2", "finite"),
        ("0 0.5 0.5 inf 0.2", "finite"),
    ],
)
def test_bad_label_lines_name_file_and_line(yolo, line: str, message: str) -> None:
    path = put(yolo / "labels/val2017/b.txt", f"0 0.5 0.5 0.2 0.2\n{line}\n")
    with pytest.raises(SpecError, match=message) as info:
        open_detection_dataset(yolo, names={0: "a", 1: "b"})
    assert str(info.value).startswith(f"{path}:2:")


def test_useless_folders_are_refused(tmp_path, yolo) -> None:
    (yolo / "labels/val2017/a.txt").write_bytes(b"\xff\xfe0")
    with pytest.raises(SpecError, match="UTF-8"):
        open_detection_dataset(yolo)
    for name, make in [("none", lambda p: None), ("empty", Path.mkdir)]:
        make(tmp_path / name)
        with pytest.raises(SpecError, match=name):
            open_detection_dataset(tmp_path / name)
    put(tmp_path / "bare" / "images" / "a.jpg")
    with pytest.raises(SpecError, match="none of the 1 images has a label"):
        open_detection_dataset(tmp_path / "bare")
    with pytest.raises(SpecError, match="expected a folder"):
        open_detection_dataset(put(tmp_path / "x.csv"))
    with pytest.raises(SpecError, match="no split 'test'"):
        open_detection_dataset(yolo, split="test")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("names: [a, b]", ["a", "b"]),
        ("names: ['a, b', \"c: d\", e's]", ["a, b", "c: d", "e's"]),
        ("names: [a,\n  b,\n  c]\nnc: 3", ["a", "b", "c"]),
        ("names: {0: a, 1: 'b c'}", {"0": "a", "1": "b c"}),
        ("names:\n- a\n- 'b # c'  # comment", ["a", "b # c"]),
        ("names:\n  0: a\n\n  1: traffic light # x\nval: y", {"0": "a", "1": "traffic light"}),
        ("download: |\n  names: wrong\nnames: [a]", ["a"]),
    ],
)
def test_yaml_subset(tmp_path, text: str, names) -> None:
    assert read_data_yaml(put(tmp_path / "d.yaml", text))["names"] == names


@pytest.mark.parametrize("text", ["names: [a, b", "names: {a, b}", "names:\n  what is this", "nc: many"])
def test_yaml_beyond_the_subset_is_refused(tmp_path, text: str) -> None:
    with pytest.raises(SpecError, match=r"d\.yaml"):
        read_data_yaml(put(tmp_path / "d.yaml", text))


def coco(tmp_path, **changes) -> Path:
    put(tmp_path / "images" / "val2017" / "a.jpg")
    put(tmp_path / "images" / "val2017" / "b.jpg")
    data = {
        "images": [{"id": 7, "file_name": "b.jpg"}, {"id": 3, "file_name": "a.jpg"}],
        "categories": [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}],
        "annotations": [
            {"id": 1, "image_id": 3, "category_id": 18, "bbox": [10, 20, 30, 40], "area": 600, "iscrowd": 0},
            {"id": 2, "image_id": 3, "category_id": 1, "bbox": [0, 0, 5, 5], "iscrowd": 1},
        ],
    }
    put(tmp_path / "annotations" / "instances_val2017.json", json.dumps({**data, **changes}))
    return tmp_path


def test_coco_json_maps_categories_by_name_and_keeps_crowds(tmp_path) -> None:
    root = coco(tmp_path)
    put(root / "annotations" / "instances_train2017.json", "{}")
    data = open_detection_dataset(root, names={0: "dog", 1: "cat", 2: "Person"})
    assert [sample.path.name for sample in data.samples] == ["a.jpg", "b.jpg"]
    first = data.samples[0]
    assert first.cls.tolist() == [0, 2]
    assert first.boxes_px(Resolution(99, 99)).tolist() == [[10, 20, 40, 60], [0, 0, 5, 5]]
    assert first.crowd.tolist() == [False, True]
    assert first.area_px.tolist() == [600, 25]
    assert dict(open_detection_dataset(root).names) == {0: "person", 1: "dog"}
    assert len(open_detection_dataset(root / "annotations" / "instances_val2017.json")) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": []}, "lists no images"),
        ({"images": [{"id": 3, "file_name": "gone.jpg"}]}, "gone.jpg"),
        ({"images": [{"id": 3, "file_name": "../a.jpg"}]}, "leaves"),
        ({"images": [{"id": 9, "file_name": "a.jpg"}]}, "image 3"),
        ({"annotations": [{"image_id": 3, "category_id": 99, "bbox": [0, 0, 1, 1]}]}, "category_id 99"),
        ({"annotations": [{"image_id": 3, "category_id": 1, "bbox": [0, 0, 1]}]}, r"annotations\[0\]"),
        ({"annotations": [{"image_id": 3, "category_id": 1, "bbox": [0, 0, 1, "x"]}]}, "finite"),
        ({"annotations": [{"image_id": 3, "category_id": 1, "bbox": [0, 0, 1, 1], "area": "big"}]}, "finite"),
        ({"annotations": [{"image_id": [3], "category_id": 1, "bbox": [0, 0, 1, 1]}]}, "image_id"),
        ({"annotations": [{"image_id": 3, "category_id": {}, "bbox": [0, 0, 1, 1]}]}, "category_id"),
        ({"annotations": 5}, "annotations"),
        ({"categories": [{"id": "x"}]}, "category"),
    ],
)
def test_damaged_coco_json_is_refused(tmp_path, changes, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        open_detection_dataset(coco(tmp_path, **changes))


def test_coco_classes_that_the_model_lacks(tmp_path) -> None:
    with pytest.raises(SpecError, match="no class named person"):
        open_detection_dataset(coco(tmp_path), names={0: "dog", 1: "cat"})
