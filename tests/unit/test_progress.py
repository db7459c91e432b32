"""Progress goes to stderr, changes nothing about the items, and can be silenced."""

import os
import pty
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from edgeds.progress import byte_bar, stage, track


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


def test_a_stage_shows_its_name_and_time_once_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stage("short"):
        pass
    assert capsys.readouterr() == ("", "")
    with stage("silent", quiet=True):
        time.sleep(1.2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with stage("thinking"):
        time.sleep(1.3)
    assert "thinking 00:01" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with stage("not worth a line of a log"):
        time.sleep(1.3)
    assert capsys.readouterr().err == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "edgeds-progress"]


def test_a_stage_lets_errors_through_and_ends_its_thread() -> None:
    with pytest.raises(KeyboardInterrupt), stage("broken"):
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if thread.name == "edgeds-progress"]


def test_a_terminal_without_a_size_shows_bars_too() -> None:
    code = """
        import time
        from edgeds.progress import track
        for _ in track(range(8), what="counting"):
            time.sleep(0.2)
    """
    terminal, other_end = pty.openpty()  # its size is 0 x 0
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=other_end)
    os.close(other_end)
    seen = b""
    try:
        while block := os.read(terminal, 4096):
            seen += block
    except OSError:  # Linux: the other end is closed
        pass
    finally:
        os.close(terminal)
    assert process.wait(30) == 0
    assert b"counting" in seen
