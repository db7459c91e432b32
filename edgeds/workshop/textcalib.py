"""Calibration samples of a text model: texts as the model's own inputs, one text per run and no padding.

What padding computes is never read, so ranges must not be widened for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.compress.calibset import CalibrationSet, Feeds, open_calibration
from edgeds.errors import CalibrationError, InputError, SpecError
from edgeds.files import read_regular
from edgeds.pipelines.bert.encode import Row, TextEncoder
from edgeds.pipelines.bert.feeds import build_feeds
from edgeds.pipelines.bert.tasks import Item
from edgeds.report.textdata import READERS
from edgeds.specs import TensorSpec

DEFAULT_SAMPLES = 200
"""Texts used when no number is given: more change no range of the models measured (docs/bert.md)."""
ARRAY_SUFFIXES = (".npz", ".npy")
TEXT_SUFFIXES = (".txt", ".text")
TABLE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".conll", ".bio")


class TextFeeds:
    """Feeds of texts, made afresh by each iteration: every different row of tokens once."""

    def __init__(self, texts: Sequence[Item], encoder: TextEncoder, specs: Sequence[TensorSpec], *, task: str) -> None:
        self._texts, self._encoder, self._specs, self._task = tuple(texts), encoder, tuple(specs), task

    def rows(self) -> Iterator[Row]:
        """The rows of all texts; only the first window of a long one."""
        for at, text in enumerate(self._texts):
            if isinstance(text, tuple):
                where = f"calibration text {at}"
                yield self._encoder.encode_pair(*text, where=where, windows=self._task == "answer").rows[0]
            else:
                yield self._encoder.encode([text], first=at)[0].rows[0]

    def __iter__(self) -> Iterator[Feeds]:
        seen: set[bytes] = set()
        for row in self.rows():
            key = row.ids.tobytes() + row.types.tobytes()
            if key not in seen:
                seen.add(key)
                length = next((spec.shape[1] for spec in self._specs if isinstance(spec.shape[1], int)), len(row))
                yield dict(build_feeds([row], self._specs, length=length, pad_id=self._encoder.pad_id))


def open_text_set(
    calib: Any, *, encoder: TextEncoder, specs: Sequence[TensorSpec], task: str, limit: int | None
) -> tuple[CalibrationSet, tuple[int, ...]]:
    """The calibration set and the lengths of its texts (none for arrays).

    ``calib``: a file with one text per line, a folder of such files, a labelled file of the task (its texts are used),
    arrays as ``open_calibration`` takes them, or an iterable of texts. Of many texts ``limit`` (default 200), spread
    evenly, are used. Raises CalibrationError when there are none, or one of them cannot be encoded.
    """
    if limit is not None and (isinstance(limit, bool) or limit < 1):
        raise SpecError(f"calibration samples {limit!r}: must be a whole number of at least 1")
    if isinstance(calib, str | Path) and holds_arrays(Path(calib)):
        return open_calibration(calib, model_inputs=specs, limit=limit), ()
    texts = read_texts(Path(calib), task=task) if isinstance(calib, str | Path) else _given(calib)
    count = min(len(texts), limit or DEFAULT_SAMPLES)
    chosen = [texts[at * len(texts) // count] for at in range(count)]
    feeds = TextFeeds(chosen, encoder, specs, task=task)
    try:
        lengths = tuple(len(row) for row in feeds.rows())
    except InputError as error:
        raise CalibrationError(f"calibration texts: {error}") from error
    return open_calibration(feeds, model_inputs=specs), lengths


def holds_arrays(path: Path) -> bool:
    """Whether a calibration path is an array file or a folder of them."""
    if path.is_dir():
        return any(item.suffix.lower() in ARRAY_SUFFIXES for item in path.iterdir())
    return path.suffix.lower() in ARRAY_SUFFIXES


def read_texts(path: Path, *, task: str) -> list[Item]:
    """Texts of a file or folder for ``task``. Raises CalibrationError for what is not there, not text, or empty."""
    if path.is_dir():
        files = sorted(item for item in path.rglob("*") if item.suffix.lower() in TEXT_SUFFIXES and item.is_file())
        texts: list[Item] = [text for item in files for text in _lines(item)]
        if not texts:
            raise CalibrationError(f"{path}: holds no .txt files with texts, one per line")
        return texts
    if path.suffix.lower() in TABLE_SUFFIXES:
        return _labelled_texts(path, task)
    if not path.exists():
        raise CalibrationError(f"{path}: no such file or folder; give texts, one per line")
    found: list[Item] = [*_lines(path)]
    if not found:
        raise CalibrationError(f"{path}: holds no texts")
    return found


def _labelled_texts(path: Path, task: str) -> list[Item]:
    try:
        samples = READERS[task](path)
    except SpecError as error:
        raise CalibrationError(str(error)) from error
    if task == "embed":
        return [text for sample in samples for text in (sample.first, sample.second)]
    if task == "tag":
        return [" ".join(sample.words) for sample in samples]
    return [(sample.question, sample.context) if task == "answer" else sample.text for sample in samples]


def _lines(path: Path) -> list[str]:
    try:
        data = read_regular(path).decode("utf-8-sig")
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    return [line.strip() for line in data.split("\n") if line.strip()]


def _given(calib: Any) -> list[Item]:
    if isinstance(calib, np.ndarray) or not isinstance(calib, Iterable):
        raise CalibrationError(f"calibration texts: expected a path or texts, got {type(calib).__name__}")
    texts = list(calib)
    if not texts:
        raise CalibrationError("calibration texts: none are given")
    return texts
