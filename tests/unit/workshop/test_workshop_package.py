"""From a model and samples to a bundle: what is in it, that it reproduces, and that nothing is left after a failure."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_yolo import NAMES, write_images, write_labelled, write_tiny_yolo

from edgeds.bundle import open_bundle, verify_bundle
from edgeds.compress.ranges import load_ranges
from edgeds.engines import open_engine
from edgeds.errors import BundleError, CalibrationError, EdgedsError, ModelError, SpecError
from edgeds.graph.cost import ModelCost
from edgeds.graph.session import open_session
from edgeds.pipelines.yolo import YoloPipeline
from edgeds.specs import Resolution, from_json
from edgeds.workshop import package, parts
from edgeds.workshop.package import create_bundle

SIZE = Resolution(64, 64)


def create(model: Path, out: Path, **options: Any) -> Path:
    return create_bundle(model, out=out, **{"task": "detect", "sizes": (SIZE,), "quiet": True, **options})


def test_bundle_holds_all_that_serving_needs(model: Path, images: Path, tmp_path: Path) -> None:
    path = create(model, tmp_path / "b", calib=images, target="orin-nano@15W")
    assert verify_bundle(path) == []
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
        assert set(manifest.files) == {
            *("model.onnx", "model.cpu.onnx", "variants/float.onnx"),
            *("variants/float16.onnx", "variants/int8_fp16.onnx"),
            *("ranges.json", "cost.json", "golden.npz"),
        }
        assert set(manifest.models) == {"int8", "cpu_int8", "float", "float16", "int8_fp16"}
        assert manifest.models["int8_fp16"] == "variants/int8_fp16.onnx"
        assert (manifest.task, manifest.precision, manifest.license) == ("detect", "int8", "MIT")
        assert manifest.names == NAMES
        assert manifest.buckets == (SIZE,)
        assert bundle.preprocess().digest() == manifest.preprocess_digest
        assert manifest.head is not None
        assert manifest.head["family"] == "v8"
        assert manifest.target == {"name": "orin-nano-8gb", "mode": "15W"}
        assert manifest.plan is not None
        assert manifest.plan["mode"] == "15W"
        assert manifest.plan["status"] == "predicted"
        assert manifest.calibration is not None
        assert manifest.calibration["samples"] == 6
        assert manifest.calibration["shapes"] == {"images=1x3x64x64": 6}
        assert manifest.calibration["int8_flops_share"] > 0.9
        assert manifest.provenance["cpu_int8_speedup"] > 0
        ranges = load_ranges(bundle.path("ranges.json"))
        assert ranges.key.set_sha256 == manifest.calibration["set_digest"]
        assert ranges.tensors
        cost = from_json(ModelCost, json.loads(bundle.path("cost.json").read_bytes()), where="cost.json")
        assert cost.inputs["images"] == (1, 3, 64, 64)
        assert cost.int8_flops_share == pytest.approx(manifest.calibration["int8_flops_share"])


def test_golden_samples_reproduce_and_int8_stays_close_to_float(model: Path, images: Path, tmp_path: Path) -> None:
    with open_bundle(create(model, tmp_path / "b", calib=images)) as bundle:
        golden = bundle.golden()
        for variant in ("float", "int8"):
            session = open_session(bundle.model_path(variant))
            for index in range(2):
                (output,) = session.run(None, {"images": golden[f"input/{index}/images"]})
                np.testing.assert_allclose(output, golden[f"{variant}/{index}/output0"], rtol=1e-5, atol=1e-5)
        scores_float, scores_int8 = (golden[f"{variant}/0/output0"][:, 4:] for variant in ("float", "int8"))
        assert np.abs(scores_float - scores_int8).max() < 0.05
        with open_engine(bundle, backend="onnxruntime") as engine:  # the CPU form states the same numbers
            assert engine.precision == "int8"
            answer = engine.infer({"images": golden["input/0/images"]})["output0"]
        np.testing.assert_allclose(answer, golden["int8/0/output0"], atol=0.05 * 64)


def test_detector_of_the_bundle_finds_what_the_float_model_finds(model: Path, images: Path, tmp_path: Path) -> None:
    path = create(model, tmp_path / "b", calib=images)
    photos = sorted(images.iterdir())
    with YoloPipeline.from_bundle(path, conf=0.01) as quantized, YoloPipeline.from_model(model, conf=0.01) as plain:
        for ours, reference in zip(quantized.predict(photos), plain.predict(photos), strict=True):
            # Scores of random weights lie close together, so ranks may swap; the best score itself must hold.
            assert len(reference) > 0
            assert ours.conf[:1] == pytest.approx(reference.conf[:1], abs=0.03)


def test_same_inputs_give_the_same_bundle_except_times(model: Path, images: Path, tmp_path: Path) -> None:
    first, second = (create(model, tmp_path / name, calib=images) for name in ("a", "b"))
    with open_bundle(first) as a, open_bundle(second) as b:
        assert a.manifest.files == b.manifest.files
        assert a.manifest.calibration == b.manifest.calibration


@pytest.mark.parametrize("kind", ["npz", "paths", "arrays", "crops"])
def test_calibrates_from_every_kind_of_source(
    model: Path, images: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    from edgeds.workshop.samples import PhotoCrops

    arrays = np.random.default_rng(0).random((5, 1, 3, 64, 64), np.float32)
    photos = sorted(images.iterdir())
    np.savez(tmp_path / "feeds.npz", images=arrays)
    sources = {
        "npz": tmp_path / "feeds.npz",
        "paths": photos,
        "arrays": [{"images": array} for array in arrays],
        "crops": PhotoCrops(photos[:2], crops_per_photo=2),
    }
    with open_bundle(create(model, tmp_path / "b", calib=sources[kind])) as bundle:
        assert bundle.manifest.calibration is not None
        assert bundle.manifest.calibration["samples"] == {"npz": 5, "paths": 6, "arrays": 5, "crops": 8}[kind]
        unchecked = any("was not checked" in note for note in bundle.manifest.calibration["notes"])
    assert unchecked == (kind == "npz")


def test_size_that_calibration_never_had_is_noted_b47(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path / "mixed", sizes=((64, 64), (64, 96)))
    sizes = (SIZE, Resolution(64, 96), Resolution(128, 64))
    with open_bundle(create(model, tmp_path / "b", calib=tmp_path / "mixed", sizes=sizes)) as bundle:
        calibration = bundle.manifest.calibration
    assert calibration is not None
    assert set(calibration["shapes"]) == {"images=1x3x64x64", "images=1x3x64x96"}
    assert [note for note in calibration["notes"] if "128x64" in note]
    assert not [note for note in calibration["notes"] if "64x96 is served" in note]
    assert "128x64 is served but no calibration sample had it" in caplog.text


def test_slower_int8_on_this_cpu_is_warned_about_and_stored(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("edgeds.workshop.measure.compare_cpu_speed", lambda *_, **__: 0.8123)
    with open_bundle(create(model, tmp_path / "b", calib=images)) as bundle:
        assert bundle.manifest.provenance["cpu_int8_speedup"] == 0.812
    assert "slower than the float model" in caplog.text


def test_float_only(model: Path, tmp_path: Path) -> None:
    with open_bundle(create(model, tmp_path / "b", float_only=True)) as bundle:
        assert set(bundle.manifest.files) == {"model.onnx", "cost.json"}
        assert bundle.manifest.precision == "float"
        assert bundle.manifest.calibration is None
    with YoloPipeline.from_bundle(tmp_path / "b") as pipeline:
        assert pipeline.predict(np.zeros((50, 70, 3), np.uint8))[0].ok


def test_model_with_external_data_becomes_self_contained(images: Path, tmp_path: Path) -> None:
    import onnx

    source = tmp_path / "src"
    source.mkdir()
    loaded = onnx.load(str(write_tiny_yolo(tmp_path / "tiny.onnx")))
    onnx.save(loaded, str(source / "m.onnx"), save_as_external_data=True, location="m.bin", size_threshold=0)
    path = create(source / "m.onnx", tmp_path / "b", calib=images)
    for item in source.iterdir():
        item.unlink()  # the bundle must not need it
    with YoloPipeline.from_bundle(path) as pipeline, YoloPipeline.from_bundle(path, precision="float") as plain:
        assert pipeline.predict(sorted(images.iterdir()))[0].ok
        assert plain.predict(sorted(images.iterdir()))[0].ok


def test_large_weights_lie_in_listed_side_files(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 1 GiB weights go beside the model; the limit is lowered here instead."""
    from edgeds.graph.io import save_model

    monkeypatch.setattr(parts, "save_model", lambda m, path: save_model(m, path, inline_limit_bytes=1))
    monkeypatch.setattr(
        "edgeds.compress.quantize_report.save_model", lambda m, path: save_model(m, path, inline_limit_bytes=1)
    )
    path = create(model, tmp_path / "b", calib=images)
    with open_bundle(path) as bundle:
        assert {"model.onnx.data", "model.cpu.onnx.data", "variants/float.onnx.data"} <= set(bundle.manifest.files)
    for precision in ("int8", "float"):
        with YoloPipeline.from_bundle(path, precision=precision) as pipeline:
            assert pipeline.predict(sorted(images.iterdir()))[0].ok


