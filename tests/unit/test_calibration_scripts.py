"""The scripts of calibration/: collecting without near-duplicates, and measuring a range table that is then reused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeds.compress.calibset import open_calibration
from edgeds.compress.curate import collect_images, difference_hash, load_set, select_images
from edgeds.compress.quantize import quantize_model
from edgeds.errors import CalibrationError, SpecError
from edgeds.graph.io import input_specs, load_model
from edgeds.pipelines.readers import Frame

cv2 = pytest.importorskip("cv2")
ROOT = Path(__file__).resolve().parents[2]


def scene(seed, *, noise=0):
    """A smooth random picture; ``noise`` changes its pixels but not its content."""
    rng = np.random.default_rng(seed)
    image = cv2.resize(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8), (64, 48), interpolation=cv2.INTER_CUBIC)
    return np.clip(image + np.random.default_rng(noise).integers(-noise, noise + 1, image.shape), 0, 255).astype(
        np.uint8
    )


def frames(images):
    return [Frame(source="s", index=index, image_bgr=image) for index, image in enumerate(images)]


def script(name, *args):
    command = [sys.executable, "-m", f"calibration.{name}", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_near_duplicates_are_left_out(tmp_path):
    images = [scene(0), scene(0, noise=2), scene(1), scene(1, noise=3), scene(0, noise=1), scene(2)]
    report = collect_images(frames(images), tmp_path / "out")
    assert (report.read, report.kept, report.near_duplicates) == (6, 3, 3)
    stored = json.loads((tmp_path / "out" / "set.json").read_text())
    assert stored["digest"] == report.digest
    assert sorted(path.name for path in (tmp_path / "out").glob("*.png")) == list(report.files)
    again = collect_images(frames(images[::-1]), tmp_path / "other", limit=2)
    assert again.kept == 2
    with pytest.raises(SpecError, match="exists"):
        collect_images(frames(images), tmp_path / "out")


def test_an_interrupted_collection_leaves_nothing(tmp_path):
    def interrupted():
        yield from frames([scene(0), scene(1)])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_images(interrupted(), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(CalibrationError, match="no frame was kept"):
        collect_images([Frame(source="s", index=0, image_bgr=None)], tmp_path / "out")
    for options in ({"min_difference": 65}, {"every": 0}, {"limit": 0}):
        with pytest.raises(SpecError):
            collect_images([], tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_the_hash_ignores_brightness_and_size():
    image = scene(3) // 2
    assert difference_hash(image) == difference_hash(image + 20)
    resized = difference_hash(cv2.resize(image, (128, 96)))
    assert (difference_hash(image) ^ resized).bit_count() < 6
    assert (difference_hash(image) ^ difference_hash(scene(4))).bit_count() > 12


def test_collect_from_a_video_and_a_folder(tmp_path):
    writer = cv2.VideoWriter(str(tmp_path / "v.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 48))
    for seed in (0, 0, 0, 0, 0, 1, 1, 1, 1, 1):
        writer.write(scene(seed))
    writer.release()
    (tmp_path / "images").mkdir()
    cv2.imwrite(str(tmp_path / "images" / "a.png"), scene(7))
    done = script("collect", tmp_path / "v.avi", tmp_path / "images", "--out", tmp_path / "out", "--every", 0.2)
    assert done.returncode == 0, done.stderr
    assert "kept 3 of" in done.stdout
    assert script("collect", tmp_path / "images", "--out", tmp_path / "out").returncode == 2
    missing = script("collect", tmp_path / "nowhere.mp4", "--out", tmp_path / "new")
    assert missing.returncode == 1
    assert "Traceback" not in missing.stderr
    assert not (tmp_path / "new").exists()


def write_set(path, **changes):
    definition = {
        "name": "s", "source": "made here", "license": "none", "folder": "images", "images": 4, "size": "32x32",
        "preprocess": {"mode": "letterbox"}, **changes,
    }  # fmt: skip
    path.write_text(json.dumps(definition))
    return path


def small_model(path):
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(0, 0.3, (4, 3, 3, 3)), "v": rng.normal(0, 0.3, (2, 4, 1, 1))}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "c1"),
        helper.make_node("Relu", ["a"], ["b"], "r"),
        helper.make_node("Conv", ["b", "v"], ["y"], "c2"),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in (("x", [1, 3, 32, 32]), ("y", None))]
    stored = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_measured_table_is_reused(tmp_path):
    (tmp_path / "images").mkdir()
    for seed in range(6):
        cv2.imwrite(str(tmp_path / "images" / f"{seed}.png"), scene(seed))
    definition, model = write_set(tmp_path / "set.json"), small_model(tmp_path / "m.onnx")
    done = script("measure", definition, "--data", tmp_path, "--model", model, "--out", tmp_path / "table.json")
    assert done.returncode == 0, done.stderr
    found = load_set(definition)
    calibration = open_calibration(
        select_images(found, tmp_path),
        model_inputs=input_specs(load_model(model)),
        preprocess=found.preprocess,
        resolution=found.size,
    )
    report = quantize_model(
        model,
        calibration,
        out=tmp_path / "o.onnx",
        cpu_out=tmp_path / "c.onnx",
        ranges_in=tmp_path / "table.json",
        quiet=True,
    )
    assert report.notes == (f"ranges reused from {tmp_path / 'table.json'}",)
    failed = script("measure", definition, "--data", tmp_path / "no", "--model", model, "--out", tmp_path / "t.json")
    assert failed.returncode == 1
    assert "no such folder" in failed.stderr
    assert not (tmp_path / "t.json").exists()


def test_definitions(tmp_path):
    shipped = load_set(ROOT / "calibration" / "sets" / "coco128-train.json")
    assert shipped.preprocess.digest()
    for changes in ({"images": 0}, {"folder": "../x"}, {"folder": "/x"}, {"size": "huge"}, {"unknown": 1}):
        with pytest.raises(SpecError, match=r"set\.json"):
            load_set(write_set(tmp_path / "set.json", **changes))
    (tmp_path / "images").mkdir()
    with pytest.raises(CalibrationError, match="takes 4"):
        select_images(load_set(write_set(tmp_path / "set.json")), tmp_path)
