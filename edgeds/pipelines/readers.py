"""One source each: image files, arrays, video files, live streams. Polled by ``sources``; no policy of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeds.errors import InputError
from edgeds.imagefile import ImageU8, import_cv2, read_image, to_bgr

log = logging.getLogger("edgeds.pipelines.sources")

RECONNECT_TRIES = 5
RECONNECT_WAIT_S = 1.0
OPEN_TIMEOUT_MS = 10_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Frame:
    """One picture: where it is from, its number there (from 0), BGR uint8 pixels, time in seconds.

    ``time_s`` is the position in a video file, the monotonic clock for live sources, 0 for images. ``fps`` is the
    nominal rate of a video, None for images. When the picture could not be read ``image_bgr`` is None and ``error``
    says why.
    """

    source: str
    index: int
    image_bgr: ImageU8 | None
    time_s: float = 0.0
    fps: float | None = None
    error: InputError | None = None


class Reader(Protocol):
    """``poll`` returns the next frame, or None when there is none yet; ``done`` once the source has ended."""

    @property
    def done(self) -> bool: ...

    @property
    def dropped(self) -> int: ...

    def poll(self) -> Frame | None: ...

    def close(self) -> None: ...


class ImageReader:
    """Image files in the given order; an unreadable one becomes a frame with ``error``."""

    dropped = 0

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._index = 0
        self.done = not paths

    def poll(self) -> Frame | None:
        if self.done:
            return None
        path, index = self._paths[self._index], self._index
        self._index += 1
        self.done = self._index >= len(self._paths)
        try:
            return Frame(source=str(path), index=index, image_bgr=read_image(path))
        except InputError as error:
            return Frame(source=str(path), index=index, image_bgr=None, error=error)

    def close(self) -> None:
        self.done = True


class ArrayReader:
    """Arrays from any iterable, taken one at a time."""

    dropped = 0

    def __init__(self, arrays: Iterable[Any], *, name: str = "array") -> None:
        self._arrays: Iterator[Any] = iter(arrays)
        self._name = name
        self._index = 0
        self.done = False

    def poll(self) -> Frame | None:
        if self.done:
            return None
        try:
            array = next(self._arrays)
        except StopIteration:
            self.done = True
            return None
        index = self._index
        self._index += 1
        try:
            return Frame(source=self._name, index=index, image_bgr=to_bgr(array, where=f"{self._name} {index}"))
        except InputError as error:
            return Frame(source=self._name, index=index, image_bgr=None, error=error)

    def close(self) -> None:
        self.done = True
        close = getattr(self._arrays, "close", None)
        if callable(close):
            close()


class VideoReader:
    """Every frame of a video file or stream, read when polled. Opening raises InputError."""

    dropped = 0

    def __init__(self, target: str | int, *, name: str, live: bool = False, api: int | None = None) -> None:
        self._capture = open_capture(target, name=name, api=api)
        cv2 = import_cv2("reading video")
        self._name = name
        self._live = live
        self._index = 0
        fps = float(self._capture.get(cv2.CAP_PROP_FPS))
        self.fps = fps if 0 < fps < 1000 else 25.0
        count = self._capture.get(cv2.CAP_PROP_FRAME_COUNT)
        self._expected = int(count) if not live and 0 < count < 1e9 else 0
        self.done = False

    def poll(self) -> Frame | None:
        if self.done:
            return None
        cv2 = import_cv2("reading video")
        try:
            got, image = self._capture.read()
        except cv2.error as error:
            log.warning("%s: frame %d cannot be decoded: %s", self._name, self._index, str(error).strip())
            got, image = False, None
        if not got or image is None:
            return self._end()
        index = self._index
        self._index += 1
        at = time.monotonic() if self._live else index / self.fps
        return Frame(source=self._name, index=index, image_bgr=to_bgr(image, where=self._name), time_s=at, fps=self.fps)

    def close(self) -> None:
        self.done = True
        self._capture.release()

    def _end(self) -> Frame | None:
        self.close()
        if self._index == 0:
            error = InputError(f"{self._name}: no frame could be read; the video is empty or damaged")
            return Frame(source=self._name, index=0, image_bgr=None, error=error)
        # Containers round their frame count, so a small difference is no sign of damage.
        if self._expected and self._index < self._expected - max(2, self._expected // 50):
            log.warning("%s: ended after frame %d of %d; the file is damaged", self._name, self._index, self._expected)
        return None


class LatestReader:
    """Keeps only the newest frame of a source, read in a thread of its own; frames nobody took count as dropped.

    Files are played at their own speed. A network stream that breaks is opened again a few times. ``wake`` is
    notified whenever there is something to poll.
    """

    def __init__(self, opener: Callable[[], VideoReader], *, name: str, live: bool, wake: threading.Condition) -> None:
        self._opener = opener
        self._name = name
        self._live = live
        self._wake = wake
        self._newest: Frame | None = None
        self._ended = False
        self._stop = threading.Event()
        self.dropped = 0
        # Opened here, so that a wrong address is an error at the call and not a line in a log.
        self._video = opener()
        self._thread = threading.Thread(target=self._read, name=f"edgeds-source-{name[:40]}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return self._ended and self._newest is None

    def poll(self) -> Frame | None:
        with self._wake:
            frame, self._newest = self._newest, None
            return frame

    def close(self) -> None:
        self._stop.set()
        # The thread owns the capture and releases it; a blocking network read ends by its own timeout.
        self._thread.join(timeout=2.0)
        with self._wake:
            self._newest, self._ended = None, True
            self._wake.notify_all()

    def _read(self) -> None:
        tries, index, start = 0, 0, time.monotonic()
        try:
            while not self._stop.is_set():
                frame = self._video.poll()
                if frame is None or frame.error is not None:
                    tries += 1
                    if not self._live or tries > RECONNECT_TRIES:
                        self._publish(frame)
                        return
                    self._reopen(tries)
                    continue
                tries = 0
                if not self._live and self._stop.wait(max(0.0, start + frame.time_s - time.monotonic())):
                    return
                self._publish(replace(frame, index=index))
                index += 1
        finally:
            self._video.close()
            with self._wake:
                self._ended = True
                self._wake.notify_all()

    def _publish(self, frame: Frame | None) -> None:
        if frame is None:
            return
        with self._wake:
            self.dropped += self._newest is not None
            self._newest = frame
            self._wake.notify_all()

    def _reopen(self, tries: int) -> None:
        log.warning("%s: the stream broke; opening it again (%d of %d)", self._name, tries, RECONNECT_TRIES)
        if self._stop.wait(min(RECONNECT_WAIT_S * 2.0 ** (tries - 1), 8.0)):
            return
        try:
            video = self._opener()
        except InputError:
            return  # counted as one more failed try when the closed capture is polled again
        self._video.close()
        self._video = video


def open_capture(target: str | int, *, name: str, api: int | None = None) -> Any:
    """An opened cv2.VideoCapture. Raises InputError that says what to check."""
    cv2 = import_cv2("reading video")
    parameters: list[int] = []
    if isinstance(target, str) and "://" in target and cv2.CAP_FFMPEG in cv2.videoio_registry.getBackends():
        # Without these a dead address blocks for half a minute or for ever. (JetPack's OpenCV has GStreamer instead.)
        parameters = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, OPEN_TIMEOUT_MS, cv2.CAP_PROP_READ_TIMEOUT_MSEC, OPEN_TIMEOUT_MS]
        api = cv2.CAP_FFMPEG
    try:
        capture = cv2.VideoCapture(target, api if api is not None else cv2.CAP_ANY, parameters)
        opened = bool(capture.isOpened())
    except cv2.error as error:
        raise InputError(f"{name}: cannot be opened as video: {str(error).strip().splitlines()[0]}") from error
    if not opened:
        capture.release()
        what = "check that the camera is connected and not in use" if isinstance(target, int) else "check the address"
        if isinstance(target, str) and "://" not in target and api is None:
            what = "the file is damaged or OpenCV lacks its codec"
        raise InputError(f"{name}: cannot be opened as video; {what}")
    return capture


def has_gstreamer() -> bool:
    """Whether this OpenCV was built with GStreamer."""
    cv2 = import_cv2("reading video")
    lines = [line for line in cv2.getBuildInformation().splitlines() if "GStreamer" in line]
    return any("YES" in line for line in lines)


def frames_of(array: NDArray[Any]) -> Iterable[NDArray[Any]]:
    """One picture, or each of a stack [N, H, W, C]."""
    return list(array) if isinstance(array, np.ndarray) and array.ndim == 4 else [array]
