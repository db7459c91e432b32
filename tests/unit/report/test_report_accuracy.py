"""mAP: values that can be worked out by hand, crowds, empty results, and the zoo model's known figure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgeds.errors import InputError, SpecError
from edgeds.pipelines.yolo import Result
from edgeds.report.accuracy import coco_map, evaluate_detector
from edgeds.report.datasets import DetectionDataset, Sample
from edgeds.specs import Resolution

pytest.importorskip("pycocotools")

SIZE = Resolution(100, 100)
NAMES = {0: "a", 1: "b"}


def sample(boxes, cls, crowd=None) -> Sample:
    boxes = np.asarray(boxes, np.float64).reshape(-1, 4)
    crowd = None if crowd is None else np.asarray(crowd, bool)
    return Sample(path=Path("x.jpg"), cls=np.asarray(cls, np.int64), boxes=boxes, normalised=False, crowd=crowd)


def result(boxes, conf, cls) -> Result:
    return Result(
        names=NAMES,
        size=SIZE,
        xyxy=np.asarray(boxes, np.float32).reshape(-1, 4),
        conf=np.asarray(conf, np.float32),
        cls=np.asarray(cls, np.int64),
    )


ONE, TWO, FAR = [10, 10, 50, 50], [60, 60, 90, 90], [0, 80, 15, 99]


def test_perfect_detections_give_one() -> None:
    report = coco_map([sample([ONE, TWO], [0, 1])], [result([ONE, TWO], [0.9, 0.8], [0, 1])], names=NAMES)
    assert (report["metric"], report["value"], report["map50"], report["map75"]) == ("map50_95", 1.0, 1.0, 1.0)
    assert report["per_class"] == {"a": 1.0, "b": 1.0}
    assert report["objects"] == 2


def test_values_by_hand() -> None:
    """Two objects, the first found: precision 1 up to recall 0.5, which is 51 of COCO's 101 recall points."""
    half = coco_map([sample([ONE, TWO], [0, 0])], [result([ONE, FAR], [0.9, 0.8], [0, 0])], names=NAMES)
    assert half["map50_95"] == pytest.approx(51 / 101, abs=1e-5)
    # A false alarm before the hit halves the precision.
    after = coco_map([sample([ONE], [0])], [result([FAR, ONE], [0.9, 0.8], [0, 0])], names=NAMES)
    assert after["map50"] == pytest.approx(0.5, abs=1e-5)
    # 40 x 36 of 40 x 40 shared: IoU 0.9, found at 9 of the 10 thresholds.
    loose = coco_map([sample([ONE], [0])], [result([[10, 10, 50, 46.001]], [0.9], [0])], names=NAMES)
    assert loose["map50_95"] == pytest.approx(0.9, abs=1e-5)


def test_classes_are_kept_apart_and_absent_classes_do_not_count() -> None:
    report = coco_map([sample([ONE], [0])], [result([ONE, TWO], [0.9, 0.99], [1, 1])], names=NAMES)
    assert report["value"] == 0.0
    report = coco_map([sample([ONE], [0])], [result([ONE, TWO], [0.9, 0.99], [0, 1])], names=NAMES)
    assert (report["value"], list(report["per_class"])) == (1.0, ["a"])


def test_crowds_are_neither_missed_nor_wrong() -> None:
    truth = sample([ONE, [0, 50, 100, 100]], [0, 0], crowd=[False, True])
    report = coco_map([truth], [result([ONE, TWO], [0.9, 0.95], [0, 0])], names=NAMES)
    assert report["value"] == 1.0


def test_nothing_found_is_zero_and_nothing_to_find_is_refused(capsys) -> None:
    empty = result([], [], [])
    assert coco_map([sample([ONE], [0])], [empty], names=NAMES)["value"] == 0.0
    with pytest.raises(SpecError, match="no objects"):
        coco_map([sample([], [])], [empty], names=NAMES)
    assert capsys.readouterr().out == ""


class FakePipeline:
    """Gives prepared results and remembers the thresholds it was asked for."""

    names, task = NAMES, "detect"

    def __init__(self, results) -> None:
        self.results = results
        self.options = SimpleNamespace()

    def with_options(self, **options):
        self.options = SimpleNamespace(**options)
        return self

    def predict_each(self, paths):
        return iter(self.results[: len(list(paths))])


def test_evaluation_uses_the_thresholds_of_the_metric() -> None:
    samples = (sample([ONE], [0]), sample([TWO], [1]))
    pipeline = FakePipeline([result([ONE], [0.9], [0]), result([TWO], [0.002], [1])])
    dataset = DetectionDataset(root=Path("d"), split=None, samples=samples)
    report = evaluate_detector(pipeline, dataset, quiet=True)
    assert (report["value"], report["images"]) == (1.0, 2)
    assert vars(pipeline.options) == {"conf": 0.001, "iou": 0.7, "max_det": 300, "multi_label": True}
    assert evaluate_detector(pipeline, dataset, limit=1, quiet=True)["images"] == 1


def test_refusals() -> None:
    dataset = DetectionDataset(root=Path("d"), split=None, samples=(sample([ONE], [0]),))
    broken = Result(names=NAMES, error=InputError("x.jpg: broken"))
    with pytest.raises(InputError, match=r"x\.jpg: broken"):
        evaluate_detector(FakePipeline([broken]), dataset, quiet=True)
    foreign = DetectionDataset(root=Path("d"), split=None, samples=(sample([ONE], [5]),))
    with pytest.raises(SpecError, match="class 5"):
        evaluate_detector(FakePipeline([]), foreign, quiet=True)
    classifier = FakePipeline([])
    classifier.task = "classify"
    with pytest.raises(SpecError, match="classifies"):
        evaluate_detector(classifier, dataset, quiet=True)
