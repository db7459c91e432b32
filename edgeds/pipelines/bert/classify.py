"""Logits to labels with scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeds.engines.base import Array
from edgeds.errors import SpecError
from edgeds.pipelines.bert.head import TextHead


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label and its score: a probability, or the value itself for a model that predicts numbers."""

    label: str
    score: float


def softmax(logits: Array) -> Array:
    """Over the last axis, in float64."""
    values = np.asarray(logits, np.float64)
    shifted = np.exp(values - values.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def sigmoid(logits: Array) -> Array:
    """In float64, without overflow at either end."""
    values = np.asarray(logits, np.float64)
    small = np.exp(-np.abs(values))
    return np.where(values >= 0, 1, small) / (1 + small)


def score_labels(logits: Array, head: TextHead) -> Array:
    """Scores [labels] of one row: sigmoid for independent labels and for a single one, else softmax."""
    if head.regression:
        return np.asarray(logits, np.float64)
    return sigmoid(logits) if head.multi_label or len(logits) == 1 else softmax(logits)


def top_labels(windows: Sequence[Array], tokens: Sequence[int], *, head: TextHead, top_k: int | None) -> list[Label]:
    """The best labels of one text, best first; ``windows`` are the logits of its rows, averaged by their tokens."""
    if top_k is not None and top_k < 1:
        raise SpecError(f"top_k {top_k}: give a whole number from 1 up, or None for all labels")
    scores = np.average([score_labels(logits, head) for logits in windows], axis=0, weights=tokens)
    best = np.argsort(-scores, kind="stable")[:top_k]
    return [Label(label=head.label(int(index)), score=float(scores[index])) for index in best]
