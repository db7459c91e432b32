"""Issue 7, generation: JSON-schema and regex-guided decoding, exact under sampling, speculation and limits."""

import json
import re
import sys

import numpy as np
import pytest

from edgeds.errors import InputError, MissingDependency, ModelError, SpecError
from edgeds.pipelines.llm.detokenize import byte_alphabet, token_table
from edgeds.pipelines.llm.guided import Guide
from edgeds.pipelines.llm.options import SamplingOptions
from edgeds.pipelines.llm.sampling import Sampler

tokenizers = pytest.importorskip("tokenizers")

END, COUNT = 260, 262
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def byte_level():
    """Bytes, three longer tokens, and two end tokens."""
    vocab = {**byte_alphabet(), '{"': 256, '":': 257, "Ġ{": 258, "aa": 259}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|end|>", "<|turn|>"])
    return made


@pytest.fixture(scope="module")
def guide():
    pytest.importorskip("llguidance")
    return Guide(byte_level(), token_count=COUNT, eos_tokens=(END, END + 1))


def generate(guide, *, limit=80, seed=0, noise=2.0, **options):
    """What a model of random numbers says under the grammar; tokens and text."""
    settings = SamplingOptions(seed=seed, max_tokens=limit, **options)
    sampler = Sampler(
        settings,
        prompt_tokens=[],
        vocab_size=COUNT,
        eos_tokens=(END, END + 1),
        constraint=guide.constraint(settings),
    )
    rng = np.random.default_rng(seed)
    tokens = []
    for _ in range(limit):
        token = sampler.choose(rng.normal(0, noise, COUNT).astype(np.float32)).token
        sampler.record(token)
        if token >= END:
            return tokens, token_table(byte_level()).decode(tokens)
        tokens.append(token)
    return tokens, None


@pytest.mark.parametrize("seed", range(8))
def test_json_schema_gives_json_that_fits(guide, seed):
    _, text = generate(guide, seed=seed, json_schema=PERSON, temperature=1.0)
    person = json.loads(text)
    assert set(person) == {"name", "age"}
    assert len(person["name"]) <= 6
    assert 0 <= person["age"] <= 150


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regex_gives_a_match(guide, temperature):
    for seed in range(8):
        _, text = generate(guide, seed=seed, regex=r"a{3,9}(-[0-9]{2}){1,3}", temperature=temperature)
        assert re.fullmatch(r"a{3,9}(-[0-9]{2}){1,3}", text)


def test_the_end_comes_only_when_the_text_is_complete(guide):
    options = SamplingOptions(regex="ab?")
    constraint = guide.constraint(options)
    assert set(np.flatnonzero(constraint.allowed())) == {ord("a")}
    assert not constraint.is_complete
    constraint.advance(ord("a"))
    assert constraint.is_complete
    assert set(np.flatnonzero(constraint.allowed())) >= {ord("b"), END}
    constraint.advance(ord("b"))
    assert set(np.flatnonzero(constraint.allowed())) <= {END, END + 1}
    constraint.advance(END)


def test_extra_tokens_leave_the_state_as_it_was(guide):
    constraint = guide.constraint(SamplingOptions(regex="abc"))
    before = constraint.allowed()
    assert set(np.flatnonzero(constraint.allowed([ord("a")]))) == {ord("b")}
    assert set(np.flatnonzero(constraint.allowed([ord("a"), ord("b")]))) == {ord("c")}
    assert not constraint.allowed([ord("a"), ord("x")]).any()
    np.testing.assert_array_equal(constraint.allowed(), before)


def test_guessed_tokens_are_judged_by_the_grammar(guide):
    options = SamplingOptions(regex="abc")
    sampler = Sampler(
        options, prompt_tokens=[], vocab_size=COUNT, eos_tokens=(END,), constraint=guide.constraint(options)
    )
    rows = np.random.default_rng(0).normal(0, 1, (4, COUNT)).astype(np.float32)
    choices, held = sampler.judge([ord("a"), ord("b"), ord("x")], rows)
    assert ([choice.token for choice in choices], held) == ([ord("a"), ord("b"), ord("c")], 2)


def test_requests_do_not_share_their_place(guide):
    first, second = (guide.constraint(SamplingOptions(regex="ab")) for _ in range(2))
    first.advance(ord("a"))
    assert set(np.flatnonzero(second.allowed())) == {ord("a")}


def test_schema_as_text_and_one_style_of_json(guide):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}},
    }
    _, text = generate(guide, json_schema=json.dumps({**schema, "required": ["a"], "additionalProperties": False}))
    assert text == '{"a": [1, 1]}'


def test_tokens_that_do_not_fit_are_refused(guide):
    constraint = guide.constraint(SamplingOptions(regex="ab"))
    with pytest.raises(InputError, match="regex: token 120 does not fit"):
        constraint.advance(ord("x"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "a("}, "^regex: .*unclosed group"),
        ({"regex": "(?=x)a"}, "^regex: .*look-around"),
        ({"json_schema": '{"type":'}, "^json_schema: EOF"),
        ({"json_schema": "[]"}, "^json_schema: Expecting object"),
        ({"json_schema": {"type": "nope"}}, "^json_schema: Invalid type: nope"),
        ({"json_schema": {"$ref": "#/missing"}}, "^json_schema: Pointer '/missing' does not exist"),
        ({"json_schema": {"$ref": "http://example.com/x"}}, "^json_schema: .*does not fetch"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "^json_schema: Unimplemented keys"),
        ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}}, "^json_schema: Unsatisfiable"),
    ],
)
def test_bad_grammars_are_one_sentence(guide, options, words):
    with pytest.raises(SpecError, match=words) as caught:
        guide.constraint(SamplingOptions(**options))
    assert "\n" not in str(caught.value)


def test_requests_without_a_grammar_need_no_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    guide = Guide(byte_level(), token_count=COUNT, eos_tokens=(END,))
    assert guide.constraint(SamplingOptions()) is None
    with pytest.raises(MissingDependency, match=r"edgeds\[llm\]"):
        guide.constraint(SamplingOptions(regex="a"))


def test_model_without_an_end_cannot_be_guided():
    pytest.importorskip("llguidance")
    with pytest.raises(ModelError, match="needs a model with an end token"):
        Guide(byte_level(), token_count=COUNT, eos_tokens=()).constraint(SamplingOptions(regex="a"))
