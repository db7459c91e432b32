"""Preprocessing: exact inverse (B80, B82), stretch (B81), gray models (B90), odd image files (B89), digest (B49)."""

from __future__ import annotations

import json
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.errors import InputError, SpecError
from edgeds.imagefile import image_size
from edgeds.preproc import ImagePreprocess, place_image, prepare_batch, prepare_image, read_image, to_bgr
from edgeds.specs import Resolution, from_json, to_json

cv2 = pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")


def noise(height: int, width: int, *tail: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, *tail), dtype=np.uint8)


def test_b80_round_trip_is_exact_for_every_width() -> None:
    worst = 0.0
    for height in (360, 427, 480, 641, 720, 1080, 1571, 1999):
        for width in range(640, 2000):
            place = place_image(Resolution(height, width), Resolution(640, 640))
            box = np.array([[0.25, 0.5, width - 0.75, height - 0.25], [3, 5, width / 2, height / 3]])
            back = place.boxes_to_source(place.boxes_to_target(box))
            worst = max(worst, float(np.abs(back - box).max()) * max(place.gain_x, place.gain_y))
            left, top, right, bottom = place.content_px
            assert 0 <= left < right <= 640
            assert 0 <= top < bottom <= 640
    assert worst < 0.01  # far below the 0.5 / gain px asked for


def test_b80_b82_offsets_are_the_integers_that_were_painted() -> None:
    """642x480 pads 80 on top (not 81); 641x427 reports no half pixels."""
    for width, height in ((642, 480), (641, 427), (3775, 1571), (1, 999), (1999, 641)):
        image = np.full((height, width, 3), 255, np.uint8)
        chw, place = prepare_image(image, ImagePreprocess(pad_value=0), Resolution(640, 640))
        rows, columns = np.nonzero(chw[0])
        assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == place.content_px
    assert place_image(Resolution(480, 642), Resolution(640, 640)).top_px == 80


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from(["letterbox", "stretch", "crop"]),
)
def test_placement_inverts_itself(source: tuple[int, int], blocks: tuple[int, int], mode: str) -> None:
    target = Resolution(blocks[0] * 32, blocks[1] * 32)
    place = place_image(Resolution(*source), target, mode=mode)
    points = np.random.default_rng(1).random((5, 2)) * (source[1], source[0])
    error = np.abs(place.to_source(place.to_target(points)) - points) * (place.gain_x, place.gain_y)
    assert error.max() < 0.05
    if mode == "letterbox":
        assert place.left_px >= 0
        assert place.top_px >= 0


def test_pixels_land_where_the_placement_says() -> None:
    """A bright square keeps its position through resize, padding and the way back (pixel-centre convention)."""
    image = np.zeros((300, 777, 3), np.uint8)
    image[100:160, 200:290] = 255
    for mode in ("letterbox", "stretch"):
        chw, place = prepare_image(image, ImagePreprocess(mode=mode, pad_value=0), Resolution(320, 416))
        rows, columns = np.nonzero(chw[1] > 0.5)
        box = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        error = np.abs(place.boxes_to_source(box) - (200, 100, 290, 160))
        assert error[0::2].max() <= 0.51 / place.gain_x
        assert error[1::2].max() <= 0.51 / place.gain_y


def test_b81_letterbox_keeps_a_square_square_and_stretch_has_two_gains() -> None:
    letterbox = place_image(Resolution(200, 800), Resolution(640, 640))
    stretch = place_image(Resolution(200, 800), Resolution(640, 640), mode="stretch")
    assert ImagePreprocess().mode == "letterbox"
    assert letterbox.gain_x == pytest.approx(letterbox.gain_y)
    assert (stretch.gain_x, stretch.gain_y) == (0.8, 3.2)


