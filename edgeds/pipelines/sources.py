"""Pictures from anywhere: what a source may be, several at once, no frame lost or only the newest."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edgeds.errors import InputError, SpecError
from edgeds.files import read_regular
from edgeds.imagefile import IMAGE_SUFFIXES, import_cv2
from edgeds.pipelines.readers import (
    ArrayReader,
    Frame,
    ImageReader,
    LatestReader,
    Reader,
    VideoReader,
    frames_of,
    has_gstreamer,
)

__all__ = ["VIDEO_SUFFIXES", "Frame", "FrameStream", "open_sources"]

log = logging.getLogger("edgeds.pipelines.sources")

VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mkv", ".mov", ".m4v", ".webm", ".mjpg", ".mjpeg", ".ts", ".mpg", ".mpeg"})
STREAM_SCHEMES = ("rtsp", "rtsps", "rtmp", "http", "https", "udp", "tcp", "srt")
MAX_LIST_BYTES = 16 << 20
MAX_SOURCES = 256

Policy = Literal["auto", "every", "latest"]


class FrameStream:
    """Iterator of ``Frame`` over several sources, taken in turn. A context manager.

    ``dropped`` counts frames that policy "latest" passed over, ``failed`` those that could not be read.
    """

    yields_frames = True
    """Tells a pipeline that these are opened frames, which it must not open or close."""

    def __init__(self, readers: Sequence[Reader], *, wake: threading.Condition) -> None:
        self._readers = list(readers)
        self._active = list(readers)
        self._turn = 0
        self._wake = wake
        self.failed = 0

    @property
    def live_count(self) -> int:
        """How many sources are read for their newest frame only."""
        return sum(isinstance(reader, LatestReader) for reader in self._readers)

    @property
    def dropped(self) -> int:
        return sum(reader.dropped for reader in self._readers)

    def __iter__(self) -> Iterator[Frame]:
        return self

    def __next__(self) -> Frame:
        while self._active:
            for _ in range(len(self._active)):
                self._turn %= len(self._active)
                reader = self._active[self._turn]
                frame = reader.poll()
                if reader.done and frame is None:
                    reader.close()
                    self._active.pop(self._turn)
                    break
                self._turn += 1
                if frame is not None:
                    if frame.error is not None:
                        self.failed += 1
                        log.warning("skipped: %s", frame.error)
                    return frame
            else:
                # Only live sources come here; the timeout covers a notification between poll and wait.
                with self._wake:
                    self._wake.wait(timeout=0.02)
        raise StopIteration

    def close(self) -> None:
        """Stop the reader threads and release cameras and files. Safe to call twice."""
        for reader in self._readers:
            reader.close()
        self._active = []

    def __enter__(self) -> FrameStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_sources(specs: Any, *, policy: str = "auto") -> FrameStream:
    """Open one source or a list of them.

    A source is an image or video file, a folder or glob of them, a .txt list, a camera number, an RTSP/HTTP/UDP
    address, a GStreamer pipeline ("... ! appsink"), an array [H, W, C] or [N, H, W, C], or an iterable of arrays.
    ``policy`` "every" loses no frame; "latest" reads video in a thread and keeps only the newest frame; "auto" is
    "latest" for live sources and "every" for the rest. Images and arrays are never dropped. Raises InputError for a
    source that does not exist or cannot be opened, SpecError for an unknown policy.
    """
    if policy not in ("auto", "every", "latest"):
        raise SpecError(f"policy {policy!r}: choose every (no frame lost), latest (newest only) or auto")
    wake = threading.Condition()
    readers: list[Reader] = []
    with contextlib.ExitStack() as on_failure:
        for spec in _as_list(specs):
            opened = _open(spec, policy=policy, wake=wake, depth=0)
            readers += opened
            for reader in opened:
                on_failure.callback(reader.close)
            if len(readers) > MAX_SOURCES:
                raise InputError(f"more than {MAX_SOURCES} sources; start several processes")
        on_failure.pop_all()
    if not readers:
        raise InputError("no source was given; pass an image, a folder, a video or a camera number")
    return FrameStream(readers, wake=wake)


def _as_list(specs: Any) -> list[Any]:
    if isinstance(specs, list | tuple):
        if specs and all(isinstance(item, np.ndarray) for item in specs):
            return [iter(specs)]  # frames of one source
        return list(specs)
    return [specs]


def _open(spec: Any, *, policy: str, wake: threading.Condition, depth: int) -> list[Reader]:
    if isinstance(spec, np.ndarray):
        return [ArrayReader(frames_of(spec))]
    if isinstance(spec, int) and not isinstance(spec, bool):
        return [_open_live(spec, name=f"camera {spec}", policy=policy, wake=wake)]
    if isinstance(spec, Iterable) and not isinstance(spec, str | bytes | Path | Mapping):
        return [ArrayReader(spec)]
    if not isinstance(spec, str | Path) or not str(spec):
        raise InputError(f"source {spec!r}: expected a path, an address, a camera number or arrays")
    text = str(spec)
    if "\0" in text:
        raise InputError(f"source {text!r}: contains a null character")
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*)://", text)
    if " ! " in text:
        return [_open_gstreamer(text, policy=policy, wake=wake)]
    if scheme is not None:
        if scheme.group(1).lower() not in STREAM_SCHEMES:
            raise InputError(f"{_shown(text)}: scheme {scheme.group(1)!r} is not one of {', '.join(STREAM_SCHEMES)}")
        return [_open_live(text, name=_shown(text), policy=policy, wake=wake)]
    path = Path(text)
    if re.fullmatch(r"\d{1,3}", text) and not path.exists():
        return [_open_live(int(text), name=f"camera {text}", policy=policy, wake=wake)]
    if path.is_char_device():
        return [_open_live(text, name=text, policy=policy, wake=wake)]
    return _open_path(path, policy=policy, wake=wake, depth=depth)


def _open_path(path: Path, *, policy: str, wake: threading.Condition, depth: int) -> list[Reader]:
    if path.is_dir():
        return _open_files(_media_in(path), where=f"{path}", policy=policy, wake=wake)
    if not path.exists():
        if not glob.has_magic(str(path)):
            raise InputError(f"{path}: no such file or folder")
        found = sorted((Path(name) for name in glob.glob(str(path), recursive=True)), key=_natural)  # noqa: PTH207
        files = [item for item in found if item.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES and item.is_file()]
        return _open_files(files, where=f"pattern {path}", policy=policy, wake=wake)
    suffix = path.suffix.lower()
    if suffix == ".txt":
        if depth:
            raise InputError(f"{path}: a list cannot hold another list")
        return _open_list(path, policy=policy, wake=wake)
    if suffix in VIDEO_SUFFIXES:
        return [_open_video(path, policy=policy, wake=wake)]
    if suffix in IMAGE_SUFFIXES:
        return [ImageReader([path])]
    known = ", ".join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))
    raise InputError(f"{path}: {suffix or 'no suffix'} is not a known image or video format ({known}, .txt)")


def _open_files(files: Sequence[Path], *, where: str, policy: str, wake: threading.Condition) -> list[Reader]:
    if not files:
        raise InputError(f"{where}: holds no image or video ({', '.join(sorted(IMAGE_SUFFIXES))}, ...)")
    images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
    readers: list[Reader] = [ImageReader(images)] if images else []
    readers += [_open_video(path, policy=policy, wake=wake) for path in files if path.suffix.lower() in VIDEO_SUFFIXES]
    return readers


def _open_list(path: Path, *, policy: str, wake: threading.Condition) -> list[Reader]:
    """One path or address per line; relative paths start at the list's folder; '#' starts a comment."""
    try:
        if path.stat().st_size > MAX_LIST_BYTES:
            raise InputError(f"{path}: a list of more than {MAX_LIST_BYTES >> 20} MiB is not accepted")
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text: byte {error.start}") from error
    entries = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not entries:
        raise InputError(f"{path}: the list is empty")
    readers: list[Reader] = []
    images: list[Path] = []
    for entry in entries:
        local = Path(entry) if Path(entry).is_absolute() else path.parent / entry
        if local.suffix.lower() in IMAGE_SUFFIXES and "://" not in entry and not glob.has_magic(entry):
            images.append(local)  # read one by one; a missing one is reported and does not stop the rest
        elif "://" in entry or " ! " in entry or (entry.isdigit() and not local.exists()):
            readers += _open(entry, policy=policy, wake=wake, depth=1)
        else:
            readers += _open(local, policy=policy, wake=wake, depth=1)
    return [ImageReader(images), *readers] if images else readers


