"""Accuracy figures against values computed elsewhere, and whole evaluations of tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textmodels import write_text_model, write_tokenizer

from edgeds.errors import SpecError
from edgeds.pipelines.bert import BertPipeline
from edgeds.report.textaccuracy import (
    answer_scores,
    entity_scores,
    evaluate_text,
    label_scores,
    normalize_answer,
    pearson,
    rank,
    spearman,
)

VALUES = st.lists(st.integers(-5, 5), min_size=2, max_size=30)


def test_spearman_equals_published_values() -> None:
    """IQ against hours of TV per week, Spearman's textbook example: -29/165; and scipy's value for one with ties."""
    iq = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110]
    hours = [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert spearman(iq, hours) == pytest.approx(-29 / 165)
    assert spearman([1, 2, 2, 3, 4], [2, 1, 3, 3, 5]) == pytest.approx(0.7631578947368421)
    assert rank([10, 20, 20, 5]).tolist() == [2, 3.5, 3.5, 1]


@given(first=VALUES, second=VALUES)
def test_spearman_is_the_pearson_of_counted_ranks(first: list[int], second: list[int]) -> None:
    size = min(len(first), len(second))
    a, b = first[:size], second[:size]
    ranks = [
        [sum(other < value for other in side) + (sum(other == value for other in side) + 1) / 2 for value in side]
        for side in (a, b)
    ]
    if size < 2 or len(set(a)) < 2 or len(set(b)) < 2:
        with pytest.raises(SpecError):
            spearman(a, b)
    else:
        assert spearman(a, b) == pytest.approx(float(np.corrcoef(*ranks)[0, 1]))
        assert spearman(a, b) == pytest.approx(spearman(b, a))
        assert spearman([3 * value + 1 for value in a], b) == pytest.approx(spearman(a, b))


def test_correlation_that_is_undefined_says_so() -> None:
    for first, second in (([1], [1]), ([1, 1], [1, 2]), ([1, 2], [1, 2, 3]), ([1, float("nan")], [1, 2])):
        with pytest.raises(SpecError, match="correlation"):
            pearson(first, second)


def test_labels_macro_micro_and_accuracy() -> None:
    wanted = [frozenset([name]) for name in "aabbc"]
    found = [frozenset([name]) for name in "abbba"]
    scores = label_scores(wanted, found)
    # a: 1 hit, 1 extra, 1 missed; b: 2 hits, 1 extra; c: 1 missed.
    assert scores["accuracy"] == pytest.approx(60)
    assert (scores["f1_a"], scores["f1_b"], scores["f1_c"]) == pytest.approx((50, 80, 0))
    assert scores["f1"] == pytest.approx(130 / 3)
    assert scores["f1_micro"] == pytest.approx(60)
    assert label_scores([frozenset("ab")], [frozenset("a")])["accuracy"] == 0


def test_entities_need_both_borders_and_the_kind() -> None:
    wanted = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG"]]
    found = [["B-PER", "O", "O", "B-LOC"], ["O", "B-PER"]]
    scores = entity_scores(wanted, found)
    assert scores["precision"] == pytest.approx(100 / 3)
    assert scores["recall"] == pytest.approx(100 / 3)
    assert entity_scores(wanted, wanted)["f1"] == 100
    assert entity_scores(wanted, [["O"] * 4, ["O"] * 2])["f1"] == 0


def test_answers_are_compared_as_squad_does() -> None:
    assert normalize_answer("The  Eiffel-Tower, a!") == "eiffeltower"
    assert answer_scores(["the Paris"], "Paris.") == (1, 1)
    assert answer_scores(["in Paris city", "Lyon"], "Paris") == (0, pytest.approx(0.5))
    assert answer_scores([], "") == (1, 1)
    assert answer_scores([], "Paris") == (0, 0)
    assert answer_scores(["Paris"], "") == (0, 0)


def evaluate(folder: Path, task: str, name: str, text: str, **options: int) -> dict[str, object]:
    pytest.importorskip("tokenizers")
    write_tokenizer(folder)
    (folder / name).write_text(text)
    with BertPipeline.from_model(write_text_model(folder / "m.onnx", task), folder, threads=1) as pipeline:
        return evaluate_text(pipeline, folder / name, quiet=True, **options)


def test_evaluation_of_embeddings(tmp_path: Path) -> None:
    rows = ["sentence1\tsentence2\tscore", "good movie\tgood movie\t5", "good movie\tthe good movie\t4"]
    found = evaluate(tmp_path, "embed", "a.tsv", "\n".join([*rows, "good movie\tparis corp who\t0"]))
    assert (found["metric"], found["value"], found["samples"]) == ("spearman", pytest.approx(100), 3)
    assert found["spearman"] == found["value"]
    with pytest.raises(SpecError, match="at least 2"):
        evaluate(tmp_path, "embed", "a.tsv", "\n".join(rows), limit=1)
    with pytest.raises(SpecError, match="--limit 0"):
        evaluate(tmp_path, "embed", "a.tsv", "\n".join(rows), limit=0)


def test_evaluation_of_classes_by_number_or_name(tmp_path: Path) -> None:
    rows = "sentence\tlabel\nvery good\t1\na bad movie\t0\nbad bad\tpositive\nthe good\tpositive\n"
    found = evaluate(tmp_path, "classify", "a.tsv", rows)
    assert (found["metric"], found["value"]) == ("accuracy", 75)
    assert found["f1_binary"] == pytest.approx(80)
    with pytest.raises(SpecError, match="label 'neutral' of the data"):
        evaluate(tmp_path, "classify", "a.tsv", "sentence\tlabel\ngood\tneutral\n")


def test_evaluation_of_tags_and_answers(tmp_path: Path) -> None:
    conll = "John B-PER\nSmith I-PER\nworks O\nin O\nParis B-LOC\n\nacme B-ORG\nbad I-ORG\n"
    found = evaluate(tmp_path, "tag", "a.conll", conll)
    assert found["f1"] == pytest.approx(100 * 2 * 2 / (3 + 3))
    lines = [
        {"question": "where ?", "context": "acme is in Paris .", "answers": ["Paris"]},
        {"question": "who ?", "context": "the movie", "answers": []},
    ]
    found = evaluate(tmp_path, "answer", "a.jsonl", "\n".join(map(json.dumps, lines)))
    assert (found["metric"], found["value"], found["exact_match"]) == ("f1", 100, 100)
