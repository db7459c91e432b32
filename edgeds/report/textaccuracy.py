"""Accuracy of text models: Spearman correlation, accuracy and F1, entity F1, exact match and F1 of answers.

All figures are in points (of 100).
"""

from __future__ import annotations

import re
import string
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeds.errors import SpecError
from edgeds.pipelines.bert.classify import Label
from edgeds.pipelines.bert.embed import unit_rows
from edgeds.pipelines.bert.pipeline import BertPipeline
from edgeds.pipelines.bert.tag import group_labels
from edgeds.progress import track
from edgeds.report.textdata import READERS, LabelledText, Question, TaggedWords, TextPair

MULTI_LABEL_THRESHOLD = 0.5


def evaluate_text(
    pipeline: BertPipeline, data: str | Path, *, limit: int | None = None, quiet: bool = False
) -> dict[str, Any]:
    """``metric``, ``value`` and all that the task has, on a file that ``textdata`` reads.

    embed: ``spearman`` and ``pearson`` of the cosine with the scores. classify: ``accuracy``, ``f1`` (macro),
    ``f1_binary`` (of the second of two labels). tag: entity ``f1``, ``precision``, ``recall``. answer: ``f1``,
    ``exact_match``. ``limit`` takes the first samples. Raises SpecError for data that do not fit the task.
    """
    if limit is not None and limit < 1:
        raise SpecError(f"--limit {limit}: need at least 1")
    samples = READERS[pipeline.task](data)[:limit]
    started = time.perf_counter()
    found = _MEASURES[pipeline.task](pipeline, samples, quiet=quiet)
    return {**found, "samples": len(samples), "seconds": round(time.perf_counter() - started, 3)}


def rank(values: ArrayLike) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of their ranks."""
    array = np.asarray(values, np.float64)
    order = np.argsort(array, kind="stable")
    ordered = array[order]
    starts = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    group = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    count = np.diff([*first, len(array)])
    ranks = np.empty(len(array))
    ranks[order] = (first + (count + 1) / 2)[group]
    return ranks


def pearson(first: ArrayLike, second: ArrayLike) -> float:
    """Correlation, -1 to 1. Raises SpecError for fewer than two values, or when one side does not vary."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if len(a) != len(b) or len(a) < 2:
        raise SpecError(f"correlation needs two equally long series of at least 2 values, got {len(a)} and {len(b)}")
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    if not scale > 0:
        raise SpecError("correlation is undefined: one of the two series does not vary, or is not finite")
    return float(np.clip((a @ b) / scale, -1, 1))


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """Rank correlation, -1 to 1; ties share their mean rank."""
    return pearson(rank(first), rank(second))


def label_scores(wanted: Sequence[frozenset[str]], found: Sequence[frozenset[str]]) -> dict[str, float]:
    """``accuracy`` (all labels of a sample right), ``f1`` macro and ``f1_micro``, over the labels that occur."""
    hits, extra, missed = Counter[str](), Counter[str](), Counter[str]()
    for want, got in zip(wanted, found, strict=True):
        hits.update(want & got)
        extra.update(got - want)
        missed.update(want - got)
    each = {name: _f1(hits[name], extra[name], missed[name]) for name in {*hits, *extra, *missed}}
    right = sum(want == got for want, got in zip(wanted, found, strict=True))
    return {
        "accuracy": 100 * right / len(wanted),
        "f1": 100 * float(np.mean(list(each.values()))) if each else 100.0,
        "f1_micro": 100 * _f1(hits.total(), extra.total(), missed.total()),
        **{f"f1_{name}": 100 * value for name, value in sorted(each.items())},
    }


