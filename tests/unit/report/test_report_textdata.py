"""Labelled texts in every form that is read, and one sentence with the line for what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeds.errors import SpecError
from edgeds.report.textdata import read_labelled, read_pairs, read_questions, read_tagged

STS = (
    'main-captions\tMSRvid\t2012test\t0024\t2.500\tA girl is styling her hair.\tA girl is brushing her "hair.\n'
    "main-news\tx\t2013\t1\t5\tOne.\tTwo.\tlicence\tmore\n"
)


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_pairs_of_the_sts_benchmark_and_of_tables(tmp_path: Path) -> None:
    pairs = read_pairs(write(tmp_path, "sts.csv", STS))
    assert [(pair.score, pair.second) for pair in pairs] == [(2.5, 'A girl is brushing her "hair.'), (5.0, "Two.")]
    for name, text in (
        ("a.tsv", "sentence1\tsentence2\tscore\nOne\tTwo\t0.5\n\nThree\tFour\t1\n"),
        ("a.csv", 'sentence1,sentence2,score\r\nOne,Two,0.5\r\nThree,"Four",1\r\n'),
        ("a.jsonl", '{"s1": "One", "s2": "Two", "score": 0.5}\n{"text1": "Three", "text2": "Four", "score": 1}\n'),
        ("a.json", json.dumps([{"a": "One", "b": "Two", "score": 0.5}, {"a": "Three", "b": "Four", "score": 1}])),
    ):
        pairs = read_pairs(write(tmp_path, name, text))
        assert [(pair.first, pair.second, pair.score) for pair in pairs] == [("One", "Two", 0.5), ("Three", "Four", 1)]


def test_labels_single_several_and_of_pairs(tmp_path: Path) -> None:
    found = read_labelled(write(tmp_path, "a.tsv", "sentence\tlabel\nit 's good . \t1\nbad \"movie\t0\n"))
    assert [(sample.text, sample.labels) for sample in found] == [("it 's good . ", ("1",)), ('bad "movie', ("0",))]
    found = read_labelled(write(tmp_path, "a.jsonl", '{"text": "x", "label": ["a", "b"]}\n'))
    assert found[0].labels == ("a", "b")
    found = read_labelled(write(tmp_path, "b.tsv", "sentence1\tsentence2\tlabel\nOne\tTwo\tyes\n"))
    assert found[0].text == ("One", "Two")


def test_conll_columns_and_json(tmp_path: Path) -> None:
    text = "-DOCSTART- -X- O O\n\nJohn NNP B-NP B-PER\nSmith NNP I-NP I-PER\n\n\nruns VB O O"
    for found in (
        read_tagged(write(tmp_path, "a.conll", text)),
        read_tagged(
            write(
                tmp_path,
                "a.jsonl",
                '{"words": ["John", "Smith"], "labels": ["B-PER", "I-PER"]}\n{"words": ["runs"], "labels": ["O"]}\n',
            )
        ),
    ):
        assert [sample.words for sample in found] == [("John", "Smith"), ("runs",)]
        assert found[0].labels == ("B-PER", "I-PER")


def test_squad_with_and_without_answers(tmp_path: Path) -> None:
    qas: list[dict[str, Any]] = [
        {"id": "1", "question": "Where?", "answers": [{"text": "Paris", "answer_start": 3}, {"text": "Paris"}]},
        {"id": "2", "question": "Who?", "answers": [{"text": "x"}], "is_impossible": True},
    ]
    data = {"data": [{"paragraphs": [{"context": "In Paris.", "qas": qas}]}]}
    found = read_questions(write(tmp_path, "squad.json", json.dumps(data)))
    assert [(item.id, item.answers) for item in found] == [("1", ("Paris",)), ("2", ())]
    lines = '{"question": "Where?", "context": "In Paris.", "answers": {"text": ["Paris"], "answer_start": [3]}}\n'
    assert read_questions(write(tmp_path, "a.jsonl", lines))[0].answers == ("Paris",)


@pytest.mark.parametrize(
    ("reader", "name", "content", "message"),
    [
        (read_pairs, "a.csv", "", "no samples|has no column"),
        (read_pairs, "a.tsv", "sentence1\tsentence2\tscore\n", "holds no samples"),
        (read_pairs, "a.tsv", "sentence1\tsentence2\tscore\nOne\tTwo\n", "line 2: has 2 columns, the header 3"),
        (read_pairs, "a.tsv", "sentence1\tsentence2\tscore\nOne\tTwo\tnan\n", "line 2: score is 'nan'"),
        (read_pairs, "a.tsv", "one\ttwo\tscore\nOne\tTwo\t1\n", "has no column 'sentence1'"),
        (read_pairs, "sts.csv", STS + "broken\trow\n", "line 3: expected 7 columns"),
        (read_pairs, "a.tsv", b"sentence1\tsentence2\tscore\n\xff\tTwo\t1\n", "line 2 is not UTF-8"),
        (read_pairs, "a.csv", 'sentence1,sentence2,score\n"One,Two,1\n', "is not comma separated text"),
        (read_labelled, "a.jsonl", "{\n", "line 1: not valid JSON"),
        (read_labelled, "a.jsonl", "[1]\n", "line 1: expected a JSON object"),
        (read_labelled, "a.jsonl", '{"text": 3, "label": 1}\n', "expected text, got 3"),
        (read_labelled, "a.tsv", "text\tlabel\nOne\t \n", "line 2: the label is empty"),
        (read_tagged, "a.conll", "John B-PER\nSmith\n", "line 2 has the word 'Smith' without a label"),
        (read_tagged, "a.jsonl", '{"words": ["a"], "labels": []}\n', "equal length"),
        (read_questions, "a.json", '{"data": [{}]}', "not in SQuAD's form"),
        (read_questions, "a.jsonl", '{"question": "q", "context": "c", "answers": "x"}\n', "expected a list of texts"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, reader: Callable[[Path], Any], name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        reader(write(tmp_path, name, content))
    assert "\n" not in str(caught.value)
    with pytest.raises(SpecError, match="cannot be read"):
        reader(tmp_path / "missing.tsv")