def _open_video(path: Path, *, policy: str, wake: threading.Condition) -> Reader:
    if not path.is_file():
        raise InputError(f"{path}: not a regular file; a live source is a camera number, an address or a pipeline")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty (0 bytes)")

    def opener() -> VideoReader:
        return VideoReader(str(path), name=str(path))

    if policy == "latest":
        return LatestReader(opener, name=str(path), live=False, wake=wake)
    return opener()


def _open_live(
    target: str | int, *, name: str, policy: str, wake: threading.Condition, api: int | None = None
) -> Reader:
    def opener() -> VideoReader:
        return VideoReader(target, name=name, live=True, api=api)

    return opener() if policy == "every" else LatestReader(opener, name=name, live=True, wake=wake)


def _open_gstreamer(text: str, *, policy: str, wake: threading.Condition) -> Reader:
    if not has_gstreamer():
        raise InputError(
            f"{text[:60]!r}: this OpenCV was built without GStreamer; on a Jetson use JetPack's own OpenCV "
            "(python3-opencv, no opencv-python wheel beside it), elsewhere a build with it, or an rtsp:// address"
        )
    return _open_live(text, name="gstreamer", policy=policy, wake=wake, api=import_cv2().CAP_GSTREAMER)


def _media_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            files = [Path(entry.path) for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{folder}: cannot be listed: {error.strerror or error}") from error
    return sorted((path for path in files if path.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES), key=_natural)


def _natural(path: Path) -> list[Any]:
    """Sort key that puts frame_9 before frame_10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", str(path))]


def _shown(address: str) -> str:
    """An address without the password that may stand in it."""
    return re.sub(r"(://[^/:@\s]*):[^/@\s]*@", r"\1:***@", address)
