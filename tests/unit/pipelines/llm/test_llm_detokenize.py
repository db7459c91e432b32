"""Issue 7, generation, and report B102: text token by token never breaks a character and loses none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.errors import InputError, ModelError
from edgeds.pipelines.llm.detokenize import Detokenizer, TokenTable, byte_alphabet, token_table

tokenizers = pytest.importorskip("tokenizers")

TEXT = "한글 시험 🙂🙂 é 👩‍👩‍👧 naïve\n\tمرحبا"


def byte_level():
    """256 byte tokens in the tokenizer's own alphabet, then a special and an added token."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_alphabet(), merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.add_tokens(["🙂 tool"])
    return made


def sentencepiece():
    """Words with ▁, and bytes for everything else, decoded as Llama's tokenizers are."""
    vocab = {"<unk>": 0, "<s>": 1, "▁Hello": 2, "▁": 3, "wor": 4, "ld": 5, "▁é": 6}
    vocab |= {f"<0x{byte:02X}>": 7 + byte for byte in range(256)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    made.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<unk>", "<s>"])
    return made


def stream(table, tokens, **options):
    detokenizer = Detokenizer(table, **options)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def test_the_byte_alphabet_is_that_of_the_tokenizers_library():
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_b102_one_byte_at_a_time_gives_whole_characters():
    tokenizer = byte_level()
    table = token_table(tokenizer)
    tokens = tokenizer.encode(TEXT).ids
    assert tokens == list(TEXT.encode())
    pieces = stream(table, tokens)
    assert "".join(pieces) == TEXT == table.decode(tokens) == tokenizer.decode(tokens)
    assert "\ufffd" not in "".join(pieces)
    # Every character comes with its own last byte, so at most one is held back.
    for count in range(len(tokens)):
        assert "".join(pieces[: count + 1]) == tokens_text(tokens[: count + 1])


def tokens_text(tokens):
    return bytes(tokens).decode("utf-8", "ignore")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 257), max_size=60))
def test_b102_any_bytes_streamed_equal_decoding_everything(tokens):
    """Invalid bytes, ends in mid-character, special tokens in between: as the tokenizers library decodes them."""
    assert "".join(stream(TABLE, tokens)) == TABLE.decode(tokens) == TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert TABLE.decode(tokens, skip_special=False) == TOKENIZER.decode(tokens, skip_special_tokens=False)


TOKENIZER = byte_level()
TABLE = token_table(TOKENIZER)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*range(2, 7), *(7 + byte for byte in "é🙂".encode())]), max_size=30))
def test_word_tokens_with_byte_fallback_equal_the_library_where_it_keeps_text(tokens):
    tokenizer = sentencepiece()
    table = token_table(tokenizer)
    ours, theirs = table.decode(tokens), tokenizer.decode(tokens)
    # The library throws a whole run of bytes away for one wrong byte in it; here only the wrong bytes are.
    assert ours == theirs or "\ufffd" in theirs


def test_a_run_of_fallback_bytes_is_an_emoji():
    table = token_table(sentencepiece())
    tokens = [2, *(7 + byte for byte in "🙂".encode()), 6]
    assert table.decode(tokens) == "Hello🙂 é"
    assert stream(table, tokens, at_start=False) == [" Hello", "", "", "", "🙂", " é", ""]
    assert "".join(stream(table, [3, 4, 5], at_start=True)) == "world"


def test_unfinished_bytes_are_flushed_once():
    assert stream(TABLE, [*b"a\xf0\x9f"]) == ["a", "", "", "\ufffd"]
    assert stream(TABLE, [0xF0, 0x9F, ord("b")]) == ["", "", "\ufffdb", ""]


def test_metaspace_and_gaps_in_the_vocabulary():
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "b▁c": 3}, unk_token="▁a"))
    made.decoder = tokenizers.decoders.Metaspace()
    table = token_table(made)
    assert len(table.pieces) == 4
    assert table.decode([0, 2, 3]) == "ab c"
    made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    assert token_table(made).decode([0, 3]) == " ab c"


def test_other_decoders_are_refused_by_name():
    made = byte_level()
    made.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ModelError, match="decoder WordPiece is not known"):
        token_table(made)
    made.decoder = tokenizers.decoders.Replace(tokenizers.Regex("a+"), "b")
    with pytest.raises(ModelError, match="regular expression"):
        token_table(made)
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ModelError, match="has no decoder"):
        token_table(bare)


@pytest.mark.parametrize("token", [-1, 2, 10**9])
def test_numbers_that_are_no_token_are_refused(token):
    table = TokenTable(pieces=(b"a", b"b"), special=frozenset(), strips_space=False)
    with pytest.raises(InputError, match=f"token {token} is outside the vocabulary of 2"):
        table.decode([np.int64(token)])
