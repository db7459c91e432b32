"""Issue 7, speculative decoding: guesses by prompt lookup and how many to make."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.errors import SpecError
from edgeds.pipelines.llm.drafts import AdaptiveDraft, PromptLookup


def slow_lookup(tokens, n, *, max_ngram, min_ngram):
    """The definition, by search from the right over the whole text."""
    for size in range(max_ngram, min_ngram - 1, -1):
        if size > len(tokens):
            continue
        tail = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tail:
                out = list(tokens)
                for index in range(n):
                    out.append(out[end + index])
                return out[len(tokens) :]
    return []


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 4), max_size=40),
    cuts=st.lists(st.integers(1, 7), max_size=10),
    n=st.integers(0, 8),
    ngrams=st.sampled_from([(1, 1), (1, 3), (2, 3)]),
)
def test_incremental_index_equals_a_search_of_the_whole_text(tokens, cuts, n, ngrams):
    lookup = PromptLookup(min_ngram=ngrams[0], max_ngram=ngrams[1])
    length = 0
    for cut in [*cuts, 40]:
        length = min(length + cut, len(tokens))
        want = slow_lookup(tokens[:length], n, min_ngram=ngrams[0], max_ngram=ngrams[1])
        assert lookup.draft(tokens[:length], n) == want


def test_quotes_are_guessed_and_the_limit_kept():
    text = [9, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3]
    assert PromptLookup(max_draft=4).draft(text, 10) == [4, 5, 6, 7]
    assert PromptLookup().draft(text, 2) == [4, 5]
    assert PromptLookup().draft(text, 0) == []
    assert PromptLookup().draft([], 4) == []
    assert PromptLookup().draft([1, 2, 3], 4) == []


def test_another_text_is_indexed_anew():
    lookup = PromptLookup()
    assert lookup.draft([1, 2, 1], 2) == [2, 1]
    assert lookup.draft([5, 6, 7], 2) == []
    assert lookup.draft([3, 3], 2) == [3, 3]


def test_guess_cost_does_not_grow_with_the_text():
    lookup = PromptLookup()
    text = [index * index % 977 for index in range(60_000)]
    lookup.draft(text, 8)
    begun = time.perf_counter()
    for token in range(200):
        text.append(token)
        lookup.draft(text, 8)
    assert (time.perf_counter() - begun) / 200 < 2e-3


def test_length_follows_acceptance():
    good, bad = AdaptiveDraft(), AdaptiveDraft(retry=4)
    for _ in range(30):
        good.learn(8, 8)
        bad.learn(2, 0)
    assert good.length() == 8
    assert good.acceptance > 0.95
    assert [bad.length() for _ in range(8)] == [0, 0, 0, 1, 0, 0, 0, 1]
    for _ in range(12):
        bad.learn(1, 1)
    assert bad.length() > 2


def test_guesses_that_were_never_judged_count_neither_way():
    one = AdaptiveDraft(memory=0.99)
    for _ in range(300):
        one.learn(8, 1)
    assert one.acceptance == pytest.approx(0.5, abs=0.02)


def test_bad_settings_are_refused():
    with pytest.raises(SpecError, match="min_ngram 3 and max_ngram 2"):
        PromptLookup(min_ngram=3, max_ngram=2)
    with pytest.raises(SpecError, match="max_draft 0"):
        PromptLookup(max_draft=0)
    with pytest.raises(SpecError, match="memory 1"):
        AdaptiveDraft(memory=1)
    with pytest.raises(SpecError, match="3 of 2 guesses"):
        AdaptiveDraft().learn(2, 3)
