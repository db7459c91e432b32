"""The demo and what it shows, on a small model in place of the zoo's; real weights under the zoo marker."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from tiny_yolo import write_images

from edgeds.bundle import verify_bundle
from edgeds.errors import BundleError, EdgedsError, InputError, ModelError, SpecError
from edgeds.specs import Resolution
from edgeds.workshop import demo, show
from edgeds.workshop.demo import run_demo
from edgeds.workshop.package import create_bundle
from edgeds.workshop.samples import PhotoCrops


@pytest.fixture
def small_zoo(model: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "fetch_model", lambda name, *, quiet: model)
    monkeypatch.setattr(demo, "fetch_photos", lambda *, quiet: sorted(images.iterdir()))


def quick(out: Path, **options: Any) -> demo.DemoResult:
    return run_demo(out, **{"long_side_px": 64, "seconds": 0.05, "quiet": True, **options})


@pytest.mark.usefixtures("small_zoo")
def test_demo_leaves_bundle_pictures_and_page(tmp_path: Path) -> None:
    result = quick(tmp_path / "out")
    assert sorted(item.name for item in (tmp_path / "out").iterdir()) == sorted(demo.ENTRIES)
    assert verify_bundle(result.bundle) == []
    assert len(result.images) == 6
    assert all(cv2.imread(str(path)).shape == (64, 64, 3) for path in result.images)
    assert result.fps_float > 0
    assert result.fps_int8 > 0
    page = result.report.read_text(encoding="utf-8")
    assert page.count("<img ") == 6
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert set(report["bench"]) == {"float", "int8"}
    assert sum(report["objects"].values()) == result.detections


@pytest.mark.usefixtures("small_zoo")
def test_own_images_of_every_kind_and_what_cannot_be_used_is_left_out(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "my data"
    write_images(data / "sub", count=3, sizes=((40, 90),), seed=5)
    rng = np.random.default_rng(0)
    cv2.imwrite(str(data / "rgba.png"), rng.integers(0, 255, (50, 60, 4), np.uint8))
    cv2.imwrite(str(data / "gray16.png"), rng.integers(0, 65535, (50, 60), np.uint16))
    (data / "empty.jpg").write_bytes(b"")
    (data / "text.png").write_bytes(b"not an image")
    shutil.copy(data / "rgba.png", data / "twin.png")
    result = quick(tmp_path / "out", data=data)
    assert [path.stem.split("-")[1] for path in result.images] == ["gray16", "rgba", "000", "001", "002"]
    assert caplog.text.count("left out:") == 3
    assert "twin.png has the same content as" in caplog.text


@pytest.mark.usefixtures("small_zoo")
def test_large_folder_is_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MAX_CALIBRATION", 3)
    write_images(tmp_path / "data", count=9)
    result = quick(tmp_path / "out", data=tmp_path / "data")
    assert [path.stem for path in result.images] == ["00-001", "01-004", "02-007"]


@pytest.mark.usefixtures("small_zoo")
@pytest.mark.parametrize("kind", ["missing", "file", "empty", "unreadable", "seconds", "out-zip", "out-taken"])
def test_bad_input_ends_in_one_sentence_and_leaves_nothing(tmp_path: Path, images: Path, kind: str) -> None:
    folder = tmp_path / "data"
    if kind in ("empty", "unreadable"):
        folder.mkdir()
        (folder / ("x.jpg" if kind == "unreadable" else "x.txt")).write_bytes(b"x")
    if kind == "file":
        folder.write_bytes(b"x")
    out = {"out-zip": tmp_path / "d.zip", "out-taken": images}.get(kind, tmp_path / "new" / "out")
    options: dict[str, Any] = {"seconds": float("nan")} if kind == "seconds" else {}
    data = None if kind in ("seconds", "out-zip", "out-taken") else folder
    with pytest.raises((SpecError, InputError)) as caught:
        quick(out, data=data, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("small_zoo")
def test_replace_renews_an_earlier_demo_and_nothing_else(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quick(out)
    stale = out / "pictures" / "99-stale.jpg"
    stale.write_bytes(b"x")
    with pytest.raises(SpecError, match="--replace"):
        quick(out)
    quick(out, replace=True)
    assert not stale.exists()
    (out / "thesis.docx").write_bytes(b"x")
    with pytest.raises(SpecError, match=r"holds 'thesis\.docx', which is not of an earlier demo"):
        quick(out, replace=True)


@pytest.mark.usefixtures("small_zoo")
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("stage", ["annotate_photos", "measure_speed", "write_run_report"])
def test_failure_at_any_stage_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, stage: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise failure

    monkeypatch.setattr(demo, stage, fail)
    with pytest.raises((KeyboardInterrupt, BundleError)):
        quick(tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_model_that_cannot_be_fetched_is_said_before_any_work(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str, *, quiet: bool) -> Path:
        raise ModelError("yolo11n: no source can be reached; put yolo11n.onnx into ...")

    monkeypatch.setattr(demo, "fetch_model", offline)
    with pytest.raises(ModelError, match=r"put yolo11n\.onnx"):
        quick(tmp_path / "out", data=images)
    assert not (tmp_path / "out").exists()


def test_pictures_replace_those_of_an_earlier_run_but_no_other_files(model: Path, images: Path, tmp_path: Path) -> None:
    bundle = create_bundle(model, out=tmp_path / "b", task="detect", sizes=(Resolution(64, 64),), float_only=True)
    photos = sorted(images.iterdir())
    show.annotate_photos(bundle, photos, tmp_path / "p")
    pictures, results = show.annotate_photos(bundle, [photos[3], tmp_path / "gone.png"], tmp_path / "p")
    assert sorted((tmp_path / "p").iterdir()) == pictures == [tmp_path / "p" / "00-003.jpg"]
    assert [result.ok for result in results] == [True, False]
    with pytest.raises(SpecError, match=r"000\.png"):
        show.annotate_photos(bundle, photos, images)
    assert len(list(images.iterdir())) == 6


def test_speed_and_report_of_a_float_bundle(model: Path, images: Path, tmp_path: Path) -> None:
    bundle = create_bundle(model, out=tmp_path / "b", task="detect", sizes=(Resolution(64, 64),), float_only=True)
    photos = sorted(images.iterdir())
    reports = show.measure_speed(bundle, photos, seconds=0.03, quiet=True)
    assert set(reports) == {"float"}
    pictures, results = show.annotate_photos(bundle, photos, tmp_path / "p")
    page = show.write_run_report(tmp_path, [Resolution(64, 64)], pictures, results, reports, model="<m>")
    assert "&lt;m&gt; in float found" in page.read_text(encoding="utf-8")


def test_photo_crops_are_the_same_again_and_never_repeat(tmp_path: Path) -> None:
    photos = write_images(tmp_path / "i", count=2)
    plain = tmp_path / "plain.png"
    cv2.imwrite(str(plain), np.full((1, 1, 3), 7, np.uint8))
    crops = PhotoCrops([*photos, plain, plain], crops_per_photo=3)
    first, second = ([image.tobytes() for image in crops] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(first) == 2 * 5 + 1


@pytest.mark.slow
@pytest.mark.zoo
def test_demo_on_real_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="edgeds"):
        result = run_demo(tmp_path / "out", long_side_px=320, seconds=0.3, quiet=True)
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert report["objects"]["person"] >= 5
    assert report["objects"]["bus"] == 1
    assert len(result.images) == 8
    assert "served but no calibration" not in caplog.text


@pytest.mark.zoo
def test_real_model_refuses_wrong_names_and_task(tmp_path: Path, images: Path) -> None:
    from edgeds.zoo import fetch_model

    model = fetch_model("yolo11n", quiet=True)
    wrong: list[dict[str, Any]] = [{"names": ["a", "b"]}, {"task": "segment"}, {"sizes": (Resolution(100, 100),)}]
    for options in wrong:
        with pytest.raises(EdgedsError) as caught:
            create_bundle(model, out=tmp_path / "b", **{"task": "detect", "calib": images, **options})
        assert isinstance(caught.value, SpecError)
    assert not (tmp_path / "b").exists()
