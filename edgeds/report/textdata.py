"""Labelled texts from simple files: sentence pairs, classified texts, tagged words, questions over contexts.

Tables are tab or comma separated with a header, or JSON lines; STS benchmark files (seven columns, no header), CoNLL
columns and SQuAD JSON are read as published.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgeds.errors import SpecError
from edgeds.files import open_regular, parse_json

T = TypeVar("T")
MAX_DATA_BYTES = 1 << 30
_FIRST = ("sentence1", "text1", "premise", "s1", "a")
_SECOND = ("sentence2", "text2", "hypothesis", "s2", "b")
_SCORE = ("score", "similarity", "similarity_score", "label")
_TEXT = ("sentence", "text", "review")
_LABEL = ("label", "labels", "class")
STS_COLUMNS = 7
"""Genre, file, year, number, score, sentence 1, sentence 2; some rows have licence columns after them."""


@dataclass(frozen=True, kw_only=True)
class TextPair:
    """Two sentences and how alike they are, on the data set's own scale."""

    first: str
    second: str
    score: float


@dataclass(frozen=True, kw_only=True)
class LabelledText:
    """A text, or a pair, and its label (several where labels are independent)."""

    text: str | tuple[str, str]
    labels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TaggedWords:
    """A sentence as words, one label each."""

    words: tuple[str, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, its context, and every accepted answer (none: the context holds none)."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]


def read_pairs(path: str | Path) -> list[TextPair]:
    """Sentence pairs with a score. Raises SpecError naming file and line for anything that is not one."""
    source = Path(path)
    text = _read_text(source)
    if not _is_json(source):
        first = next((line for line in text.split("\n") if line.strip()), "")
        fields = first.split("\t")
        if len(fields) >= STS_COLUMNS and _is_number(fields[4]):
            return _nonempty(source, [_sts_row(fields, where) for fields, where in _tab_rows(source, text)])

    def build(row: Mapping[str, Any], where: str) -> TextPair:
        score = _pick(row, _SCORE, where)
        if not _is_number(str(score)):
            raise SpecError(f"{where}: score is {score!r}; expected a finite number")
        first, second = (_as_text(_pick(row, names, where), where) for names in (_FIRST, _SECOND))
        return TextPair(first=first, second=second, score=float(score))

    return _nonempty(source, [build(row, where) for row, where in _rows(source, text)])


def read_labelled(path: str | Path) -> list[LabelledText]:
    """Texts (``sentence``/``text``, or two columns for pairs) with a ``label``; a JSON list gives several labels."""
    source = Path(path)

    def build(row: Mapping[str, Any], where: str) -> LabelledText:
        label = _pick(row, _LABEL, where)
        labels = tuple(str(item) for item in label) if isinstance(label, list) else (str(label).strip(),)
        if any(not item for item in labels):
            raise SpecError(f"{where}: the label is empty")
        if any(name in row for name in _TEXT):
            return LabelledText(text=_as_text(_pick(row, _TEXT, where), where), labels=labels)
        pair = tuple(_as_text(_pick(row, names, where), where) for names in (_FIRST, _SECOND))
        return LabelledText(text=(pair[0], pair[1]), labels=labels)

    return _nonempty(source, [build(row, where) for row, where in _rows(source, _read_text(source))])


def read_tagged(path: str | Path) -> list[TaggedWords]:
    """CoNLL columns (word first, label last, blank lines between sentences), or JSON lines of ``words``, ``labels``."""
    source = Path(path)
    text = _read_text(source)
    if _is_json(source):
        return _nonempty(source, [_tagged_row(row, where) for row, where in _rows(source, text)])
    found: list[TaggedWords] = []
    words: list[str] = []
    labels: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        fields = line.split()
        if not fields or fields[0] == "-DOCSTART-":
            if words:
                found.append(TaggedWords(words=tuple(words), labels=tuple(labels)))
            words, labels = [], []
        elif len(fields) < 2:
            raise SpecError(f"{source}: line {number} has the word {fields[0]!r} without a label")
        else:
            words.append(fields[0])
            labels.append(fields[-1])
    return _nonempty(source, found)


def read_questions(path: str | Path) -> list[Question]:
    """SQuAD JSON (1.1 or 2.0), or JSON lines with ``question``, ``context`` and ``answers`` (texts)."""
    source = Path(path)
    text = _read_text(source)
    whole = parse_json(text.encode(), where=str(source)) if source.suffix.lower() == ".json" else None
    if isinstance(whole, dict) and isinstance(whole.get("data"), list):
        return _nonempty(source, list(_squad_questions(whole["data"], where=str(source))))
    return _nonempty(source, [_question(row, where, str(at)) for at, (row, where) in enumerate(_rows(source, text))])


def _squad_questions(articles: Sequence[Any], *, where: str) -> Iterator[Question]:
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for entry in paragraph["qas"]:
                    answers = [] if entry.get("is_impossible") else [item["text"] for item in entry["answers"]]
                    yield Question(
                        id=str(entry["id"]),
                        question=_as_text(entry["question"], where),
                        context=_as_text(paragraph["context"], where),
                        answers=tuple(dict.fromkeys(_as_text(item, where) for item in answers)),
                    )
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"{where}: not in SQuAD's form (paragraphs, qas, answers): {error}") from error


