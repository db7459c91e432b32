"""Calibration sets: every kind of source, laziness, refusals, batching, identity."""

import os

import numpy as np
import pytest

from edgeds.compress.calibset import holds_images, open_calibration
from edgeds.errors import CalibrationError, SpecError
from edgeds.preproc import ImagePreprocess, prepare_image
from edgeds.specs import Resolution, TensorSpec

X = (TensorSpec(name="x", dtype="float32", shape=("N", 3, 8, 8)),)
SIZE = Resolution(8, 8)


def spec(*shape, name="x", dtype="float32"):
    return (TensorSpec(name=name, dtype=dtype, shape=shape),)


def sample(seed, shape=(1, 3, 8, 8)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def picture(seed, shape=(12, 16, 3)):
    return np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)


def write_png(path, image):
    cv2 = pytest.importorskip("cv2")
    assert cv2.imwrite(str(path), image)


def rows(calibration):
    return np.concatenate([feeds["x"] for feeds in calibration])


def test_every_kind_of_source_gives_the_same_samples(tmp_path):
    arrays = [sample(seed) for seed in range(5)]
    stacked = np.concatenate(arrays)
    np.savez(tmp_path / "set.npz", x=stacked)
    np.savez_compressed(tmp_path / "packed.npz", x=stacked, unrelated=np.arange(3))
    np.savez(tmp_path / "fortran.npz", x=np.asfortranarray(stacked))
    np.save(tmp_path / "set.npy", stacked)
    (tmp_path / "feeds").mkdir()
    (tmp_path / "rows").mkdir()
    for index, array in enumerate(arrays):
        np.savez(tmp_path / "feeds" / f"{index}.npz", x=array)
        np.save(tmp_path / "rows" / f"{index}.npy", array[0])  # without its batch axis
    sources = [tmp_path / name for name in ("set.npz", "packed.npz", "fortran.npz", "set.npy", "feeds", "rows")]
    sources += [arrays, [{"x": a} for a in arrays], stacked, [a[0] for a in arrays], {"x": stacked}]
    for source in sources:
        found = open_calibration(source, model_inputs=X)
        np.testing.assert_array_equal(rows(found), stacked)
        assert found.samples == 5
        assert found.shapes == {"x=1x3x8x8": 5}
        np.testing.assert_array_equal(rows(found), stacked)  # and again


def test_a_generator_is_consumed_one_by_one_b42():
    """B42: nothing is read ahead, and never one more than the limit."""
    taken = []

    def generate():
        for index in range(1000):
            taken.append(index)
            yield sample(index)

    found = open_calibration(generate(), model_inputs=X, limit=3)
    iterator = iter(found)
    assert taken == []
    next(iterator)
    assert taken == [0]
    assert len(list(iterator)) == 2
    assert taken == [0, 1, 2]
    with pytest.raises(CalibrationError, match="used up"):
        next(iter(found))


def test_npz_rows_are_read_one_at_a_time(tmp_path):
    import tracemalloc

    np.savez(tmp_path / "big.npz", x=np.random.default_rng(0).normal(size=(64, 3, 64, 64)).astype(np.float32))
    found = open_calibration(tmp_path / "big.npz", model_inputs=spec("N", 3, 64, 64))
    tracemalloc.start()
    for _ in found:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 3 * 64 * 64 * 4 / 4


def test_duplicates_are_refused_by_name(tmp_path):
    for name in ("a.npz", "b.npz"):
        np.savez(tmp_path / name, x=sample(0))
    with pytest.raises(CalibrationError, match=r"b\.npz has the same content as .*a\.npz"):
        list(open_calibration(tmp_path, model_inputs=X))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.full((1, 3, 8, 8), np.nan, np.float32), "NaN or infinity"),
        (np.full((1, 3, 8, 8), 1e300), "NaN or infinity"),
        (np.zeros((1, 3, 8, 8), np.uint8), "raw pixels must go through the preprocessing"),
        (np.zeros((1, 3, 8, 8), bool), "is bool"),
        (np.zeros((1, 3, 9, 8), np.float32), "has shape"),
        (np.zeros((3, 8), np.float32), "has shape"),
        (np.zeros((0, 3, 8, 8), np.float32), "is empty"),
        (np.zeros((1, 3, 8, 8), np.complex64), "complex64"),
    ],
)
def test_unfit_arrays(value, message):
    with pytest.raises(CalibrationError, match=message):
        list(open_calibration([{"x": value}], model_inputs=X))


@pytest.mark.parametrize("item", ["missing.png", 3, None, [1.0], {"y": np.zeros(3)}, {"x": [[1], [1, 2]]}])
def test_unfit_items(item):
    with pytest.raises(CalibrationError):
        list(open_calibration([item], model_inputs=X))


