"""``edgeds embed|classify|tag|answer``, and ``eval``, ``bench`` and ``bundle create`` of text bundles."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from textmodels import HIDDEN, write_text_model, write_tokenizer

from edgeds.cli.main import main
from edgeds.workshop.textpackage import create_text_bundle

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("textcli"))
    for task in ("embed", "classify", "tag", "answer"):
        model = write_text_model(folder / f"{task}.onnx", task)
        create_text_bundle(model, out=folder / task, float_only=True, quiet=True)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, list[Any], str]:
    capsys.readouterr()
    code = main([*map(str, arguments), "-q"])
    captured = capsys.readouterr()
    return code, [json.loads(line) for line in captured.out.splitlines()] if code == 0 else [], captured.err


def test_lines_come_in_input_order(bundles: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = ["the movie is very good", "", "john", "a b c d e"] * 3
    code, lines, _ = run(capsys, "embed", bundles / "embed", *texts, "--json")
    assert (code, [line["index"] for line in lines]) == (0, list(range(12)))
    assert len(lines[0]["embedding"]) == HIDDEN
    assert lines[1]["embedding"] == pytest.approx(lines[5]["embedding"], abs=1e-5)
    source = tmp_path / "texts.txt"
    source.write_text("\n".join(texts) + "\n", encoding="utf-8")
    code, again, _ = run(capsys, "embed", bundles / "embed", "--input", source)
    assert [line["embedding"] for line in again] == [pytest.approx(line["embedding"], abs=1e-5) for line in lines]


def test_vectors_go_to_a_file_that_numpy_reads(
    bundles: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, out = tmp_path / "t.jsonl", tmp_path / "v.npy"
    source.write_text('{"text": "good movie"}\n\n"paris"\n')
    code, lines, _ = run(capsys, "embed", bundles / "embed", "--input", source, "--out", out)
    assert code == 0
    assert lines == [{"out": str(out), "texts": 2, "hidden": HIDDEN, "tokens": 7, "truncated": 0}]
    vectors = np.load(out)
    assert (vectors.dtype, vectors.shape) == (np.float32, (2, HIDDEN))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    source.write_text("")
    code, lines, _ = run(capsys, "embed", bundles / "embed", "--input", source, "--out", out)
    assert (code, np.load(out).shape) == (0, (0, HIDDEN))


def test_nothing_is_left_of_a_file_after_a_bad_line(
    bundles: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, out = tmp_path / "t.txt", tmp_path / "v.npy"
    source.write_bytes(b"good\nmovie \xff\n")
    code, _, error = run(capsys, "embed", bundles / "embed", "--input", source, "--out", out)
    assert code == 1
    assert f"{source}: line 2: is not UTF-8 (byte 6)" in error
    assert [item.name for item in tmp_path.iterdir()] == ["t.txt"]
    code, lines, _ = run(capsys, "embed", bundles / "embed", "--input", source, "--replace-invalid")
    assert (code, len(lines)) == (0, 2)


def test_classify_tag_and_answer(bundles: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, lines, _ = run(capsys, "classify", bundles / "classify", "very good", "bad", "--top-k", "0")
    assert [line["label"] for line in lines] == ["positive", "negative"]
    assert [len(line["labels"]) for line in lines] == [2, 2]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"text": "a movie", "text_pair": "is bad"}\n')
    assert run(capsys, "classify", bundles / "classify", "--input", pairs, "--pairs")[1][0]["label"] == "negative"
    code, lines, _ = run(capsys, "tag", bundles / "tag", "John Smith is in Paris", "--aggregation", "average")
    assert [(item["label"], item["text"], item["start"]) for item in lines[0]["entities"]] == [
        ("PER", "John Smith", 0),
        ("LOC", "Paris", 17),
    ]
    code, lines, _ = run(capsys, "answer", bundles / "answer", "where ?", "who ?", "--context", "acme is in Paris .")
    assert [line["answer"] for line in lines] == ["Paris", "Paris"]
    context = tmp_path / "context.txt"
    context.write_text("very bad . " * 40)
    code, lines, _ = run(capsys, "answer", bundles / "answer", "where ?", "--context-file", context)
    assert (code, lines[0]["answer"]) == (0, None)
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"question": "where ?", "context": "in Paris"}\n')
    code, lines, _ = run(capsys, "answer", bundles / "answer", "--input", questions, "--n-best", "2")
    assert lines[0]["answers"][0]["text"] == "Paris"


def test_standard_input_is_read(
    bundles: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"good\r\nbad")))
    code, lines, _ = run(capsys, "classify", bundles / "classify", "--input", "-")
    assert (code, [line["label"] for line in lines]) == (0, ["positive", "negative"])


def test_wrong_use_exits_with_2(bundles: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = tmp_path / "t.txt"
    source.write_text("good\n")
    for arguments, message in (
        (("embed", bundles / "embed"), "no text given"),
        (("embed", bundles / "embed", "a", "--input", source), "not both"),
        (("embed", bundles / "embed", "--input", tmp_path / "none.txt"), "no such file"),
        (("embed", bundles / "tag", "a"), "its task is 'tag'; run it with: edgeds tag"),
        (("embed", bundles / "embed", "a", "--out", tmp_path / "v.txt"), "name a .npy file"),
        (("classify", bundles / "classify", "a", "--top-k", "-1"), "--top-k -1"),
        (("classify", bundles / "classify", "a", "--pairs"), "--pairs needs --input"),
        (("answer", bundles / "answer", "a"), "need one context"),
        (("answer", bundles / "answer", "a", "--context", "b", "--n-best", "0"), "--n-best 0"),
        (("answer", bundles / "answer", "--input", source, "--context", "b"), "holds the contexts"),
        (("eval", bundles / "tag", "--data", source, "--min-map", "0.5"), "--min-map is for detectors"),
        (("bench", bundles / "tag", "--sizes", "64"), "--sizes is for images"),
        (("bench", bundles / "tag", "--tokens", "0"), "--tokens '0'"),
    ):
        code, _, error = run(capsys, *arguments)
        assert (code, message in error) == (2, True), (arguments, error)
    code, _, error = run(capsys, "embed", bundles / "embed", "a\udcff")
    assert (code, "text 0: is no valid Unicode" in error) == (1, True)
    bad = tmp_path / "t.jsonl"
    bad.write_text('{"txt": 1}\n')
    code, _, error = run(capsys, "embed", bundles / "embed", "--input", bad)
    assert (code, "line 1: expected an object with the text text" in error) == (1, True)


def test_eval_prints_metric_and_value_and_holds_a_limit(
    bundles: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "a.tsv"
    data.write_text("sentence\tlabel\nvery good\t1\na bad movie\t0\nbad bad\t1\n")
    assert main(["eval", str(bundles / "classify"), "--data", str(data), "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["metric"], report["samples"]) == ("accuracy", 3)
    assert report["value"] == pytest.approx(200 / 3)
    assert main(["eval", str(bundles / "classify"), "--data", str(data), "--min-value", "90", "-q"]) == 1
    assert "accuracy 66.67 is below --min-value 90" in capsys.readouterr().err


@pytest.mark.parametrize("batch", ["1", "4"])
def test_bench_sends_texts_of_several_lengths(bundles: Path, capsys: pytest.CaptureFixture[str], batch: str) -> None:
    arguments = ["bench", str(bundles / "embed"), "--seconds", "0.2", "--warmup", "0", "--batch", batch, "--json", "-q"]
    assert main([*arguments, "--tokens", "4,12"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fps"] > 0
    assert {"latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "power_w", "backend"} <= set(report)


def test_bundle_create_packs_a_model_with_its_tokenizer(
    bundles: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "b"
    arguments = ["bundle", "create", str(bundles / "tag.onnx"), "--task", "tag", "--float-only", "--out", str(out)]
    assert main([*arguments, "--tokenizer", str(bundles), "--json", "-q"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["task"], document["ok"]) == ("tag", True)
    assert "tokenizer/vocab.txt" in document["files"]
    capsys.readouterr()
    assert main([*arguments, "--tokenizer", str(bundles), "--size", "64", "--replace", "-q"]) == 2
    assert "--size is for images" in capsys.readouterr().err
    plain = ["bundle", "create", "m.onnx", "--task", "detect", "--float-only", "--out", str(tmp_path / "c")]
    assert main([*plain, "--pooling", "cls", "-q"]) == 2
    assert "--pooling is for text models" in capsys.readouterr().err
