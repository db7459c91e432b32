"""Text pipelines over tiny graphs: batch equals single, exactly the declared inputs, long and hostile texts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textmodels import HIDDEN, ID, LABELS, VOCAB, states_of, write_text_model, write_tokenizer

from edgeds.errors import EngineMismatch, InputError, ModelError, SessionClosed, SpecError
from edgeds.pipelines.bert import BertPipeline
from edgeds.pipelines.bert.flow import LOOKAHEAD

pytest.importorskip("tokenizers")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("text"))
    for task in ("embed", "hidden", "classify", "tag", "answer"):
        write_text_model(folder / f"{task}.onnx", task)
    return folder


@pytest.fixture(scope="module")
def embedder(place: Path) -> Iterator[BertPipeline]:
    with BertPipeline.from_model(place / "embed.onnx", place, threads=1) as pipeline:
        yield pipeline


def reference(text_ids: list[int]) -> np.ndarray:
    vector = states_of(text_ids).mean(axis=0)
    types = np.random.default_rng(5).normal(size=(len(VOCAB), HIDDEN)).astype(np.float32)[0] * 0.1
    return (vector + types) / np.linalg.norm(vector + types)


def test_embeddings_equal_the_reference_in_the_order_given(embedder: BertPipeline) -> None:
    texts = ["john works at acme corp", "", "the movie", "a " * 9]
    found = embedder.embed(texts)
    assert found.dtype == np.float32
    words = [text.split() for text in texts]
    wanted = [reference([ID["[CLS]"], *(ID[word] for word in line), ID["[SEP]"]]) for line in words]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@settings(max_examples=25)
@given(texts=st.lists(st.text(alphabet="abcde .🙂日é\u05d0\u200f", max_size=30), max_size=12))
def test_a_batch_equals_its_texts_alone(embedder: BertPipeline, texts: list[str]) -> None:
    together = embedder.embed(texts)
    alone = [embedder.embed(text)[0] for text in texts]
    assert together.shape == (len(texts), HIDDEN)
    np.testing.assert_allclose(together, np.array(alone).reshape(-1, HIDDEN), atol=1e-5)


def test_pooling_in_numpy_equals_the_graph(place: Path, embedder: BertPipeline) -> None:
    texts = ["john smith", "paris", "the good movie is very good"]
    with BertPipeline.from_model(place / "hidden.onnx", place, threads=1) as pipeline:
        assert pipeline.head.pooling == "mean"
        np.testing.assert_allclose(pipeline.embed(texts), embedder.embed(texts), atol=1e-5)
    with BertPipeline.from_model(place / "hidden.onnx", place, pooling="cls", normalize=False, threads=1) as pipeline:
        first, longer = pipeline.embed(["paris", "john smith works"])
        assert not np.allclose(np.linalg.norm(first), 1)
        assert not np.allclose(first, longer)
    with BertPipeline.from_model(place / "hidden.onnx", place, pooling="max", normalize=False, threads=1) as pipeline:
        np.testing.assert_allclose(pipeline.embed(["a", "a b c d e"])[0], pipeline.embed("a")[0], atol=1e-6)


@pytest.mark.parametrize("types", [True, False])
@pytest.mark.parametrize("dtype", ["int64", "int32", "float32"])
def test_b96_the_graph_gets_exactly_its_inputs_in_its_type(tmp_path: Path, types: bool, dtype: str) -> None:
    write_tokenizer(tmp_path)
    model = write_text_model(tmp_path / "m.onnx", "embed", types=types, dtype=dtype)
    with BertPipeline.from_model(model, tmp_path, threads=1) as pipeline:
        assert pipeline.embed(["john", "smith works"]).shape == (2, HIDDEN)


def test_b96_an_input_that_no_text_gives_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    model = write_text_model(tmp_path / "m.onnx", "embed", extra_input="past_length")
    with pytest.raises(EngineMismatch, match="past_length"):
        BertPipeline.from_model(model, tmp_path)


def test_long_texts_are_cut_and_counted_windowed_or_refused(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = " ".join(["good movie"] * 20)
    with BertPipeline.from_model(place / "embed.onnx", place, threads=1) as pipeline:
        with caplog.at_level(logging.WARNING, logger="edgeds"):
            cut = pipeline.embed([text, "paris", text])
        assert (pipeline.truncated, pipeline.counts.cut_tokens) == (2, 2 * (40 - 14))
        assert sum("was cut" in record.message for record in caplog.records) == 1
        np.testing.assert_allclose(cut[0], pipeline.embed(" ".join(["good movie"] * 7))[0], atol=1e-5)
    with BertPipeline.from_model(place / "embed.onnx", place, on_long="window", stride=4, threads=1) as pipeline:
        vectors = pipeline.embed([text, "paris"])
        assert (pipeline.counts.rows, pipeline.truncated) == (1 + 4, 0)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    with (
        BertPipeline.from_model(place / "embed.onnx", place, on_long="error", threads=1) as pipeline,
        pytest.raises(InputError, match="text 1: 40 tokens, more than the 14"),
    ):
        pipeline.embed(["fine", text])


def test_classify_single_multi_label_top_k_and_pairs(place: Path, tmp_path: Path) -> None:
    with BertPipeline.from_model(place / "classify.onnx", place, threads=1) as pipeline:
        good, bad = pipeline.classify(["a good movie", "a bad bad movie"])
        assert [good[0].label, bad[0].label] == ["positive", "negative"]
        assert good[0].score == pytest.approx(1 / (1 + np.exp(-9)))
        both = pipeline.classify("very good", top_k=None)[0]
        assert [label.label for label in both] == ["positive", "negative"]
        assert sum(label.score for label in both) == pytest.approx(1)
        assert pipeline.classify([("a movie", "is bad")])[0][0].label == "negative"
        assert pipeline.classify([("bad " * 40, "good " * 40)])[0][0].label == "negative"  # 7 of one, 6 of the other
        with pytest.raises(SpecError, match="top_k 0"):
            pipeline.classify("a", top_k=0)
    model = write_text_model(
        tmp_path / "m.onnx", "classify", metadata={"edgeds.problem_type": "multi_label_classification"}
    )
    with BertPipeline.from_model(model, place, threads=1) as pipeline:
        labels = pipeline.classify("good and bad", top_k=None)[0]
        assert all(label.score > 0.99 for label in labels)


def test_tag_gives_entities_of_the_original_text(place: Path) -> None:
    text = "\u200f  John SMITH, of 🙂 Acme   Corp. is in Paris!"
    with BertPipeline.from_model(place / "tag.onnx", place, threads=1) as pipeline:
        (found,) = pipeline.tag(text)
        assert [(item.label, item.text) for item in found] == [
            ("PER", "John SMITH"),
            ("ORG", "Acme   Corp"),
            ("LOC", "Paris"),
        ]
        assert all(text[item.start : item.end] == item.text and item.score > 0.9 for item in found)
        assert pipeline.tag(["", "!!! ???"]) == [[], []]
        for aggregation in ("first", "average", "max"):
            assert len(pipeline.tag(text, aggregation=aggregation)[0]) == 3
        with pytest.raises(SpecError, match="aggregation 'sum'"):
            pipeline.tag(text, aggregation="sum")
        assert pipeline.tag_words(["John", "Smith", "works", ""]) == ["B-PER", "I-PER", "O", "O"]
        assert pipeline.tag_words([]) == []


def test_tag_covers_long_texts_by_windows(place: Path) -> None:
    text = "john smith works in paris . " * 12
    with BertPipeline.from_model(place / "tag.onnx", place, on_long="window", threads=1) as pipeline:
        (found,) = pipeline.tag(text)
        words = pipeline.tag_words(text.split())
    assert len(found) == 24
    assert [item.start for item in found] == sorted(item.start for item in found)
    assert sum(label == "B-LOC" for label in words) == 12


def test_answer_finds_the_span_in_any_window_or_says_there_is_none(place: Path) -> None:
    context = "the movie is good . " * 30 + "acme corp is in Paris . " + "very bad . " * 30
    with BertPipeline.from_model(place / "answer.onnx", place, threads=1) as pipeline:
        (found,) = pipeline.answer("where is acme ?", context)
        assert found.text == "Paris" == context[found.start : found.end]
        assert pipeline.counts.truncated == 0
        (nothing,) = pipeline.answer("where is acme ?", "the movie is bad")
        assert (nothing.text, nothing.start, nothing.end) == ("", 0, 0)
        assert pipeline.answer("where ?", "the movie", no_answer=False)[0].text != ""
        several = pipeline.answer("where ?", "paris is in paris", n_best=3)
        assert several[0].score >= several[1].score >= several[2].score
        assert {(item.start, item.end) for item in several} >= {(0, 5), (12, 17)}
        assert pipeline.answer("where ?", "")[0].text == ""
        assert pipeline.answer("where " * 200, "paris")[0].text == "paris"
        with pytest.raises(InputError, match="expected a question and its context"):
            pipeline.predict(["no pair"])


def test_hostile_texts(embedder: BertPipeline) -> None:
    texts = ["", " ", "\x00\x01", "!?!", "🙂👩‍👩‍👧", "שלום hello مرحبا", "\u200b", "x" * 1_000_000, "a b " * 50_000]
    found = embedder.embed(texts)
    assert np.isfinite(found).all()
    assert embedder.embed(["é".encode()]) == pytest.approx(embedder.embed(["é"]))
    for bad, message in (
        ("a\ud800b", r"text 2: is no valid Unicode \(half of a character pair at character 1\)"),
        (b"abc\xff", r"text 2: is not UTF-8 \(byte 3\)"),
        (None, "text 2: expected text, got NoneType"),
    ):
        with pytest.raises(InputError, match=message):
            embedder.embed(["good", "movie", bad])  # type: ignore[list-item]
    with pytest.raises(InputError, match="got int"):
        embedder.embed(3)  # type: ignore[arg-type]
    assert embedder.embed([]).shape == (0, HIDDEN)


def test_ids_beyond_the_vocabulary_are_another_models_tokenizer(tmp_path: Path, place: Path) -> None:
    write_tokenizer(tmp_path, words=[*VOCAB, *(f"word{number}" for number in range(50))])
    with pytest.raises(EngineMismatch, match="another model's tokenizer"):
        BertPipeline.from_model(place / "embed.onnx", tmp_path)
    tokenizer = write_tokenizer(tmp_path / "added")
    from edgeds.pipelines.tokenizer_file import load_tokenizer

    made = load_tokenizer(tokenizer)
    made.add_tokens(["brandnew"])
    made.save(str(tokenizer / "tokenizer.json"))
    with (
        BertPipeline.from_model(place / "embed.onnx", tokenizer, threads=1) as pipeline,
        pytest.raises(EngineMismatch, match="text 1: token 'brandnew' has the id"),
    ):
        pipeline.embed(["good", "brandnew movie"])


def test_wrong_files_tasks_and_options(place: Path, tmp_path: Path, embedder: BertPipeline) -> None:
    with pytest.raises(ModelError, match="no such file"):
        BertPipeline.from_model(tmp_path / "none.onnx", place)
    with pytest.raises(ModelError, match="holds no tokenizer"):
        BertPipeline.from_model(place / "embed.onnx", tmp_path)
    with pytest.raises(SpecError, match="task is 'embed', so it cannot tag"):
        embedder.tag("text")
    for options, message in (
        ({"on_long": "drop"}, "on_long 'drop'"),
        ({"stride": 14}, "stride 14"),
        ({"max_length": 2}, "max_length 2"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"task": "tag"}, "task 'tag' needs an output 'logits'"),
        ({"task": "chat"}, "task 'chat'"),
        ({"pooling": "sum"}, "pooling 'sum'|last_hidden_state"),
    ):
        with pytest.raises(SpecError, match=message):
            BertPipeline.from_model(place / "embed.onnx", place, **options)
    model = write_text_model(tmp_path / "m.onnx", "tag", metadata={"edgeds.id2label": '{"0": "O"}'})
    with pytest.raises(SpecError, match="7 labels, but 1 names"):
        BertPipeline.from_model(model, place)
    broken = write_text_model(tmp_path / "b.onnx", "tag", metadata={"edgeds.id2label": "[", "edgeds.max_length": "16"})
    with pytest.raises(SpecError, match="id2label is no JSON"):
        BertPipeline.from_model(broken, place)


def test_fixed_length_models_are_padded_to_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    model = write_text_model(tmp_path / "m.onnx", "tag", length=12)
    with BertPipeline.from_model(model, tmp_path, threads=1) as pipeline:
        assert pipeline.lengths == (12,)
        assert pipeline.encoder.max_length == 12
        assert [item.text for item in pipeline.tag("in paris at acme")[0]] == ["paris", "acme"]
        assert LABELS[5] == "B-LOC"


def test_futures_share_batches_and_equal_predict(embedder: BertPipeline) -> None:
    texts = ["john", "smith works", "paris", "acme corp"] * 4
    wanted = embedder.predict(texts)
    futures = [embedder.submit(text) for text in texts]
    for future, vector in zip(futures, wanted, strict=True):
        np.testing.assert_allclose(future.result(10), vector, atol=1e-5)

    async def all_of() -> list[np.ndarray]:
        return await asyncio.gather(*(embedder.infer_async(text) for text in texts))

    np.testing.assert_allclose(asyncio.run(all_of()), wanted, atol=1e-5)
    assert max(embedder.session.stats().batch_size_histogram) > 1
    with pytest.raises(InputError):
        embedder.submit("\ud800")


def test_futures_of_windowed_texts_and_of_answers(place: Path) -> None:
    with BertPipeline.from_model(place / "embed.onnx", place, on_long="window", threads=1) as pipeline:
        text = "good movie " * 30
        np.testing.assert_allclose(pipeline.submit(text).result(10), pipeline.embed(text)[0], atol=1e-5)
    with BertPipeline.from_model(place / "answer.onnx", place, threads=1) as pipeline:
        assert pipeline.submit(("where ?", "very bad . " * 30 + "paris")).result(10)[0].text == "paris"


def test_threads_get_their_own_results(embedder: BertPipeline) -> None:
    texts = ["a", "b c", "d e a b", "john smith works at acme corp"]
    wanted = embedder.embed(texts)
    wrong: list[str] = []

    def ask(index: int) -> None:
        for _ in range(20):
            if not np.allclose(embedder.embed(texts[index])[0], wanted[index], atol=1e-5):
                wrong.append(texts[index])

    threads = [threading.Thread(target=ask, args=(index % 4,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_streams_hold_two_windows_at_most(embedder: BertPipeline) -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield f"{'a b c d e'[: number % 9]} movie"

    stream = embedder.embed_each(endless())
    for _ in range(LOOKAHEAD + 10):
        next(stream)
    assert taken <= 4 * LOOKAHEAD
    stream.close()
    assert embedder.embed("still open").shape == (1, HIDDEN)


def test_what_came_before_a_bad_text_is_given(embedder: BertPipeline) -> None:
    texts = itertools.chain(["good movie"] * LOOKAHEAD, ["\ud800"], ["never reached"])
    found: list[np.ndarray] = []
    with pytest.raises(InputError, match=f"text {LOOKAHEAD}:"):
        found.extend(embedder.embed_each(texts))
    assert len(found) == LOOKAHEAD


def test_closed_pipelines_say_so(place: Path) -> None:
    pipeline = BertPipeline.from_model(place / "embed.onnx", place, threads=1)
    pipeline.close()
    pipeline.close()
    for call in (lambda: pipeline.embed("a"), lambda: pipeline.submit("a"), lambda: pipeline.predict("a")):
        with pytest.raises(SessionClosed):
            call()


def test_lengths_are_planned_from_texts(embedder: BertPipeline) -> None:
    assert embedder.plan_lengths(["a"] * 50 + ["a b c d e a b c"] * 3, max_buckets=2) == (8, 16)
    assert embedder.lengths[-1] == 16
