"""Text bundles: what is in them, that they serve, and that nothing is left after a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from textmodels import HIDDEN, VOCAB, write_text_model, write_tokenizer

from edgeds.bundle import open_bundle, verify_bundle
from edgeds.errors import BundleError, CalibrationError, EdgedsError, EngineMismatch, ModelError, SpecError
from edgeds.pipelines.bert import BertPipeline
from edgeds.workshop.textpackage import create_text_bundle

pytest.importorskip("tokenizers")

TEXTS = [
    *("john smith works at acme corp", "the movie is very good", "a bad movie !", "who is in paris ?", "running"),
    *("a b c d e", "the good the bad", "where is smith", "corp . acme", "very very bad", "é 日 本", "run in the movie"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return write_text_model(tmp_path / "model.onnx", "embed", linear=True)


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def create(model: Path, out: Path, **options: Any) -> Path:
    return create_text_bundle(model, out=out, **{"calib": TEXTS, "quiet": True, **options})


def test_bundle_holds_the_tokenizer_and_serves_float_and_int8(model: Path, tmp_path: Path) -> None:
    path = create(
        model, tmp_path / "b", calib=write_lines(tmp_path / "texts.txt", [*TEXTS, "", TEXTS[0]]), license="MIT"
    )
    assert verify_bundle(path) == []
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
        assert {"tokenizer/vocab.txt", "tokenizer/tokenizer_config.json"} <= set(manifest.files)
        assert {"model.onnx", "model.cpu.onnx", "variants/float.onnx", "cost.json", "ranges.json"} <= set(
            manifest.files
        )
        assert (manifest.task, manifest.precision, manifest.license, manifest.max_batch) == ("embed", "int8", "MIT", 64)
        assert manifest.head is not None
        assert manifest.head["outputs"] == ["embedding"]
        assert (manifest.head["max_length"], manifest.head["vocab_size"]) == (16, len(VOCAB))
        assert manifest.head["lengths"][-1] == 16
        assert manifest.calibration is not None
        assert manifest.calibration["samples"] == len(TEXTS)
        shapes = [key for key in bundle.golden() if key.startswith("input/0/")]
        assert sorted(shapes) == ["input/0/attention_mask", "input/0/input_ids", "input/0/token_type_ids"]
    with (
        BertPipeline.from_bundle(path, precision="float", threads=1) as plain,
        BertPipeline.from_bundle(path, threads=1) as quantized,
        BertPipeline.from_model(model, tmp_path, threads=1) as original,
    ):
        assert quantized.session.engine.precision == "int8"
        np.testing.assert_allclose(plain.embed(TEXTS), original.embed(TEXTS), atol=1e-6)
        cosines = (plain.embed(TEXTS) * quantized.embed(TEXTS)).sum(axis=1)
        assert cosines.min() > 0.99
        # INT8 rounds: rows in a batch may differ by the last bit before rounding, so not by 1e-5 but by little.
        np.testing.assert_allclose(quantized.embed(TEXTS)[3], quantized.embed(TEXTS[3])[0], atol=1e-4)


@pytest.mark.parametrize("task", ["classify", "tag", "answer"])
def test_other_tasks_are_packed_without_quantizing(tmp_path: Path, task: str) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    model = write_text_model(tmp_path / "m.onnx", task)
    path = create_text_bundle(model, out=tmp_path / "b", tokenizer=tokenizer, calib=None, float_only=True, quiet=True)
    with BertPipeline.from_bundle(path, threads=1) as pipeline:
        if task == "classify":
            assert pipeline.classify("very good")[0][0].label == "positive"
        elif task == "tag":
            assert pipeline.tag("in Paris")[0][0].label == "LOC"
        else:
            assert pipeline.answer("where ?", "in Paris")[0].text == "Paris"
        assert pipeline.session.engine.precision == "float"


def test_accuracy_is_measured_and_limits_what_int8_may_lose(model: Path, tmp_path: Path) -> None:
    rows = ["sentence1\tsentence2\tscore", "good movie\tgood movie\t5", "good movie\tthe good movie\t4"]
    data = write_lines(tmp_path / "pairs.tsv", [*rows, "good movie\tparis corp who\t0"])
    path = create(model, tmp_path / "b", evaluate=data)
    with open_bundle(path) as bundle:
        accuracy = bundle.manifest.accuracy
    assert accuracy is not None
    assert (accuracy["metric"], accuracy["float_spearman"], accuracy["int8_spearman"]) == ("spearman", 100, 100)
    path = create(model, tmp_path / "c", evaluate=data, max_drop=0.5, calib=data)
    assert verify_bundle(path) == []


def test_vocabulary_of_a_foreign_graph_is_read_from_its_table(tmp_path: Path) -> None:
    import onnx

    model = write_text_model(tmp_path / "m.onnx", "hidden", types=False, outputs={"last_hidden_state": "states"})
    proto = onnx.load(model)
    del proto.metadata_props[:]
    onnx.save(proto, model)
    write_tokenizer(tmp_path)
    path = create_text_bundle(model, out=tmp_path / "b", max_length=12, float_only=True, quiet=True)
    with open_bundle(path) as bundle:
        head = bundle.manifest.head
    assert head is not None
    assert (head["vocab_size"], head["pooling"], head["normalize"], head["max_length"]) == (
        len(VOCAB),
        "mean",
        True,
        12,
    )
    write_tokenizer(tmp_path / "other", words=[*VOCAB, *(f"w{number}" for number in range(9))])
    with pytest.raises(EngineMismatch, match="another model's tokenizer"):
        create_text_bundle(model, out=tmp_path / "c", tokenizer=tmp_path / "other", float_only=True, quiet=True)


def test_arrays_and_folders_of_texts_calibrate_too(model: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(5, len(VOCAB), (8, 6))
    feeds = tmp_path / "feeds.npz"
    np.savez(feeds, input_ids=ids, attention_mask=np.ones_like(ids), token_type_ids=np.zeros_like(ids))
    assert verify_bundle(create(model, tmp_path / "a", calib=feeds)) == []
    folder = tmp_path / "texts"
    folder.mkdir()
    write_lines(folder / "one.txt", TEXTS[:6])
    write_lines(folder / "two.txt", TEXTS[6:])
    with open_bundle(create(model, tmp_path / "b", calib=folder, samples=5)) as bundle:
        assert bundle.manifest.calibration is not None
        assert bundle.manifest.calibration["samples"] == 5


def test_mistakes_are_one_sentence_and_leave_nothing(model: Path, tmp_path: Path) -> None:
    out, empty = tmp_path / "b", tmp_path / "empty"
    empty.mkdir()
    bad = tmp_path / "latin.txt"
    bad.write_bytes(b"caf\xe9\n")
    cases: list[tuple[dict[str, Any], type[EdgedsError], str]] = [
        ({"calib": None}, SpecError, "calibration texts are needed"),
        ({"float_only": True}, SpecError, "leave --calib out"),
        ({"task": "chat"}, SpecError, "the text tasks are"),
        ({"task": "tag"}, SpecError, "needs an output 'logits'"),
        ({"max_batch": 0}, SpecError, "--max-batch 0"),
        ({"max_drop": 0.5}, SpecError, "give --eval FILE"),
        ({"max_drop": -1, "evaluate": bad}, SpecError, "--max-drop -1"),
        ({"evaluate": tmp_path / "none.tsv"}, SpecError, "no such file"),
        ({"max_length": 99}, SpecError, "--max-length 99: the model takes at most 16"),
        ({"samples": 0}, SpecError, "at least 1"),
        ({"tokenizer": empty}, ModelError, "holds no tokenizer"),
        ({"calib": tmp_path / "none.txt"}, CalibrationError, "no such file"),
        ({"calib": bad}, CalibrationError, "is not UTF-8 text"),
        ({"calib": empty}, CalibrationError, "holds no .txt files"),
        ({"calib": write_lines(tmp_path / "blank.txt", ["", " "])}, CalibrationError, "holds no texts"),
        ({"calib": []}, CalibrationError, "none are given"),
        ({"calib": ["good", "\ud800"]}, CalibrationError, "text 1: is no valid Unicode"),
        ({"calib": 3}, CalibrationError, "expected a path or texts"),
        ({"calib": write_lines(tmp_path / "p.tsv", ["a\tb", "1\t2"])}, CalibrationError, "has no column"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            create(model, out, **options)
        assert not out.exists()
    out.mkdir()
    (out / "photo.jpg").write_bytes(b"x")
    with pytest.raises((SpecError, BundleError), match=r"photo|not an empty"):
        create(model, out, replace=True)
    with pytest.raises(ModelError):
        create(empty, tmp_path / "c")


def test_a_head_that_does_not_fit_the_bundle_is_refused(model: Path, tmp_path: Path) -> None:
    path = create(model, tmp_path / "b", calib=None, float_only=True)
    document = json.loads((path / "bundle.json").read_text())
    for change, error, message in (
        ({"head": {**document["head"], "outputs": ["nothing"]}}, EngineMismatch, "'nothing', which its head names"),
        ({"head": {**document["head"], "task": "tag"}}, BundleError, "task 'tag'"),
        ({"head": {**document["head"], "colour": 1}}, BundleError, "colour"),
        ({"task": "detect"}, SpecError, "not one of a text model"),
    ):
        (path / "bundle.json").write_text(json.dumps({**document, **change}))
        with pytest.raises(error, match=message):
            BertPipeline.from_bundle(path)
    (path / "bundle.json").write_text(json.dumps(document))
    with BertPipeline.from_bundle(path, threads=1) as pipeline:
        assert pipeline.embed("good").shape == (1, HIDDEN)
