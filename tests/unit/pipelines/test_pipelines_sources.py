"""Sources: every kind, several at once, policies, bad input."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import numpy as np
import pytest

from edgeds.errors import InputError, SpecError
from edgeds.pipelines import readers
from edgeds.pipelines.sources import Frame, FrameStream, open_sources

cv2 = pytest.importorskip("cv2")


def write_video(path, *, frames: int = 10, fps: float = 25.0, size: int = 64) -> None:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), fps, (size, size))
    for index in range(frames):
        writer.write(np.full((size, size, 3), index * 20 + 10, np.uint8))
    writer.release()


def write_image(path, value: int = 0) -> None:
    cv2.imwrite(str(path), np.full((8, 10, 3), value, np.uint8))


def values(stream) -> list[int]:
    with stream:
        return [round(float(frame.image_bgr.mean())) for frame in stream]


@pytest.fixture
def folder(tmp_path):
    for index in (10, 9, 1):
        write_image(tmp_path / f"frame_{index}.png", index)
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / ".hidden.png").write_bytes(b"x")
    return tmp_path


def test_folder_glob_and_list_give_images_in_natural_order(folder) -> None:
    assert values(open_sources(folder)) == [1, 9, 10]
    assert values(open_sources(str(folder / "frame_?.png"))) == [1, 9]
    (folder / "list.txt").write_text("# comment\nframe_9.png\n\nframe_1.png\n")
    assert values(open_sources(folder / "list.txt")) == [9, 1]
    assert values(open_sources([folder / "frame_1.png", str(folder / "frame_9.png")])) == [1, 9]


def test_an_unreadable_image_is_reported_and_the_rest_goes_on(folder, caplog) -> None:
    """B89: one bad image does not stop the others."""
    (folder / "frame_5.png").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "edgeds"), open_sources(folder) as stream:
        frames = list(stream)
        assert stream.failed == 1
    assert [frame.error is None for frame in frames] == [True, False, True, True]
    assert "frame_5.png" in str(frames[1].error)
    assert "frame_5.png" in caplog.text


def test_missing_image_in_a_list_is_a_frame_with_error(folder) -> None:
    (folder / "list.txt").write_text("frame_1.png\ngone.png\n")
    with open_sources(folder / "list.txt") as stream:
        frames = list(stream)
    assert frames[0].error is None
    assert "gone.png" in str(frames[1].error)


def test_arrays_stacks_and_generators() -> None:
    image = np.zeros((4, 5, 3), np.uint8)
    for source in ([image, image + 1], np.stack([image, image + 1]), (image + i for i in range(2))):
        with open_sources(source) as stream:
            frames = list(stream)
        assert [(frame.index, int(frame.image_bgr[0, 0, 0])) for frame in frames] == [(0, 0), (1, 1)]
    with open_sources([image, image.astype(np.float32), image]) as stream:
        assert [frame.error is None for frame in stream] == [True, False, True]


def test_a_generator_is_read_lazily() -> None:
    made = []

    def frames():
        for index in range(1000):
            made.append(index)
            yield np.zeros((4, 4, 3), np.uint8)

    with open_sources(frames()) as stream:
        next(stream)
        next(stream)
    assert len(made) <= 3


def test_video_every_frame_with_times(tmp_path) -> None:
    write_video(tmp_path / "a.avi", frames=7, fps=10)
    with open_sources(tmp_path / "a.avi") as stream:
        frames = list(stream)
    assert [frame.index for frame in frames] == list(range(7))
    assert frames[3].time_s == pytest.approx(0.3)
    assert [round(float(frame.image_bgr.mean()) / 20 - 0.5) for frame in frames] == list(range(7))


def test_two_videos_are_interleaved(tmp_path) -> None:
    for name in ("a", "b"):
        write_video(tmp_path / f"{name}.avi", frames=4)
    with open_sources([tmp_path / "a.avi", tmp_path / "b.avi"]) as stream:
        order = [frame.source[-5] for frame in stream]
    assert order == list("abababab")


def test_latest_policy_drops_and_counts_and_stops_its_threads(tmp_path) -> None:
    write_video(tmp_path / "a.avi", frames=12, fps=200)
    before = threading.active_count()
    with open_sources(tmp_path / "a.avi", policy="latest") as stream:
        first = next(stream)
        time.sleep(0.2)
        rest = list(stream)
        assert rest[-1].index == 11
        assert stream.dropped == 12 - 1 - len(rest) >= 5
    assert first.index <= 1
    assert threading.active_count() == before
    stream = open_sources(tmp_path / "a.avi", policy="latest")
    stream.close()
    stream.close()
    assert threading.active_count() == before
    assert list(stream) == []


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_a_damaged_video_ends_cleanly(tmp_path, keep: float, caplog) -> None:
    write_video(tmp_path / "a.avi", frames=12)
    data = (tmp_path / "a.avi").read_bytes()
    (tmp_path / "cut.avi").write_bytes(data[: int(len(data) * keep)])
    # How much of the index survived decides; both a short video and a refusal are clean ends.
    with contextlib.suppress(InputError), open_sources(tmp_path / "cut.avi") as stream:
        assert len(list(stream)) < 12
    (tmp_path / "junk.mp4").write_bytes(b"\0" * 5000)
    with pytest.raises(InputError, match=r"junk\.mp4"):
        open_sources(tmp_path / "junk.mp4")
    (tmp_path / "none.mp4").write_bytes(b"")
    with pytest.raises(InputError, match="empty"):
        open_sources(tmp_path / "none.mp4")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.jpg", "no such file"),
        ("*.jpg", "holds no image"),
        ("sub", "holds no image"),
        ("notes.doc", "not a known"),
        ("empty.txt", "empty"),
        ("latin.txt", "UTF-8"),
        ("nested.txt", "another list"),
        ("ftp://host/a.mp4", "scheme"),
        ("videotestsrc ! appsink", "GStreamer"),
        ("", "expected a path"),
        ("a\0b", "null"),
    ],
)
def test_bad_sources_are_refused_by_name(tmp_path, monkeypatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("edgeds.pipelines.sources.has_gstreamer", lambda: False)
    (tmp_path / "sub").mkdir()
    (tmp_path / "notes.doc").write_text("x")
    (tmp_path / "empty.txt").write_text("\n# nothing\n")
    (tmp_path / "latin.txt").write_bytes("ä.jpg".encode("latin-1"))
    (tmp_path / "nested.txt").write_text("empty.txt\n")
    with pytest.raises(InputError, match=message):
        open_sources(name)


def test_wrong_arguments() -> None:
    with pytest.raises(SpecError, match="policy"):
        open_sources(np.zeros((4, 4, 3), np.uint8), policy="newest")
    for empty in ([], ()):
        with pytest.raises(InputError, match="no source"):
            open_sources(empty)
    for wrong in (None, 1.5, True, {}, b"x"):
        with pytest.raises(InputError):
            next(iter(open_sources(wrong)), None) or pytest.fail("accepted")


def test_passwords_do_not_reach_messages(monkeypatch) -> None:
    monkeypatch.setattr("edgeds.pipelines.readers.OPEN_TIMEOUT_MS", 300)
    with pytest.raises(InputError) as info:
        open_sources("rtsp://user:secret@127.0.0.1:9/x")
    assert "secret" not in str(info.value)
    assert "user:***@127.0.0.1" in str(info.value)


class BreakingStream:
    """Stands for a network stream: gives ``frames`` frames, then nothing more."""

    def __init__(self, frames: int) -> None:
        self.left = frames
        self.closed = False

    def poll(self):
        if self.left == 0:
            return None
        self.left -= 1
        time.sleep(0.002)
        return Frame(source="cam", index=0, image_bgr=np.zeros((4, 4, 3), np.uint8), fps=25.0)

    def close(self) -> None:
        self.closed = True


def test_a_broken_live_stream_is_opened_again_and_given_up_in_the_end(monkeypatch, caplog) -> None:
    monkeypatch.setattr(readers, "RECONNECT_WAIT_S", 0.001)
    opened: list[BreakingStream] = []

    def opener() -> BreakingStream:
        if len(opened) == 2:
            raise InputError("cam: cannot be opened")
        opened.append(BreakingStream(3))
        return opened[-1]

    wake = threading.Condition()
    reader = readers.LatestReader(opener, name="cam", live=True, wake=wake)
    with FrameStream([reader], wake=wake) as stream, caplog.at_level(logging.WARNING, "edgeds"):
        frames = list(stream)
    assert frames[-1].index == 5  # numbered through, across the reconnection
    assert len(frames) + stream.dropped == 6
    assert len(opened) == 2
    assert all(item.closed for item in opened)
    assert "opening it again" in caplog.text


def test_a_failing_reader_does_not_hang_the_others(tmp_path) -> None:
    """An endless live source and a short file: the file's frames all come through."""
    wake = threading.Condition()
    live = readers.LatestReader(lambda: BreakingStream(10**6), name="cam", live=True, wake=wake)
    write_image(tmp_path / "a.png")
    files = readers.ImageReader([tmp_path / "a.png"] * 5)
    seen = 0
    with FrameStream([live, files], wake=wake) as stream:
        for frame in stream:
            seen += frame.fps is None
            if seen == 5:
                break
    assert seen == 5