def test_model_that_is_no_yolo_is_fed_arrays(tmp_path: Path) -> None:
    model = write_tiny_yolo(tmp_path / "m.onnx", metadata={})
    feeds = {"images": np.random.default_rng(0).random((3, 1, 3, 32, 32), np.float32)}
    with open_bundle(create_bundle(model, out=tmp_path / "b", task="embed", calib=feeds, quiet=True)) as bundle:
        manifest = bundle.manifest
        assert (manifest.task, manifest.preprocess, manifest.head, manifest.buckets) == ("embed", None, None, ())
        assert bundle.golden()["int8/0/output0"].shape == (1, 7, 16)


def test_model_of_fixed_shape_sets_batch_and_size(images: Path, tmp_path: Path) -> None:
    model = write_tiny_yolo(tmp_path / "m.onnx", height=64, width=96, batch=2)
    with open_bundle(create(model, tmp_path / "b", calib=images, sizes=())) as bundle:
        assert bundle.manifest.max_batch == 2
        assert bundle.manifest.buckets == (Resolution(64, 96),)
        assert bundle.manifest.calibration is not None
        assert bundle.manifest.calibration["shapes"] == {"images=2x3x64x96": 3}
    with pytest.raises(SpecError, match="does not fit the fixed input"):
        create(model, tmp_path / "c", calib=images, sizes=(Resolution(64, 64),))


