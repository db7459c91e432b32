"""Progress goes to stderr, changes nothing about the items, and can be silenced."""

import pytest

from edgeds.progress import byte_bar, track


def test_track_passes_items_through_lazily_and_keeps_stdout_clean(capsys: pytest.CaptureFixture[str]) -> None:
    taken = []

    def source():
        for item in range(3):
            taken.append(item)
            yield item

    items = track(source(), what="test", total=3)
    assert taken == []
    assert next(items) == 0
    assert taken == [0]
    assert list(items) == [1, 2]
    assert capsys.readouterr().out == ""


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track([1, 2], what="test", quiet=True)) == [1, 2]
    with byte_bar(what="test", total=10, quiet=True) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_errors_pass_through() -> None:
    def broken():
        yield 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(track(broken(), what="test", quiet=True))
