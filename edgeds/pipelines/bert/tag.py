"""Token logits to entities: word pieces to words, windows to one text, words to entities by the labels' scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgeds.engines.base import Array
from edgeds.errors import SpecError
from edgeds.pipelines.bert.classify import softmax
from edgeds.pipelines.bert.encode import Row

AGGREGATIONS = ("first", "average", "max")
OUTSIDE = "O"
_BEGINS, _ENDS = "BSU", "ESLU"
"""BIO, IOB, BIOES and BILOU: prefixes that open an entity, and those that close one (S and U are whole entities)."""


@dataclass(frozen=True, kw_only=True)
class Entity:
    """One entity: characters ``start`` to ``end`` of the text as given, which hold ``text``; the mean word score."""

    start: int
    end: int
    label: str
    score: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Word:
    """One word of the tokenizer: characters in the text, its label, and that label's probability."""

    start: int
    end: int
    label: str
    score: float


def label_words(
    rows: Sequence[Row], logits: Sequence[Array], *, labels: Mapping[int, str], aggregation: str
) -> dict[int, Word]:
    """Words of one text by their number. A word in several windows is taken from where it has most context.

    ``aggregation``: the word's first piece decides, the mean of its pieces, or the piece that is surest.
    """
    if aggregation not in AGGREGATIONS:
        raise SpecError(f"aggregation {aggregation!r}: expected one of {', '.join(AGGREGATIONS)}")
    found: dict[int, tuple[int, Word]] = {}
    for row, values in zip(rows, logits, strict=True):
        chances = softmax(values)
        pieces: dict[int, list[int]] = {}
        for at, word in enumerate(row.encoding.word_ids):
            if word is not None:
                pieces.setdefault(word, []).append(at)
        offsets = row.encoding.offsets
        for word, places in pieces.items():
            context = min(places[0], len(row) - 1 - places[-1])
            if word in found and found[word][0] >= context:
                continue
            spread = _combine(chances[places], aggregation)
            best = int(spread.argmax())
            start, end = min(offsets[at][0] for at in places), max(offsets[at][1] for at in places)
            named = labels.get(best, f"LABEL_{best}")
            found[word] = (context, Word(start=start, end=end, label=named, score=float(spread[best])))
    return {number: found[number][1] for number in sorted(found)}


def _combine(chances: Array, aggregation: str) -> Array:
    if aggregation == "first":
        return chances[0]
    if aggregation == "average":
        return chances.mean(axis=0)
    return chances[int(chances.max(axis=1).argmax())]


def split_label(label: str) -> tuple[str, str]:
    """(prefix, kind): ``B-PER`` is ("B", "PER"); a label without a known prefix continues itself: ("I", label)."""
    if label == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, kind = label.partition("-")
    if dash and prefix in ("B", "I", "E", "S", "L", "U"):
        return prefix, kind
    return "I", label


def group_labels(labels: Sequence[str]) -> list[tuple[int, int, str]]:
    """(first, last + 1, kind) of every entity in a sequence of labels, as conlleval reads BIO, IOB, BIOES, BILOU.

    An inside label without a beginning, or of another kind than the one before, opens an entity.
    """
    found: list[tuple[int, int, str]] = []
    is_open = False
    for at, label in enumerate(labels):
        prefix, kind = split_label(label)
        if prefix == OUTSIDE:
            is_open = False
            continue
        if is_open and prefix not in _BEGINS and found[-1][2] == kind:
            found[-1] = (found[-1][0], at + 1, kind)
        else:
            found.append((at, at + 1, kind))
        is_open = prefix not in _ENDS
    return found


def find_entities(text: str, words: Sequence[Word]) -> list[Entity]:
    """Entities of a text in order, cut from the original text by their offsets."""
    entities = []
    for first, end, kind in group_labels([word.label for word in words]):
        parts = words[first:end]
        start, stop = parts[0].start, parts[-1].end
        score = float(np.mean([word.score for word in parts]))
        entities.append(Entity(start=start, end=stop, label=kind, score=score, text=text[start:stop]))
    return entities