def test_integers_that_do_not_fit_are_refused():
    ids = spec("N", 4, dtype="int32", name="x")
    assert next(iter(open_calibration([np.arange(4)[None]], model_inputs=ids)))["x"].dtype == np.int32
    with pytest.raises(CalibrationError, match="do not fit int32"):
        list(open_calibration([np.array([[1, 2, 3, 2**40]])], model_inputs=ids))


def test_unfit_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.npz").write_bytes(b"not a zip")
    np.savez(tmp_path / "good.npz", x=np.concatenate([sample(0), sample(1)]))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:-40])
    np.save(tmp_path / "pickled.npy", np.array([{"x": 1}], object), allow_pickle=True)
    np.savez(tmp_path / "none.npz", y=sample(0))
    np.savez(tmp_path / "zero.npz", x=np.zeros((0, 3, 8, 8), np.float32))
    (tmp_path / "notes.txt").write_text("hello")
    cases = {
        "absent": "no such file or folder",
        "empty": "no images",
        "bad.npz": "cannot be read",
        "cut.npz": "cannot be read",
        "pickled.npy": "pickled",
        "none.npz": "no array for input 'x'",
        "zero.npz": "holds no samples",
        "notes.txt": "not a calibration set",
    }
    for name, message in cases.items():
        with pytest.raises(CalibrationError, match=message):
            list(open_calibration(tmp_path / name, model_inputs=X))
    with pytest.raises(CalibrationError, match="no samples"):
        list(open_calibration([], model_inputs=X))
    for limit in (0, -1, True, 1.5):
        with pytest.raises(SpecError, match="must be"):
            open_calibration([], model_inputs=X, limit=limit)
    with pytest.raises(SpecError, match="iterable"):
        open_calibration(7, model_inputs=X)
    two = (*X, TensorSpec(name="z", dtype="float32", shape=("N", 2)))
    np.savez(tmp_path / "uneven.npz", x=sample(0), z=np.zeros((2, 2), np.float32))
    with pytest.raises(CalibrationError, match="different numbers of samples"):
        open_calibration(tmp_path / "uneven.npz", model_inputs=two)


def test_a_damaged_npz_is_named(tmp_path):
    np.savez_compressed(tmp_path / "set.npz", x=np.concatenate([sample(s) for s in range(8)]))
    data = bytearray((tmp_path / "set.npz").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "set.npz").write_bytes(data)
    with pytest.raises(CalibrationError, match=r"set\.npz"):
        list(open_calibration(tmp_path / "set.npz", model_inputs=X))


def test_folders_of_images(tmp_path):
    folder = tmp_path / "images"
    (folder / ".cache").mkdir(parents=True)
    for index in range(6):
        write_png(folder / f"{index}.png", picture(index))
    write_png(folder / ".cache" / "hidden.png", picture(0))
    found = open_calibration(folder, model_inputs=X, resolution=SIZE, limit=3)
    assert holds_images(folder)
    assert found.expected == 3
    assert [feeds["x"].shape for feeds in found] == [(1, 3, 8, 8)] * 3
    with pytest.raises(SpecError, match="--size"):
        list(open_calibration(folder, model_inputs=X))
    with pytest.raises(CalibrationError, match="NCHW"):
        open_calibration(folder, model_inputs=spec("N", 4))
    np.save(folder / "a.npy", sample(0))
    with pytest.raises(CalibrationError, match="both images and array files"):
        open_calibration(folder, model_inputs=X, resolution=SIZE)
    (folder / "a.npy").unlink()
    (folder / "9.png").write_bytes(b"")
    with pytest.raises(CalibrationError, match=r"9\.png"):
        list(open_calibration(folder, model_inputs=X, resolution=SIZE))


def test_images_and_paths_in_an_iterable(tmp_path):
    write_png(tmp_path / "a.png", picture(1))
    found = open_calibration([picture(0), tmp_path / "a.png"], model_inputs=X, resolution=SIZE)
    assert rows(found).shape == (2, 3, 8, 8)


def test_each_image_goes_to_its_bucket():
    free = spec("N", 3, "H", "W")
    sizes = (Resolution(8, 16), Resolution(16, 8))
    found = open_calibration(
        [picture(0, (20, 40, 3)), picture(1, (40, 20, 3)), picture(2, (10, 30, 3))], model_inputs=free, resolution=sizes
    )
    assert [feeds["x"].shape[2:] for feeds in found] == [(8, 16), (16, 8), (8, 16)]
    assert found.shapes == {"x=1x3x8x16": 2, "x=1x3x16x8": 1}
    with pytest.raises(SpecError, match="resolution"):
        open_calibration([], model_inputs=free, resolution=())


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("count", [10, 7])
def test_every_sample_is_used_once_at_a_fixed_batch_b46(batch, count, tmp_path):
    """B46: samples are split or stacked to the model's batch; the last short batch repeats its own last row."""
    data = np.concatenate([sample(seed) for seed in range(count)])
    np.savez(tmp_path / "set.npz", x=data)
    for source in (tmp_path / "set.npz", [data[:3], data[3:]]):
        found = open_calibration(source, model_inputs=spec(batch, 3, 8, 8))
        runs = [feeds["x"] for feeds in found]
        assert {run.shape[0] for run in runs} == {batch}
        used = np.concatenate(runs)
        np.testing.assert_array_equal(used[:count], data)
        assert all((row == data[-1]).all() for row in used[count:])
        assert len(used) - count < batch