def test_gray_model_gets_gray_images_b90(images: Path, tmp_path: Path) -> None:
    model = write_tiny_yolo(tmp_path / "m.onnx", channels=1)
    with open_bundle(create(model, tmp_path / "b", calib=images)) as bundle:
        assert bundle.preprocess().channels == "gray"
        assert bundle.golden()["input/0/images"].shape == (1, 1, 64, 64)


def test_given_head_and_names_win_over_a_silent_model(images: Path, tmp_path: Path) -> None:
    model = write_tiny_yolo(tmp_path / "m.onnx", metadata={"stride": "8"})
    path = create(model, tmp_path / "b", calib=images, head="yolov8", names=["a", "b", "c"])
    with YoloPipeline.from_bundle(path) as pipeline:
        assert dict(pipeline.names) == {0: "a", 1: "b", 2: "c"}
        assert pipeline.predict(sorted(images.iterdir())[0])[0].ok


def test_accuracy_of_float_and_int8_is_measured_and_shared_images_are_noted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_labelled(tmp_path / "data")
    path = create(model, tmp_path / "b", calib=data / "images" / "train", evaluate=data)
    with open_bundle(path) as bundle:
        accuracy = bundle.manifest.accuracy
        assert accuracy is not None
        assert (accuracy["images"], accuracy["split"]) == (3, "val")
        assert {"float_map50_95", "int8_map50_95", "float_map50", "int8_map50"} <= set(accuracy)
    assert "belong to the calibration set" not in caplog.text
    path = create(model, tmp_path / "c", calib=data / "images" / "train", evaluate=data, split="train")
    assert "4 of the images that accuracy was measured on belong to the calibration set" in caplog.text
    with open_bundle(path) as bundle:
        assert bundle.manifest.calibration is not None
        assert "4 of the images" in bundle.manifest.calibration["notes"][-1]


def test_too_large_a_loss_writes_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_labelled(tmp_path / "data")
    scores = iter([0.451, 0.440] * 2)
    monkeypatch.setattr(
        "edgeds.workshop.measure.evaluate_detector", lambda *_, **__: dict.fromkeys(("map50_95", "map50"), next(scores))
    )
    options: dict[str, Any] = {"calib": data / "images" / "train", "evaluate": data}
    with pytest.raises(CalibrationError, match=r"loses 1\.10 points of mAP50-95 \(45\.10 to 44\.00\)"):
        create(model, tmp_path / "out" / "b", max_drop=1.0, **options)
    assert not (tmp_path / "out").exists()
    create(model, tmp_path / "out" / "b", max_drop=1.2, **options)