def _question(row: Mapping[str, Any], where: str, number: str) -> Question:
    answers = row.get("answers", [])
    if isinstance(answers, dict):  # as the data set's own tables have it
        answers = answers.get("text", [])
    if not isinstance(answers, list):
        raise SpecError(f"{where}: answers is {answers!r}; expected a list of texts")
    return Question(
        id=str(row.get("id", number)),
        question=_as_text(_pick(row, ("question",), where), where),
        context=_as_text(_pick(row, ("context",), where), where),
        answers=tuple(_as_text(item, where) for item in answers),
    )


def _tagged_row(row: Mapping[str, Any], where: str) -> TaggedWords:
    words, labels = _pick(row, ("words", "tokens"), where), _pick(row, ("labels", "tags", "ner_tags"), where)
    if not isinstance(words, list) or not isinstance(labels, list) or len(words) != len(labels):
        raise SpecError(f"{where}: words and labels must be lists of equal length")
    return TaggedWords(
        words=tuple(_as_text(word, where) for word in words), labels=tuple(_as_text(label, where) for label in labels)
    )


def _sts_row(fields: list[str], where: str) -> TextPair:
    if len(fields) < STS_COLUMNS or not _is_number(fields[4]):
        raise SpecError(f"{where}: expected {STS_COLUMNS} columns with a number in the fifth, got {len(fields)}")
    return TextPair(first=fields[5], second=fields[6], score=float(fields[4]))


def _tab_rows(source: Path, text: str) -> Iterator[tuple[list[str], str]]:
    """Rows of a file whose quotes are part of the text."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield line.rstrip("\r").split("\t"), f"{source}: line {number}"


def _rows(source: Path, text: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows by column name, each with where it stands."""
    if _is_json(source):
        yield from _json_rows(source, text)
        return
    first = text.partition("\n")[0]
    if "\t" in first:
        lines: Iterator[tuple[list[str], str]] = _tab_rows(source, text)
    else:
        reader = csv.reader(io.StringIO(text), strict=True)
        lines = _csv_rows(source, reader)
    header: list[str] | None = None
    for fields, where in lines:
        if header is None:
            header = [name.strip().lower() for name in fields]
            continue
        if len(fields) < len(header):
            raise SpecError(f"{where}: has {len(fields)} columns, the header {len(header)}")
        yield dict(zip(header, fields, strict=False)), where


def _csv_rows(source: Path, reader: Any) -> Iterator[tuple[list[str], str]]:
    try:
        for fields in reader:
            if fields:
                yield fields, f"{source}: line {reader.line_num}"
    except csv.Error as error:
        raise SpecError(f"{source}: line {reader.line_num} is not comma separated text: {error}") from error


def _json_rows(source: Path, text: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    if source.suffix.lower() == ".json":
        data = parse_json(text.encode(), where=str(source))
        rows = data if isinstance(data, list) else [data]
        found = [(row, f"{source}: entry {at}") for at, row in enumerate(rows)]
    else:
        lines = [(at, line) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
        found = [
            (parse_json(line.encode(), where=f"{source}: line {at}"), f"{source}: line {at}") for at, line in lines
        ]
    for row, where in found:
        if not isinstance(row, dict):
            raise SpecError(f"{where}: expected a JSON object, got {type(row).__name__}")
        yield row, where


def _read_text(source: Path) -> str:
    try:
        with open_regular(source) as stream:
            data = stream.read(MAX_DATA_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{source}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_DATA_BYTES:
        raise SpecError(f"{source}: larger than the {MAX_DATA_BYTES >> 20} MiB allowed")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{source}: line {line} is not UTF-8 (byte {error.start}); save it as UTF-8") from error


def _pick(row: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise SpecError(f"{where}: has no column {' or '.join(map(repr, names))}; it has {', '.join(map(str, row))}")


def _as_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{where}: expected text, got {value!r}")
    return value


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _is_json(source: Path) -> bool:
    return source.suffix.lower() in (".json", ".jsonl", ".ndjson")


def _nonempty(source: Path, rows: list[T]) -> list[T]:
    if not rows:
        raise SpecError(f"{source}: holds no samples")
    return rows


READERS: dict[str, Callable[[str | Path], list[Any]]] = {
    "embed": read_pairs,
    "classify": read_labelled,
    "tag": read_tagged,
    "answer": read_questions,
}
"""The reader of each task's data."""