def test_a_free_batch_takes_samples_as_they_come_b46():
    data = [sample(seed, (4, 3, 8, 8)) for seed in range(3)]
    found = open_calibration(data, model_inputs=X)
    assert [feeds["x"].shape[0] for feeds in found] == [4, 4, 4]


def test_a_mix_of_sizes_at_a_fixed_batch_b47():
    """B47: three sizes in turn; samples of one size wait for each other, and the report lists the shapes."""
    mixed = spec(4, 3, "H", "W")
    data = [sample(seed, (1, 3, 8, 8 * (1 + seed % 3))) for seed in range(12)]
    found = open_calibration(data, model_inputs=mixed)
    assert len(list(found)) == 3
    assert found.shapes == {"x=4x3x8x8": 1, "x=4x3x8x16": 1, "x=4x3x8x24": 1}
    two = (*spec(2, 4), TensorSpec(name="z", dtype="float32", shape=(2, 4)))
    uneven = [{"x": np.ones((2, 4), np.float32), "z": np.ones((1, 4), np.float32)}]
    with pytest.raises(CalibrationError, match="different batch sizes"):
        list(open_calibration(uneven, model_inputs=two))


def test_calibration_sees_what_inference_sees_b49():
    """B49: uint8 images go through the same preprocessing object as in serving, bit for bit."""
    preprocess = ImagePreprocess(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.2), channels="bgr", stride=8)
    images = [picture(seed) for seed in range(4)]
    seen = rows(open_calibration(images, model_inputs=X, preprocess=preprocess, resolution=SIZE))
    served = np.stack([prepare_image(image, preprocess, SIZE)[0] for image in images])
    np.testing.assert_array_equal(seen, served)


def test_digest_follows_everything_that_changes_the_numbers():
    images = [picture(seed) for seed in range(3)]

    def digest(items=images, **changes):
        options = {"preprocess": ImagePreprocess(), "resolution": SIZE, **changes}
        return open_calibration(items, model_inputs=spec("N", 3, "H", "W"), **options).digest

    base = digest()
    assert base == digest() == digest(resolution=(SIZE,))
    changed = [
        digest(images[:2]),
        digest(images[::-1]),
        digest([*images[:2], picture(9)]),
        digest(preprocess=ImagePreprocess(scale=1.0)),
        digest(resolution=Resolution(16, 16)),
        digest(resolution=(SIZE, Resolution(16, 16))),
    ]
    assert len({base, *changed}) == 7


def test_inputs_of_other_kinds():
    """Scalars, booleans, empty caches and several inputs keep their dtypes and shapes."""
    inputs = (
        TensorSpec(name="ids", dtype="int64", shape=("N", "L")),
        TensorSpec(name="flag", dtype="bool", shape=()),
        TensorSpec(name="past", dtype="float32", shape=("N", 2, "P", 4)),
    )
    feeds = {"ids": np.arange(3)[None], "flag": np.array(True), "past": np.zeros((1, 2, 0, 4), np.float32)}
    found = next(iter(open_calibration([feeds], model_inputs=inputs)))
    assert {name: (a.dtype, a.shape) for name, a in found.items()} == {
        name: (a.dtype, a.shape) for name, a in feeds.items()
    }
    pixels = spec("N", 8, 8, 3, dtype="uint8")
    assert next(iter(open_calibration([picture(0, (8, 8, 3))], model_inputs=pixels)))["x"].shape == (1, 8, 8, 3)


def test_folder_that_cannot_be_listed_is_said_and_not_skipped(tmp_path, monkeypatch):
    """A locked subfolder must not shrink the calibration set in silence."""
    from edgeds.compress import calibset

    (tmp_path / "open").mkdir()
    (tmp_path / "locked").mkdir()
    (tmp_path / "open" / "a.png").write_bytes(b"x")
    (tmp_path / "open" / ".hidden.png").write_bytes(b"x")
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    assert [item.name for item in calibset._visible_files(tmp_path)] == ["a.png"]
    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(CalibrationError, match="locked: cannot be listed: Permission denied"):
        calibset._visible_files(tmp_path)