@pytest.mark.parametrize("channels", ["rgb", "bgr", "gray"])
def test_values_match_an_independent_reference(channels: str) -> None:
    image = noise(64, 96, 3)
    preprocess = ImagePreprocess(channels=channels, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    chw, _ = prepare_image(image, preprocess, Resolution(64, 96))
    if channels == "gray":
        weights = np.array([0.114, 0.587, 0.299])
        want = (np.round(image @ weights)[None] / 255 - 0.4) / 0.2
        assert np.abs(chw - want).max() < 1.01 / 255 / 0.2
    else:
        planes = image[:, :, ::-1] if channels == "rgb" else image
        want = ((planes / 255 - preprocess.mean) / preprocess.std).transpose(2, 0, 1)
        np.testing.assert_allclose(chw, want, atol=1e-6)
    assert chw.dtype == np.float32
    assert chw.flags.c_contiguous
    assert chw.shape[0] == preprocess.channel_count  # B90: one plane for one-channel models


def test_batch_equals_singles_and_reuses_the_given_buffer() -> None:
    images = [noise(50, 80, 3), noise(90, 40), noise(33, 33, 4)]
    preprocess, resolution = ImagePreprocess(), Resolution(64, 64)
    batch, placements = prepare_batch(images, preprocess, resolution)
    for index, image in enumerate(images):
        single, place = prepare_image(image, preprocess, resolution)
        np.testing.assert_array_equal(batch[index], single)
        assert placements[index] == place
    out = np.empty((3, 64, 64), np.float32)
    assert prepare_image(images[0], preprocess, resolution, out=out)[0] is out
    with pytest.raises(SpecError, match="out must be contiguous"):
        prepare_image(images[0], preprocess, resolution, out=out[:, :32])
    with pytest.raises(InputError, match="no images"):
        prepare_batch([], preprocess, resolution)


def test_crop_takes_the_centre_and_refuses_slivers() -> None:
    image = np.zeros((100, 300, 3), np.uint8)
    image[:, 100:200] = 255
    chw, place = prepare_image(image, ImagePreprocess(mode="crop"), Resolution(64, 64))
    assert chw.min() > 0.4
    assert place.left_px < 0
    with pytest.raises(InputError, match="too narrow"):
        prepare_image(np.zeros((1, 60000, 3), np.uint8), ImagePreprocess(mode="crop"), Resolution(640, 640))


def test_b49_digest_follows_every_parameter_and_survives_json() -> None:
    base = ImagePreprocess()
    changes = [
        {"mode": "stretch"},
        {"pad_value": 0},
        {"channels": "bgr"},
        {"scale": 1.0},
        {"mean": (0.1, 0, 0)},
        {"std": (2.0, 1, 1)},
        {"stride": 64},
    ]
    digests = {ImagePreprocess(**change).digest() for change in changes} | {base.digest()}
    assert len(digests) == len(changes) + 1
    assert ImagePreprocess(mean=(0, 0, 0)).digest() == base.digest()
    again = from_json(ImagePreprocess, json.loads(json.dumps(to_json(base))), where="bundle.json.preprocess")
    assert again == base
    assert again.digest() == base.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "fit"}, "letterbox"),
        ({"channels": "rgba"}, "rgb"),
        ({"pad_value": 300}, "0 to 255"),
        ({"stride": 0}, "stride"),
        ({"scale": float("nan")}, "scale"),
        ({"std": (0.0, 1.0, 1.0)}, "positive"),
        ({"mean": (0.0, 1.0)}, "three"),
    ],
)
def test_bad_parameters_are_refused(change: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ImagePreprocess(**change)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA", "1", "I;16", "CMYK"])
def test_b89_every_pixel_mode_reads_as_bgr(tmp_path, mode: str) -> None:
    suffix = ".jpg" if mode == "CMYK" else ".png"
    path = tmp_path / f"bild-ä-日本{suffix}"
    if mode == "I;16":
        Image.fromarray(np.full((20, 30), 200 * 257, np.uint16)).save(path)
    else:
        Image.new("RGB", (30, 20), (200, 200, 200)).convert(mode).save(path)
    image = read_image(path)
    assert image.shape == (20, 30, 3)
    assert image.dtype == np.uint8
    assert abs(image.mean() - 200) <= 6  # palettes and bilevel dither


def test_b89_exif_orientation_is_applied(tmp_path) -> None:
    picture = Image.new("RGB", (40, 20), (0, 0, 0))
    picture.paste((255, 255, 255), (0, 0, 10, 20))  # the left edge is white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned 90 degrees clockwise: left becomes top
    picture.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    image = read_image(tmp_path / "turned.jpg")
    assert image.shape == (40, 20, 3)
    assert image[:8].mean() > 240
    assert image[12:].mean() < 15


def test_b89_one_pixel_image_works(tmp_path) -> None:
    Image.new("RGB", (1, 1), (10, 20, 30)).save(tmp_path / "one.png")
    image = read_image(tmp_path / "one.png")
    assert image.tolist() == [[[30, 20, 10]]]
    chw, _ = prepare_image(image, ImagePreprocess(), Resolution(32, 64))
    assert np.isfinite(chw).all()


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp", ".webp", ".tif"])
def test_header_size_agrees_with_the_decoder(tmp_path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    Image.fromarray(noise(21, 34, 3)).save(path)
    assert image_size(path.read_bytes()) == (21, 34) == read_image(path).shape[:2]


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp", ".webp", ".tif"])
@pytest.mark.parametrize("keep", [0, 3, 20, 0.6])
def test_b89_damaged_files_are_refused_by_name(tmp_path, capfd, suffix: str, keep: float) -> None:
    whole = tmp_path / f"whole{suffix}"
    Image.fromarray(noise(64, 64, 3)).save(whole)
    data = whole.read_bytes()
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(InputError, match="cut"):
        read_image(path)


def test_b89_bombs_foreign_files_and_missing_files_are_refused(tmp_path) -> None:
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"IEND"
    (tmp_path / "bomb.png").write_bytes(bomb)
    with pytest.raises(InputError, match=r"bomb\.png.*50000x50000"):
        read_image(tmp_path / "bomb.png")
    (tmp_path / "text.jpg").write_text("hello")
    with pytest.raises(InputError, match=r"text\.jpg.*not a JPEG"):
        read_image(tmp_path / "text.jpg")
    for path in (tmp_path / "none.jpg", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_image(path)


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=80), st.sampled_from([b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"BM", b"II*\0", b"MM\0*", b""])
)
def test_random_bytes_never_escape_as_other_errors(tmp_path_factory, data: bytes, magic: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.bin"
    path.write_bytes(magic + data)
    with pytest.raises(InputError, match=r"x\.bin"):
        read_image(path)


def test_to_bgr_conversions() -> None:
    gray = noise(4, 5)
    for array in (gray, gray[:, :, None], np.dstack([gray, gray * 0])):
        assert (to_bgr(array) == gray[:, :, None]).all()
    color = noise(4, 5, 4)
    np.testing.assert_array_equal(to_bgr(color), color[:, :, :3])
    np.testing.assert_array_equal(to_bgr(color[::-1, ::-2, :3]), color[::-1, ::-2, :3])
    assert to_bgr(np.full((2, 2), 0xABCD, np.uint16))[0, 0, 0] == 0xAB


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), "float32"),
        (np.full((4, 4, 3), np.nan), "float64"),
        (np.zeros((4, 4), bool), "bool"),
        (np.zeros((0, 4, 3), np.uint8), "empty"),
        (np.zeros((3, 8, 8), np.uint8), "channels-first"),
        (np.zeros((1, 8, 8, 3), np.uint8), "shape"),
        (np.zeros(7, np.uint8), "shape"),
        (np.zeros((70_000, 1), np.uint8), "more than accepted"),
        ([[1, 2]], "list"),
    ],
)
def test_to_bgr_refuses_by_name(array: object, message: str) -> None:
    with warnings.catch_warnings(), pytest.raises(InputError, match=message) as info:
        to_bgr(array, where="frame 7")
    assert str(info.value).startswith("frame 7")
