"""Issue 7, generation: a language model's tokenizer folder, its end tokens and begin token, and mismatches refused."""

import json
import struct
from pathlib import Path

import pytest

from edgeds.errors import InputError, ModelError
from edgeds.pipelines.llm.detokenize import Detokenizer, byte_alphabet
from edgeds.pipelines.llm.gguf_tokenizer import gguf_tokenizer, write_gguf_tokenizer
from edgeds.pipelines.llm.text import open_text

tokenizers = pytest.importorskip("tokenizers")

BOS, EOS, TURN = 256, 257, 258
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}<|turn|>{% endfor %}"


def write_folder(root, *, adds_bos=False, config=None, generation=None, **files):
    """A byte-level tokenizer of 259 tokens, with the configuration files of a checkpoint."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_alphabet(), merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<|turn|>"])
    if adds_bos:
        made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ENDS)
    root.mkdir(exist_ok=True)
    made.save(str(root / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    files = {
        "tokenizer_config.json": named if config is None else config,
        "generation_config.json": {"eos_token_id": [TURN, EOS]} if generation is None else generation,
        **{name.replace("__", "."): value for name, value in files.items()},
    }
    for name, value in files.items():
        (root / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return root


ENDS = [("<s>", BOS), ("</s>", EOS)]


def test_folder_gives_tokens_ends_and_template(tmp_path):
    text = open_text(write_folder(tmp_path), vocab_size=259)
    assert text.encode("é🙂") == list("é🙂".encode())
    assert text.decode([*b"Hi", EOS]) == "Hi"
    assert text.decode([*b"Hi", EOS], skip_special=False) == "Hi</s>"
    assert text.eos_tokens == (TURN, EOS)
    assert text.has_chat_template
    assert text.encode_chat([{"role": "user", "content": "x"}]) == [BOS, *b"user:x", TURN]


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_begin_token_comes_once_and_as_the_model_says(tmp_path, said, adds):
    config = {"bos_token": "<s>", "eos_token": "</s>"} | ({} if said is None else {"add_bos_token": said})
    text = open_text(write_folder(tmp_path, adds_bos=adds, config=config))
    begins = [BOS] if (adds if said is None else said) else []
    assert text.encode("a") == [*begins, *b"a"]  # and never the end token, which the tokenizer would add
    assert text.encode("") == begins
    assert text.encode("<s>a") == [BOS, *b"a"]


def test_chat_never_gets_a_second_begin_token(tmp_path):
    text = open_text(write_folder(tmp_path, adds_bos=True))
    assert text.encode_chat([{"role": "user", "content": "x"}]).count(BOS) == 1


def test_end_tokens_fall_back_and_are_merged(tmp_path):
    root = write_folder(tmp_path, generation={"eos_token_id": TURN})
    assert open_text(root).eos_tokens == (TURN, EOS)
    (root / "generation_config.json").unlink()
    (root / "config.json").write_text('{"eos_token_id": 258}')
    assert open_text(root).eos_tokens == (TURN, EOS)
    (root / "config.json").unlink()
    assert open_text(root).eos_tokens == (EOS,)
    (root / "tokenizer_config.json").unlink()
    bare = open_text(root)
    assert (bare.eos_tokens, bare.bos_token, bare.has_chat_template) == ((), None, False)
    with pytest.raises(ModelError, match="has no chat template"):
        bare.encode_chat([{"role": "user", "content": "x"}])


def test_template_file_wins_over_the_configuration(tmp_path):
    text = open_text(write_folder(tmp_path, chat_template__jinja="T{{ messages[0].content }}"))
    assert text.encode_chat([{"role": "user", "content": "x"}]) == [*b"Tx"]


@pytest.mark.parametrize("size", [258, 300, 32000])
def test_tokenizer_of_another_model_is_refused(tmp_path, size):
    root = write_folder(tmp_path)
    with pytest.raises(ModelError, match=f"knows 259 tokens, but the model gives {size} logits"):
        open_text(root, vocab_size=size)
    open_text(root, vocab_size=272)  # padded


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config": {"eos_token": "<nope>"}}, "eos_token '<nope>' is not a token"),
        ({"config": {"bos_token": 5}}, "bos_token is 5; it must be a text"),
        ({"config": {"bos_token": "<s>", "add_bos_token": "yes"}}, "add_bos_token is 'yes'"),
        ({"config": {"add_bos_token": True}}, "bos_token '' is not a token"),
        ({"config": [1]}, "expected a JSON object, got list"),
        ({"config": "{"}, "tokenizer_config.json"),
        ({"config": {"chat_template": 5}}, "chat_template is neither"),
        ({"generation": {"eos_token_id": 259}}, "eos_token_id 259 is not one of the tokenizer's 259 tokens"),
        ({"generation": {"eos_token_id": ["</s>"]}}, "eos_token_id '</s>'"),
        ({"generation": {"eos_token_id": True}}, "eos_token_id True"),
        ({"tokenizer__json": "{}"}, "tokenizer.json: not a tokenizer"),
    ],
)
def test_damaged_files_are_named(tmp_path, files, words):
    with pytest.raises(ModelError, match=words):
        open_text(write_folder(tmp_path, **files))


def test_missing_folder_and_template_that_is_no_text(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        open_text(tmp_path / "none")
    root = write_folder(tmp_path / "x")
    (root / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"not UTF-8 text \(byte 0\)"):
        open_text(root)


@pytest.mark.parametrize(
    ("prompt", "words"), [("a\ud800", "character 1 is half"), (b"a", "got bytes"), (None, "NoneType")]
)
def test_prompts_that_are_no_text_are_refused(tmp_path, prompt, words):
    with pytest.raises(InputError, match=words):
        open_text(write_folder(tmp_path)).encode(prompt)


def test_a_megabyte_of_text_goes_there_and_back(tmp_path):
    text = open_text(write_folder(tmp_path))
    prompt = "0123 é🙂\n" * 80_000
    assert text.decode(text.encode(prompt)) == prompt


def gguf(rules="smollm", **changes):
    names = [*byte_alphabet(), "12", "ab", "abc", "<s>", "</s>", "<|turn|>", "<tool>"]
    base = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rules,
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [1] * 259 + [3, 3, 3, 4],
        "tokenizer.ggml.merges": ["1 2", "a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
        "tokenizer.ggml.eot_token_id": 261,
        "tokenizer.chat_template": TEMPLATE,
    }
    return base | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def names_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_gguf_rules_split_digits_words_and_tools():
    smollm = gguf_tokenizer(gguf(), source="m.gguf")
    assert names_of(smollm, "abc12<tool>ab") == ["abc", "1", "2", "<tool>", "ab"]
    assert names_of(gguf_tokenizer(gguf("llama-bpe"), source="m.gguf"), "12") == ["12"]
    qwen = gguf_tokenizer(gguf("qwen2"), source="m.gguf")
    assert names_of(qwen, "12") == ["1", "2"]
    assert names_of(qwen, "e\u0301") == names_of(qwen, "é")
    assert names_of(gguf_tokenizer(gguf("gpt-2"), source="m.gguf"), "12 ab</s>") == ["12", "Ġ", "ab", "</s>"]


def test_gguf_tokenizer_folder_opens_like_any_other(tmp_path):
    write_gguf_tokenizer(gguf(), out=tmp_path / "tokenizer", source="m.gguf")
    text = open_text(tmp_path / "tokenizer", vocab_size=263)
    assert text.eos_tokens == (260, 261)
    assert text.bos_token is None  # neither the file nor its kind says so
    assert text.decode(text.encode("abc é 🙂")) == "abc é 🙂"
    assert text.encode_chat([{"role": "user", "content": "ab"}])[-2:] == [257, 261]
    write_gguf_tokenizer(gguf(add_bos_token=True), out=tmp_path / "t2", source="m.gguf")
    assert open_text(tmp_path / "t2").encode("abc") == [259, 258]


def sentencepiece(**changes):
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
        "▁ab",
        "ba",
    ]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -2.0, -3.0, -1.0, -0.5]
    base = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 7,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return base | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def test_sentencepiece_in_gguf_joins_by_score_and_falls_back_to_bytes(tmp_path):
    made = gguf_tokenizer(sentencepiece(), source="m.gguf")
    assert names_of(made, "ab") == ["▁ab"]
    assert names_of(made, "aba") == ["▁a", "ba"]  # "ba" has the best score and is joined first
    assert names_of(made, "é") == ["▁", "<0xC3>", "<0xA9>"]
    write_gguf_tokenizer(sentencepiece(), out=tmp_path, source="m.gguf")
    text = open_text(tmp_path)
    assert text.encode("ab a")[0] == text.bos_token == 1
    assert text.decode(text.encode("ab a🙂")) == "ab a🙂"


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "has no tokenizer"),
        (gguf(tokens=[]), "has no tokenizer"),
        (gguf(tokens=["a", "a"]), "the same token twice"),
        (gguf(model="bert"), "of kind 'bert'; gpt2"),
        (gguf(pre="mystery"), "rules 'mystery'"),
        (gguf(pre=None), "rules None"),
        (gguf(merges=["a b c"]), "'a b c', which is no pair"),
        (gguf(merges=["zz q"]), "do not fit together"),
        (gguf(merges=[1]), "tokenizer.ggml.merges is missing"),
        (gguf(token_type=[1, 2]), "263 tokens but 2 token types"),
        (gguf(eos_token_id=999), "eos_token_id is 999, not one of its 263"),
        (gguf(bos_token_id="x"), "bos_token_id is"),
        (sentencepiece(scores=[1.0]), "266 tokens but 1 scores"),
    ],
)
def test_gguf_without_a_usable_tokenizer_is_one_sentence(tmp_path, metadata, words):
    with pytest.raises(ModelError, match=words) as caught:
        write_gguf_tokenizer(metadata, out=tmp_path / "t", source="m.gguf")
    assert str(caught.value).startswith("m.gguf: ")
    assert not list(tmp_path.rglob("*.json"))


def read_gguf_metadata(path):
    """Key-value pairs of a GGUF file, by the published layout: little-endian, types by number."""
    formats = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    with Path(path).open("rb") as stream:

        def number(code):
            return struct.unpack("<" + code, stream.read(struct.calcsize(code)))[0]

        def value(kind):
            if kind == 8:
                return stream.read(number("Q")).decode()
            if kind == 9:
                inner, count = number("I"), number("Q")
                return [value(inner) for _ in range(count)]
            return number(formats[kind])

        assert stream.read(4) == b"GGUF"
        number("I"), number("Q")
        return {value(8): value(number("I")) for _ in range(number("Q"))}


@pytest.mark.zoo
def test_smollm2_from_the_zoo(tmp_path):
    """The real tokenizer: text there and back, one character at a time, and the model's own chat template."""
    from edgeds.zoo import fetch_model

    path = fetch_model("smollm2-135m", quiet=True)
    write_gguf_tokenizer(read_gguf_metadata(path), out=tmp_path, source=path.name)
    text = open_text(tmp_path, vocab_size=49152)
    assert text.eos_tokens == (2,)
    for sample in ("The quick brown fox, 2026!", "한글 시험 🙂🙂 é 👩‍👩‍👧", "  def f(x):\n\treturn x**2\n\n", ""):
        tokens = text.encode(sample)
        assert text.decode(tokens) == sample == text.tokenizer.decode(tokens)
        stream = Detokenizer(text.table)
        assert "".join([*map(stream.push, tokens), stream.flush()]) == sample
    assert len(text.encode("2026")) == 4
    chat = text.encode_chat([{"role": "user", "content": "Hi"}])
    # What the checkpoint's own tokenizer.json gives for its system prompt.
    assert chat[:12] == [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308]
    assert chat[-4:] == [1, 520, 9531, 198]
    shown = text.decode(chat, skip_special=False)
    assert shown.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert "You are a helpful AI assistant named SmolLM" in shown