BAD: list[tuple[dict[str, Any], type[EdgedsError], str]] = [
    ({"task": "detection"}, SpecError, "did you mean 'detect'"),
    ({"task": " "}, SpecError, "say what the model does"),
    ({"task": "embed"}, SpecError, "belong to the tasks"),
    ({"task": "embed", "sizes": ()}, SpecError, "holds images"),
    ({"task": "segment"}, SpecError, "segment"),
    ({"calib": None}, SpecError, "calibration samples are needed"),
    ({"float_only": True}, SpecError, "leave --calib out"),
    ({"max_batch": 0}, SpecError, "--max-batch"),
    ({"max_drop": 0.5}, SpecError, "--eval DIR"),
    ({"split": "val"}, SpecError, "--split needs labelled images"),
    ({"max_drop": float("nan"), "evaluate": "x"}, SpecError, "--max-drop nan"),
    ({"max_drop": -1.0, "evaluate": "x"}, SpecError, "--max-drop -1"),
    ({"evaluate": "/no/such"}, SpecError, "/no/such"),
    ({"names": ["a", "b"]}, SpecError, "2 classes"),
    ({"names": {0: "a", 2: "b"}}, SpecError, "without a gap"),
    ({"head": "yolov99"}, SpecError, "yolov99"),
    ({"sizes": (Resolution(60, 64),)}, SpecError, "multiple of the model's stride 8; use 64x64"),
    ({"sizes": (Resolution(65536, 65536),)}, SpecError, "more than the"),
    ({"method": "magic"}, SpecError, "magic"),
    ({"samples": 0}, SpecError, "samples"),
    ({"target": "a@b@c"}, SpecError, "not known"),
    ({"target": ""}, SpecError, "BOARD@MODE"),
    ({"calib": "/no/such"}, CalibrationError, "/no/such"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    model: Path, images: Path, tmp_path: Path, options: dict[str, Any], error: type[EdgedsError], message: str
) -> None:
    with pytest.raises(error) as caught:
        create(model, tmp_path / "new" / "b", **{"calib": images, **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_model_that_is_a_folder_or_missing_or_quantized(model: Path, images: Path, tmp_path: Path) -> None:
    for wrong in (images, tmp_path / "none.onnx"):
        with pytest.raises(ModelError, match=wrong.name):
            create(wrong, tmp_path / "b", calib=images)
    done = create(model, tmp_path / "b", calib=images)
    with pytest.raises(ModelError, match="already quantized"):
        create(done / "model.onnx", tmp_path / "c", calib=images)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["b", "images", "tiny.onnx"]


def test_evaluation_data_without_labels_is_refused_before_calibration(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "quantize_model", lambda *_, **__: pytest.fail("calibrated first"))
    with pytest.raises(SpecError, match="label"):
        create(model, tmp_path / "b", calib=images, evaluate=images)


def test_calibration_image_that_cannot_be_read_is_named(model: Path, images: Path, tmp_path: Path) -> None:
    (images / "zz.png").write_bytes(b"not an image")
    with pytest.raises(CalibrationError, match=r"zz\.png"):
        create(model, tmp_path / "b", calib=images)
    assert not (tmp_path / "b").exists()


def test_interrupt_leaves_nothing_and_replace_keeps_the_old_bundle(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = create(model, tmp_path / "b", calib=images)
    before = (out / "bundle.json").read_bytes()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(package, "write_bundle", interrupt)
    for target in (out, tmp_path / "deep" / "er" / "c"):
        with pytest.raises(KeyboardInterrupt):
            create(model, target, calib=images, replace=True)
    assert (out / "bundle.json").read_bytes() == before
    assert verify_bundle(out) == []
    assert not (tmp_path / "deep").exists()
    assert list((tmp_path / "scratch").iterdir()) == []
    assert sorted(item.name for item in tmp_path.iterdir()) == ["b", "images", "scratch", "tiny.onnx"]


def test_replace_swaps_a_bundle(model: Path, images: Path, tmp_path: Path) -> None:
    out = create(model, tmp_path / "b", float_only=True)
    create(model, out, calib=images, replace=True)
    with open_bundle(out) as bundle:
        assert bundle.manifest.precision == "int8"


def test_full_disk_is_one_clear_sentence(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgeds.bundle.writer._put", full)
    with pytest.raises(BundleError, match="b: cannot be read or written: No space left on device; free some space"):
        create(model, tmp_path / "b", calib=images)
    monkeypatch.setattr("edgeds.compress.quantize_report.save_ranges", full)
    with pytest.raises(EdgedsError, match="No space left on device"):
        create(model, tmp_path / "b", calib=images)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["images", "tiny.onnx"]


def test_no_warning_is_logged_on_a_plain_run(
    model: Path, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeds.workshop.measure.compare_cpu_speed", lambda *_, **__: 1.2)
    with caplog.at_level(logging.WARNING, logger="edgeds"):
        create(model, tmp_path / "b", calib=images)
    assert caplog.text == ""
