"""From the values of a text's rows to the result of its task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgeds.pipelines.bert.answer import Answer, find_answers
from edgeds.pipelines.bert.classify import Label, top_labels
from edgeds.pipelines.bert.embed import FloatArray, join_windows
from edgeds.pipelines.bert.encode import Encoded, Text, check_text
from edgeds.pipelines.bert.head import TextHead
from edgeds.pipelines.bert.tag import Entity, find_entities, label_words

Pair = tuple[Text, Text]
Item = Text | Pair
Build = Callable[[Item, Encoded, list[Any]], Any]
"""Takes a text (or pair), its rows, and the rows' values as ``runner.reduce_outputs`` gives them."""

UNIT_TOLERANCE = 1e-3


def build_result(task: str, head: TextHead, **options: Any) -> Build:
    """The function that makes the results of ``task``; ``options`` are those of its function below."""
    makers: dict[str, Callable[..., Any]] = {
        "embed": _embedding,
        "classify": _labels,
        "tag": _entities,
        "answer": _answers,
    }
    make = makers[task]

    def build(item: Item, encoded: Encoded, values: list[Any]) -> Any:
        return make(item, encoded, values, head=head, **options)

    return build


def _embedding(_: Item, encoded: Encoded, values: list[Any], *, head: TextHead) -> FloatArray:
    # The mean of unit vectors is shorter than one; where the graph makes them so, theirs is made so too.
    unit = head.normalize or all(abs(float(value @ value) - 1) < UNIT_TOLERANCE for value in values)
    return join_windows(values, [len(row) for row in encoded.rows], normalize=unit)


def _labels(_: Item, encoded: Encoded, values: list[Any], *, head: TextHead, top_k: int | None = 1) -> list[Label]:
    return top_labels(values, [len(row) for row in encoded.rows], head=head, top_k=top_k)


def _entities(
    item: Item, encoded: Encoded, values: list[Any], *, head: TextHead, aggregation: str = "first"
) -> list[Entity]:
    words = label_words(encoded.rows, values, labels=head.id2label, aggregation=aggregation)
    return find_entities(check_text(item, where="text"), list(words.values()))


def _answers(item: Item, encoded: Encoded, values: list[Any], *, head: TextHead, **options: Any) -> list[Answer]:
    return find_answers(check_text(item[1], where="context"), encoded.rows, values, **options)
