"""Issue 7, generation: what a request may ask for, and one sentence for everything it may not."""

import json
import math

import pytest

from edgeds.errors import SpecError
from edgeds.pipelines.llm.options import SamplingOptions


def test_defaults_are_greedy_and_change_nothing():
    options = SamplingOptions()
    assert options.is_greedy
    assert not options.is_guided
    assert (options.top_p, options.min_p, options.repetition_penalty) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", 257),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("dynamic_temperature", -1),
        ("top_k", -2),
        ("top_k", 2.0),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", -1),
        ("seed", 0.5),
        ("logprobs", 21),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop", {"a"}),
        ("stop", ("x",) * 17),
        ("stop", ("x" * 1025,)),
        ("stop_tokens", (-1,)),
        ("stop_tokens", 5),
        ("regex", ""),
        ("regex", "a" * ((1 << 20) + 1)),
        ("json_schema", 7),
        ("json_schema", "x" * ((1 << 20) + 1)),
    ],
)
def test_each_bad_value_is_named_in_one_sentence(name, value):
    with pytest.raises(SpecError, match=f"^{name}") as caught:
        SamplingOptions(**{name: value})
    assert "\n" not in str(caught.value)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingOptions(stop="END").stop == ("END",)
    assert SamplingOptions(stop=["a", "b"]).stop == ("a", "b")


def test_guided_decoding_takes_one_grammar_and_an_end():
    with pytest.raises(SpecError, match="not both"):
        SamplingOptions(json_schema={}, regex="a")
    with pytest.raises(SpecError, match="ignore_eos"):
        SamplingOptions(regex="a", ignore_eos=True)


def test_schema_is_text_or_mapping():
    assert json.loads(SamplingOptions(json_schema={"type": "object"}).schema_text()) == {"type": "object"}
    assert SamplingOptions(json_schema="{}").schema_text() == "{}"
    with pytest.raises(SpecError, match="json_schema: cannot be written as JSON"):
        SamplingOptions(json_schema={"a": {1, 2}}).schema_text()
