"""Reading tokenizers: the same ids as the reference WordPiece, and one sentence for every broken file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.errors import MissingDependency, ModelError
from edgeds.pipelines.tokenizer_file import load_tokenizer

pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", "wor", "##ld", "!", ",", "é", "e", "É"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return tmp_path


def test_vocab_gives_wordpieces_between_cls_and_sep(folder: Path) -> None:
    found = load_tokenizer(folder).encode("Hello WORLDS!")
    assert found.tokens == ["[CLS]", "hello", "world", "##s", "!", "[SEP]"]
    assert found.ids == [2, 5, 6, 7, 10, 3]
    pair = load_tokenizer(folder / "vocab.txt").encode("hello", "world")
    assert pair.type_ids == [0, 0, 0, 1, 1]


def test_config_says_about_case_accents_and_special_tokens(folder: Path) -> None:
    assert load_tokenizer(folder).encode("É").tokens[1] == "e"
    config = {"do_lower_case": False, "unk_token": {"content": "[UNK]", "lstrip": False}, "sep_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).encode("É hello HELLO").tokens == ["[CLS]", "É", "hello", "[UNK]", "[SEP]"]
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, "strip_accents": False}))
    assert load_tokenizer(folder).encode("É").tokens[1] == "é"


def test_json_is_preferred_and_does_not_cut_or_pad(folder: Path) -> None:
    made = load_tokenizer(folder)
    made.enable_truncation(4)
    made.enable_padding(length=16)
    made.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").write_text("broken")
    assert len(load_tokenizer(folder).encode("hello " * 50).ids) == 52


@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=60))
def test_any_text_has_offsets_within_it(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        Path(place, "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
        found = load_tokenizer(place).encode(text)
    assert all(0 <= begin <= end <= len(text) for begin, end in found.offsets)
    assert all(0 <= token < len(WORDS) for token in found.ids)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "not a tokenizer that can be read"),
        ("tokenizer.json", b"", "not a tokenizer that can be read"),
        ("tokenizer.json", b"[1, 2]", "not a tokenizer that can be read"),
        ("tokenizer.json", b'{"version": "1.0"}', "not a tokenizer that can be read"),
        ("tokenizer.json", b"\xff\xfe{}", "not UTF-8"),
        ("vocab.txt", b"", "has no '\\[UNK\\]'"),
        ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\nhello\n", "has no '\\[SEP\\]'"),
        ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\na\n", "line 6 repeats token 'a' of line 5"),
        ("vocab.txt", b"[PAD]\n\xff\n", "not UTF-8"),
    ],
)
def test_broken_files_are_one_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_wrong_kinds(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load_tokenizer(folder / "nothing")
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(tmp_path_factory.mktemp("empty"))
    with pytest.raises(ModelError, match="not a tokenizer; give"):
        load_tokenizer(Path(__file__))
    os.mkfifo(folder / "tokenizer.json")  # must not wait for a writer
    with pytest.raises(ModelError, match="not a regular file"):
        load_tokenizer(folder)


def test_bad_config_names_the_key(folder: Path) -> None:
    for config, message in (
        ({"do_lower_case": "yes"}, "do_lower_case is 'yes'"),
        ({"unk_token": 3}, "unk_token is 3"),
        ([], "expected a JSON object"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=message):
            load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_tokenizer(folder)


def test_without_the_package_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependency, match=r"edgeds\[text\]"):
        load_tokenizer(folder)
