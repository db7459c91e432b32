"""Start and end logits to answers: the best spans over all windows, and whether there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeds.engines.base import Array
from edgeds.errors import SpecError
from edgeds.pipelines.bert.classify import softmax
from edgeds.pipelines.bert.encode import Row

CANDIDATES = 20
"""Starts and ends looked at per window, and spans that share the probability (as in the evaluation of SQuAD)."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Characters ``start`` to ``end`` of the context, which hold ``text``. An empty text says: no answer in it."""

    start: int
    end: int
    score: float
    text: str


def find_answers(
    context: str,
    rows: Sequence[Row],
    logits: Sequence[tuple[Array, Array]],
    *,
    n_best: int = 1,
    no_answer: bool = True,
    max_answer_tokens: int = 30,
) -> list[Answer]:
    """At most ``n_best`` answers, best first; ``logits`` are (start, end) [tokens] of each row.

    A span's score is the sum of its two logits, turned into a probability over the best spans and, with ``no_answer``,
    the empty answer: the first token's logits in the window where they are lowest, as in SQuAD 2.0.
    """
    if n_best < 1 or max_answer_tokens < 1:
        raise SpecError(f"n_best {n_best}, max_answer_tokens {max_answer_tokens}: both must be at least 1")
    spans: dict[tuple[int, int], float] = {}
    empty = math.inf
    for row, (start, end) in zip(rows, logits, strict=True):
        empty = min(empty, float(start[0]) + float(end[0]))
        for span, score in _window_spans(row, start, end, max_tokens=max_answer_tokens):
            spans[span] = max(score, spans.get(span, -math.inf))
    best = sorted(spans.items(), key=lambda item: (-item[1], item[0]))[:CANDIDATES]
    scored = [(score, Answer(start=a, end=b, score=0.0, text=context[a:b])) for (a, b), score in best]
    if no_answer or not scored:
        scored.append((empty, Answer(start=0, end=0, score=0.0, text="")))
        scored.sort(key=lambda item: -item[0])
    chances = softmax(np.array([score for score, _ in scored]))
    return [
        Answer(start=item.start, end=item.end, text=item.text, score=float(chance))
        for (_, item), chance in zip(scored[:n_best], chances, strict=False)
    ]


def _window_spans(row: Row, start: Array, end: Array, *, max_tokens: int) -> list[tuple[tuple[int, int], float]]:
    """(characters, score) of the spans within the context part of one row."""
    offsets = row.encoding.offsets
    inside = np.array([part == 1 and a < b for part, (a, b) in zip(row.encoding.sequence_ids, offsets, strict=True)])
    if not inside.any():
        return []
    starts = np.argsort(np.where(inside, -start.astype(np.float64), np.inf), kind="stable")[:CANDIDATES]
    ends = np.argsort(np.where(inside, -end.astype(np.float64), np.inf), kind="stable")[:CANDIDATES]
    return [
        ((offsets[first][0], offsets[last][1]), float(start[first]) + float(end[last]))
        for first in starts
        for last in ends
        if inside[first] and inside[last] and first <= last < first + max_tokens
    ]
