"""Issue 7, generation: stop strings across tokens, several end tokens, and finish reasons that are true."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeds.errors import SpecError
from edgeds.pipelines.llm.detokenize import TokenTable
from edgeds.pipelines.llm.options import SamplingOptions
from edgeds.pipelines.llm.output import Delta, TextOutput
from edgeds.pipelines.llm.stops import StopStrings

BYTES = TokenTable(
    pieces=(*(bytes([value]) for value in range(256)), b"", b""),
    special=frozenset({256, 257}),
    strips_space=False,
)


def generate(data, *, eos=(256,), **options):
    """Feed bytes as tokens (and token numbers in a list) until the end; the deltas and whether it ended."""
    out = TextOutput(SamplingOptions(**options), table=BYTES, eos_tokens=eos)
    deltas = []
    for token in data:
        deltas.append(out.accept(token))
        if deltas[-1].finish_reason:
            break
    return out, deltas


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def first_stop(text, stops):
    """By definition: the stop string complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab.", max_size=30),
    cuts=st.lists(st.integers(1, 6), max_size=30),
    stops=st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4),
)
def test_stop_strings_are_found_wherever_the_pieces_are_cut(text, cuts, stops):
    finder = StopStrings(stops)
    want, stop = first_stop(text, stops)
    got, found, start = "", None, 0
    for cut in [*cuts, len(text)]:
        piece, found = finder.push(text[start : start + cut])
        got += piece
        # Nothing that is out may have to be taken back, and only what can become a stop string is held.
        assert want.startswith(got)
        seen = text[: start + cut]
        if found is None and stops:
            held = seen[len(got) :]
            assert held == "" or any(stop_text.startswith(held) for stop_text in stops)
        start += cut
        if found is not None or start >= len(text):
            break
    assert found == stop
    assert got + ("" if found else finder.flush()) == want


def test_text_after_a_stop_in_the_same_token_is_not_let_through():
    assert StopStrings(["END"]).push("abcENDdef") == ("abc", "END")
    assert StopStrings(["abc", "b"]).push("xabcx") == ("xa", "b")
    assert StopStrings(["b", "ab"]).push("xab") == ("x", "ab")


def test_beginnings_of_a_stop_are_held_and_released():
    finder = StopStrings(["\n\nUser:"])
    assert finder.push("Hi\n\nUs") == ("Hi", None)
    assert finder.push("ual") == ("\n\nUsual", None)
    assert finder.push("\n") == ("", None)
    assert finder.flush() == "\n"


def test_stop_string_across_tokens_and_characters():
    out, deltas = generate("one 🙂 two".encode(), stop="🙂 t")
    assert text_of(deltas) == "one "
    assert deltas[-1] == Delta(text="", finish_reason="stop", stop="🙂 t")
    assert out.tokens == len("one 🙂 t".encode())


def test_stop_completed_by_the_last_allowed_token_is_a_stop():
    _, deltas = generate(b"abEND", stop="END", max_tokens=5)
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop) == ("ab", "stop", "END")
    _, deltas = generate(b"abEND", stop="END", max_tokens=4)
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop) == ("abEN", "length", None)


def test_end_token_as_the_last_allowed_token_is_a_stop():
    _, deltas = generate([97, 256], max_tokens=2)
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop) == ("a", "stop", 256)
    _, deltas = generate([97, 98], max_tokens=2)
    assert (text_of(deltas), deltas[-1].finish_reason) == ("ab", "length")


def test_several_end_tokens_and_what_is_held_goes_out():
    for end in (256, 257):
        _, deltas = generate([*b"abEN", end], eos=(256, 257), stop="END")
        assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop) == ("abEN", "stop", end)


def test_ignore_eos_goes_on_but_not_after_stop_tokens():
    _, deltas = generate([97, 256, 98, 99, 100], ignore_eos=True, stop_tokens=(99,))
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop) == ("ab", "stop", 99)


def test_min_tokens_holds_stop_strings_off():
    _, deltas = generate(b"xxENDyEND", stop="END", min_tokens=6)
    assert (text_of(deltas), deltas[-1].finish_reason) == ("xxENDy", "stop")
    _, deltas = generate(b"xxENDyEND", stop="END", min_tokens=5)
    assert (text_of(deltas), deltas[-1].finish_reason) == ("xx", "stop")


def test_character_cut_by_the_limit_is_flushed_and_may_be_a_stop():
    cut = "a🙂".encode()[:3]
    _, deltas = generate(cut, max_tokens=3)
    assert (text_of(deltas), deltas[-1].finish_reason) == ("a\ufffd", "length")
    _, deltas = generate(cut, max_tokens=3, stop="\ufffd")
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop) == ("a", "stop", "\ufffd")


@pytest.mark.parametrize("reason", ["cancelled", "error", "length"])
def test_ends_from_outside_say_so_and_keep_the_text(reason):
    out, deltas = generate(b"abEN", stop="END")
    last = out.end(reason)
    assert text_of([*deltas, last]) == "abEN"
    assert (last.finish_reason, out.finish_reason) == (reason, reason)


def test_nothing_is_taken_after_the_end():
    out, _ = generate([256])
    with pytest.raises(SpecError, match=r"ended \(stop\)"):
        out.accept(97)
    with pytest.raises(SpecError, match=r"ended \(stop\)"):
        out.end("cancelled")
    with pytest.raises(SpecError, match="finish reason 'bored'"):
        generate(b"a")[0].end("bored")


@settings(max_examples=150, deadline=None)
@given(
    data=st.lists(st.sampled_from([*b"aE N", *"🙂".encode(), 256]), max_size=25),
    limit=st.integers(1, 25),
    stops=st.lists(st.sampled_from(["EN", "E", "🙂a", " "]), max_size=2),
)
def test_the_reason_is_always_the_first_thing_that_ended_it(data, limit, stops):
    out, deltas = generate(data, max_tokens=limit, stop=tuple(stops))
    reason = out.finish_reason
    used = data[: out.tokens]
    plain = bytes(token for token in used if token != 256).decode("utf-8", "replace")
    want, stop = first_stop(plain, stops)
    if reason is None:
        assert len(data) < limit
        assert stop is None or plain.endswith("\ufffd")
        return
    assert text_of(deltas) == want
    if reason == "length":
        assert (out.tokens, stop) == (limit, None)
        assert 256 not in used
    else:
        assert stop is not None or used[-1] == 256
