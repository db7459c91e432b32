"""Annotated pictures and videos on disk, each complete or not there at all."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from edgeds.errors import InputError, SpecError
from edgeds.files import atomic_path
from edgeds.imagefile import import_cv2
from edgeds.pipelines.sources import Frame
from edgeds.pipelines.yolo import Result

# Encoders differ between OpenCV builds; Motion JPEG is in every one of them.
CODECS = (("mp4v", ".mp4"), ("MJPG", ".avi"))
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class ResultWriter:
    """Writes ``plot()`` of every result into a folder: pictures by name, one video per video source.

    A context manager: videos appear under their names when it ends, also on Ctrl-C (with the frames so far, playable);
    after any other failure an unfinished video is removed.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise SpecError(f"{folder}: is a file; --save needs a folder")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._taken: set[str] = set()
        self._videos: dict[str, _Video] = {}

    def write(self, frame: Frame, result: Result) -> None:
        """Save one result. Raises SpecError when a picture would replace its own source."""
        if frame.fps is None:
            result.save(self._picture_path(Path(frame.source)))
            return
        if frame.source not in self._videos:
            stem = self._free(re.sub(r"[^\w.-]+", "_", Path(frame.source).stem)[-80:] or "video", "")
            self._videos[frame.source] = _Video(self.folder / stem, fps=frame.fps)
        self._videos[frame.source].add(result.plot())

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        keep = kind is None or issubclass(kind, KeyboardInterrupt)
        for video in self._videos.values():
            video.close(keep=keep)

    def _picture_path(self, source: Path) -> Path:
        suffix = source.suffix.lower() if source.suffix.lower() in PICTURE_SUFFIXES else ".png"
        path = self.folder / (self._free(source.stem or "frame", suffix) + suffix)
        if path.exists() and source.exists() and path.samefile(source):
            raise SpecError(f"{path}: saving here would replace the source picture; choose another folder for --save")
        return path

    def _free(self, stem: str, suffix: str) -> str:
        """The stem, numbered when this run has used it (two folders may hold equal names)."""
        name, number = stem, 1
        while name + suffix in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name + suffix)
        return name


class _Video:
    """One video file, written under a temporary name."""

    def __init__(self, stem: Path, *, fps: float) -> None:
        self._stem = stem
        self._fps = fps
        self._stack = contextlib.ExitStack()
        self._writer: Any = None
        self._size: tuple[int, int] | None = None

    def add(self, image: Any) -> None:
        cv2 = import_cv2("writing video")
        size = (image.shape[1], image.shape[0])
        if self._writer is None:
            self._open(size)
        # A stream may change its size; a video file cannot.
        self._writer.write(image if size == self._size else cv2.resize(image, self._size))

    def close(self, *, keep: bool) -> None:
        if self._writer is None:
            return
        self._writer.release()
        if keep:
            self._stack.close()
        else:
            error = InterruptedError("video not finished")
            self._stack.__exit__(InterruptedError, error, None)

    def _open(self, size: tuple[int, int]) -> None:
        cv2 = import_cv2("writing video")
        self._size = size
        for codec, suffix in CODECS:
            target = self._stem.with_name(self._stem.name + suffix)
            attempt = contextlib.ExitStack()
            temporary = attempt.enter_context(atomic_path(target))
            writer = cv2.VideoWriter(str(temporary), cv2.VideoWriter_fourcc(*codec), self._fps, size)
            if writer.isOpened():
                self._writer, self._stack = writer, attempt
                return
            writer.release()
            attempt.__exit__(InputError, InputError("codec not available"), None)
        raise InputError(f"{self._stem}: this OpenCV can write neither MP4 nor Motion JPEG video")
