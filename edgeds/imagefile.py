"""Image files and arrays into plain BGR uint8: the formats, the refusals, and nothing about models."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeds.errors import InputError, MissingDependency
from edgeds.files import read_regular

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
MAX_IMAGE_PIXELS = 100_000_000
MAX_SIDE_PX = 65_536

ImageU8 = NDArray[np.uint8]


def import_cv2(purpose: str = "image processing") -> Any:
    """Whichever OpenCV is installed (JetPack's own or a wheel); MissingDependency names the extra otherwise."""
    try:
        import cv2
    except ImportError as error:
        raise MissingDependency("opencv-python-headless", extra="vision", purpose=purpose, cause=error) from error
    return cv2


def read_image(path: str | Path) -> ImageU8:
    """Read a JPEG, PNG, BMP, WebP or TIFF file as contiguous BGR uint8, shape [H, W, 3].

    The EXIF orientation is applied, alpha is dropped without blending, gray and palette images are expanded, 16-bit
    samples keep their upper 8 bits. The size is read from the header first, so a decompression bomb is refused before
    any pixel is decoded. Raises InputError, always with the file's name, for everything that cannot be used.
    """
    cv2 = import_cv2("reading images")
    path = Path(path)
    try:
        # Not cv2.imread: it cannot open non-ASCII paths everywhere and prints its own warnings.
        data = read_regular(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not data:
        raise InputError(f"{path}: the file is empty (0 bytes); copy or record it again")
    size = image_size(data)
    if size is None:
        raise InputError(f"{path}: not a JPEG, PNG, BMP, WebP or TIFF image; convert it to one of these")
    height, width = size
    if height < 1 or width < 1:
        raise InputError(f"{path}: the header states {width}x{height} pixels; the file is damaged")
    if height * width > MAX_IMAGE_PIXELS or max(size) > MAX_SIDE_PX:
        raise InputError(
            f"{path}: the header states {width}x{height} pixels; at most {MAX_IMAGE_PIXELS // 10**6} million pixels "
            f"and {MAX_SIDE_PX} per side are accepted; scale it down"
        )
    if _is_truncated(data):
        raise InputError(f"{path}: the image data ends early; the file is truncated")
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise InputError(f"{path}: the image data is damaged ({_first_line(error)})") from error
    if image is None or image.size == 0:
        raise InputError(f"{path}: the image data is damaged or uses a compression OpenCV cannot decode")
    return to_bgr(image, where=str(path))


def to_bgr(array: Any, *, where: str = "image") -> ImageU8:
    """Bring an array to contiguous BGR uint8 [H, W, 3].

    Takes uint8 or uint16 (upper 8 bits kept) of shape [H, W], [H, W, 1] (gray), [H, W, 2] (gray + alpha), [H, W, 3]
    (BGR) or [H, W, 4] (BGRA). Float and bool arrays are refused, since their range is a guess. ``where`` names the
    input in the message. The result may share memory with the input. Raises InputError.
    """
    if not isinstance(array, np.ndarray):
        raise InputError(f"{where}: expected a numpy array [H, W] or [H, W, 1..4], got {type(array).__name__}")
    if array.ndim not in (2, 3):
        raise InputError(
            f"{where}: expected shape [H, W] or [H, W, 1..4], got {list(array.shape)}; pass one image each"
        )
    if array.ndim == 3 and array.shape[2] not in (1, 2, 3, 4):
        hint = "; it looks channels-first, transpose it to [H, W, C]" if array.shape[0] in (1, 3, 4) else ""
        raise InputError(f"{where}: expected 1 to 4 channels last, got shape {list(array.shape)}{hint}")
    if array.shape[0] < 1 or array.shape[1] < 1:
        raise InputError(f"{where}: the image is empty, shape {list(array.shape)}")
    if max(array.shape[:2]) > MAX_SIDE_PX or array.shape[0] * array.shape[1] > MAX_IMAGE_PIXELS:
        raise InputError(f"{where}: {array.shape[1]}x{array.shape[0]} pixels is more than accepted; scale it down")
    if array.dtype == np.uint16:
        array = (array >> 8).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise InputError(f"{where}: expected uint8 (or uint16) pixels, got {array.dtype}; scale to 0..255 and convert")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.shape[2] <= 2:
        array = np.repeat(array[:, :, :1], 3, axis=2)
    return np.ascontiguousarray(array[:, :, :3])


def image_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) from the header of a JPEG, PNG, BMP, WebP or TIFF file; None when it is none of these."""
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            width, height = struct.unpack(">II", data[16:24])
            return int(height), int(width)
        if data.startswith(b"\xff\xd8"):
            return _jpeg_frame(data)[:2]
        if data.startswith(b"BM"):
            if struct.unpack("<I", data[14:18])[0] == 12:
                width, height = struct.unpack("<HH", data[18:22])
            else:
                width, height = struct.unpack("<ii", data[18:26])
            return abs(int(height)), abs(int(width))
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp_size(data)
        if data[:4] in (b"II*\0", b"MM\0*"):
            return _tiff_size(data)
    except (struct.error, IndexError):
        return 0, 0  # the magic fits but the header ends early: damaged, not foreign
    return None


def _jpeg_frame(data: bytes) -> tuple[int, int, int]:
    """Height, width and the offset of the frame header (ITU T.81 B.2.2), walking the marker segments."""
    at = 2
    while True:
        while data[at] != 0xFF:
            at += 1
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[at + 3 : at + 7])
            return int(height), int(width), at
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:
            continue
        at += int(struct.unpack(">H", data[at : at + 2])[0])


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[27:30], "little"), 1 + int.from_bytes(data[24:27], "little")
    if kind == b"VP8L":
        bits = int(struct.unpack("<I", data[21:25])[0])
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    width, height = struct.unpack("<HH", data[26:30])
    return int(height) & 0x3FFF, int(width) & 0x3FFF


def _tiff_size(data: bytes) -> tuple[int, int]:
    order = "<" if data[:2] == b"II" else ">"
    directory = int(struct.unpack(order + "I", data[4:8])[0])
    (count,) = struct.unpack(order + "H", data[directory : directory + 2])
    found = {256: 0, 257: 0}
    for index in range(count):
        entry = directory + 2 + 12 * index
        tag, kind, _ = struct.unpack(order + "HHI", data[entry : entry + 8])
        if tag in found:
            code = order + ("H" if kind == 3 else "I")
            found[tag] = int(struct.unpack(code, data[entry + 8 : entry + 8 + struct.calcsize(code)])[0])
    return found[257], found[256]


def _is_truncated(data: bytes) -> bool:
    # Decoders fill the missing part with gray and only print a warning, so the end marker is looked for here.
    if data.startswith(b"\x89PNG"):
        return data.rfind(b"IEND") < 0
    if data.startswith(b"\xff\xd8"):
        return data.find(b"\xff\xd9", _jpeg_frame(data)[2]) < 0
    return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
