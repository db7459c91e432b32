"""Calibration text of a language model: windows of tokens, each run into an empty cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from edgeds.errors import CalibrationError, SpecError
from edgeds.files import read_regular
from edgeds.graph.decoder_feeds import prefill_feeds
from edgeds.pipelines.llm.text import LlmText
from edgeds.workshop.textsamples import SENTENCES, long_texts

WINDOW = 512
DEFAULT_SAMPLES = 32
MAX_TEXT_BYTES = 256 << 20
SUFFIXES = (".txt", ".text", ".md", ".raw")


class TokenWindows:
    """Feeds of ``windows`` [count][tokens], made afresh by each iteration."""

    def __init__(self, model: ModelProto, windows: Sequence[Sequence[int]]) -> None:
        self._model, self._windows = model, windows

    def __len__(self) -> int:
        return len(self._windows)

    def __iter__(self) -> Iterator[dict[str, NDArray[np.generic]]]:
        for window in self._windows:
            yield prefill_feeds(self._model, [window])


def read_windows(
    calib: str | Path | None, *, text: LlmText, samples: int | None = None, window: int = WINDOW
) -> list[list[int]]:
    """Up to ``samples`` (default 32) windows of ``window`` tokens, spread evenly over a text file or a folder of them;
    without ``calib`` over the sentences that edgeds brings.

    Raises CalibrationError when there is no text, or it cannot be read; SpecError for a number of samples below 1.
    """
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        raise SpecError(f"calibration samples {samples!r}: must be a whole number of at least 1")
    written = "\n".join([*SENTENCES, *long_texts()]) if calib is None else _read(Path(calib))
    tokens = text.encode(written)
    if len(tokens) < 2:
        raise CalibrationError(f"{calib}: holds no text to calibrate on")
    windows = [tokens[at : at + window] for at in range(0, len(tokens), window)]
    if len(windows) > 1 and len(windows[-1]) < window // 2:
        windows.pop()
    count = min(len(windows), samples or DEFAULT_SAMPLES)
    return [windows[at * len(windows) // count] for at in range(count)]


def _read(path: Path) -> str:
    files = sorted(item for item in path.rglob("*") if item.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise CalibrationError(f"{path}: holds no text files ({', '.join(SUFFIXES)})")
    parts, left = [], MAX_TEXT_BYTES
    for file in files:
        try:
            left -= file.stat().st_size
            if left < 0:
                raise CalibrationError(f"{path}: holds more than {MAX_TEXT_BYTES >> 20} MiB of text; a few are enough")
            data = read_regular(file)
        except OSError as error:
            raise CalibrationError(f"{file}: cannot be read: {error.strerror or error}") from error
        try:
            parts.append(data.decode())
        except UnicodeDecodeError as error:
            raise CalibrationError(f"{file}: byte {error.start} is not UTF-8 text") from error
    return "\n".join(parts)