def entity_scores(wanted: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> dict[str, float]:
    """``f1``, ``precision`` and ``recall`` of whole entities: both borders and the kind must agree (conlleval)."""
    hits = expected = given = 0
    for want, got in zip(wanted, found, strict=True):
        one, two = set(group_labels(want)), set(group_labels(got))
        hits += len(one & two)
        expected += len(one)
        given += len(two)
    return {
        "f1": 100 * _f1(hits, given - hits, expected - hits),
        "precision": 100 * hits / given if given else 0.0,
        "recall": 100 * hits / expected if expected else 0.0,
    }


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra blanks, as in SQuAD's own evaluation."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def answer_scores(wanted: Sequence[str], found: str) -> tuple[float, float]:
    """(exact match, F1 over words), 0 to 1: the best over the accepted answers; none accepted means the empty one."""
    got = normalize_answer(found)
    texts = [text for text in map(normalize_answer, wanted) if text] or [""]
    return float(got in texts), max(_word_f1(text, got) for text in texts)


def _word_f1(wanted: str, found: str) -> float:
    one, two = Counter(wanted.split()), Counter(found.split())
    if not one or not two:
        return float(one == two)
    hits = (one & two).total()
    return _f1(hits, two.total() - hits, one.total() - hits)


def _f1(hits: int, extra: int, missed: int) -> float:
    return 2 * hits / (2 * hits + extra + missed) if hits else 0.0


def _pairs(pipeline: BertPipeline, samples: list[TextPair], *, quiet: bool) -> dict[str, Any]:
    texts = [text for sample in samples for text in (sample.first, sample.second)]
    rows = list(track(pipeline.embed_each(texts), what="embedding", total=len(texts), unit="text", quiet=quiet))
    vectors = unit_rows(np.stack(rows)).astype(np.float64)
    cosines = np.einsum("ij,ij->i", vectors[::2], vectors[1::2])
    scores = [sample.score for sample in samples]
    value = 100 * spearman(cosines, scores)
    return {"metric": "spearman", "value": value, "spearman": value, "pearson": 100 * pearson(cosines, scores)}


def _labelled(pipeline: BertPipeline, samples: list[LabelledText], *, quiet: bool) -> dict[str, Any]:
    head = pipeline.head
    if head.regression:
        raise SpecError("this model predicts numbers, not labels; its accuracy cannot be measured on labels")
    named = {str(number): name for number, name in head.id2label.items()}
    wanted = [frozenset(named.get(label, label) for label in sample.labels) for sample in samples]
    known = set(head.id2label.values())
    unknown = sorted(set().union(*wanted) - known) if known else []
    if unknown:
        raise SpecError(f"label {unknown[0]!r} of the data is none of the model's: {', '.join(sorted(known))}")
    items = pipeline.classify_each((sample.text for sample in samples), top_k=None)
    rows = track(items, what="classifying", total=len(samples), unit="text", quiet=quiet)
    found = [_chosen(labels, multi=head.multi_label) for labels in rows]
    scores = label_scores(wanted, found)
    if len(known) == 2 and not head.multi_label:
        scores["f1_binary"] = scores.get(f"f1_{head.id2label[max(head.id2label)]}", 0.0)
    if head.multi_label:
        return {"metric": "f1_micro", "value": scores["f1_micro"], **scores}
    return {"metric": "accuracy", "value": scores["accuracy"], **scores}


def _chosen(labels: list[Label], *, multi: bool) -> frozenset[str]:
    if multi:
        return frozenset(item.label for item in labels if item.score >= MULTI_LABEL_THRESHOLD)
    return frozenset([labels[0].label])


def _tagged(pipeline: BertPipeline, samples: list[TaggedWords], *, quiet: bool) -> dict[str, Any]:
    rows = track(samples, what="tagging", total=len(samples), unit="text", quiet=quiet)
    found = [pipeline.tag_words(sample.words) for sample in rows]
    scores = entity_scores([sample.labels for sample in samples], found)
    return {"metric": "f1", "value": scores["f1"], **scores}


def _questions(pipeline: BertPipeline, samples: list[Question], *, quiet: bool) -> dict[str, Any]:
    may_be_empty = any(not sample.answers for sample in samples)
    items = pipeline.answer_each(((sample.question, sample.context) for sample in samples), no_answer=may_be_empty)
    rows = track(items, what="answering", total=len(samples), unit="question", quiet=quiet)
    both = [answer_scores(sample.answers, found[0].text) for sample, found in zip(samples, rows, strict=True)]
    exact, f1 = (100 * float(np.mean(column)) for column in zip(*both, strict=True))
    return {"metric": "f1", "value": f1, "f1": f1, "exact_match": exact}


_MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "embed": _pairs,
    "classify": _labelled,
    "tag": _tagged,
    "answer": _questions,
}
