"""Files: nothing half-written, nothing outside, strict JSON, hostile archives refused."""

import contextlib
import errno
import hashlib
import io
import os
import stat
import string
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgeds.errors import BundleError, SpecError
from edgeds.files import (
    atomic_dir,
    atomic_path,
    cache_dir,
    is_safe_member,
    read_json,
    remove_partial,
    sha256_file,
    unzip_to,
    write_json,
    zip_dir,
)


def test_atomic_path_keeps_the_old_file_and_leaves_nothing_when_interrupted(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    target.write_text("old")

    def write_half() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.txt"]  # noqa: PTH208


def test_atomic_path_has_the_suffix_and_mode_of_a_plain_file(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "sub" / "a.onnx") as temporary:
        assert temporary.suffix == ".onnx"
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE((tmp_path / "sub" / "a.onnx").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_atomic_dir_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "bundle"

    def write_half() -> None:
        with atomic_dir(target) as temporary:
            (temporary / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []
    with atomic_dir(target) as temporary:
        (temporary / "whole").touch()
    assert [path.name for path in target.iterdir()] == ["whole"]


def test_atomic_dir_replaces_only_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(SpecError, match="not an empty directory"), atomic_dir(target):
        pass
    with pytest.raises(RuntimeError), atomic_dir(target, replace=True):
        raise RuntimeError
    assert (target / "old").exists()
    with atomic_dir(target, replace=True) as temporary:
        (temporary / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_sha256_file_agrees_with_hashlib(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "x").write_bytes(data)
    assert sha256_file(tmp_path / "x") == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("data", [{"a": float("nan")}, {"a": float("inf")}, {"a": object()}, {"a": "\udcff"}])
def test_write_json_refuses_what_json_cannot_say_and_keeps_the_old_file(tmp_path: Path, data: object) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"old": 1})
    with pytest.raises(SpecError, match=r"x\.json"):
        write_json(path, data)
    assert read_json(path) == {"old": 1}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1, "a": 2}', b"\xff\xfe", b"[" * 100_000, b"1" * 10_000],
    ids=["empty", "cut", "nan", "infinity", "key-twice", "not-utf8", "deep", "huge-number"],
)
def test_malformed_json_is_a_spec_error_that_names_the_file(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(SpecError, match=r"x\.json"):
        read_json(path)


def test_unreadable_and_oversized_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        read_json(tmp_path / "missing.json")
    with pytest.raises(SpecError, match="directory"):
        read_json(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError, match="not a regular file"):
        read_json(tmp_path / "pipe")
    (tmp_path / "big.json").write_text('"' + "x" * 100 + '"')
    with pytest.raises(SpecError, match="more than"):
        read_json(tmp_path / "big.json", max_bytes=50)


names = st.text(alphabet=string.ascii_letters + "./\\:\0\n~ é", max_size=20) | st.text(max_size=20)


@given(names)
@example("")
@example(".")
@example("..")
@example("/")
@example("a/../../b")
@example("C:/x")
@example("a\\..\\b")
@example("a//b")
@example("a" * 300)
@example("\udcff")
@example("x/" * 3000)
def test_safe_members_stay_inside_and_can_be_written(name: str) -> None:
    if not is_safe_member(name):
        return
    base = Path("/base/folder")
    normal = Path(os.path.normpath(base / name))
    assert normal.is_relative_to(base)
    assert normal != base
    assert normal == base / name
    assert str(PurePosixPath(name)) == name.removesuffix("/")
    name.encode("utf-8")
    assert "\0" not in name


@given(st.lists(st.text(alphabet="abcXYZ09-_. é", min_size=1, max_size=8), min_size=1, max_size=4))
def test_plain_relative_names_are_safe(parts: list[str]) -> None:
    if not any(part in (".", "..") for part in parts):
        assert is_safe_member("/".join(parts))
        assert is_safe_member("/".join(parts) + "/")


@given(
    st.dictionaries(
        st.lists(st.text(alphabet="abc", min_size=1, max_size=3), min_size=1, max_size=3).map("/".join),
        st.binary(max_size=200),
        max_size=5,
    )
)
def test_zip_round_trip_is_exact_and_deterministic(tmp_path_factory: pytest.TempPathFactory, data: dict) -> None:
    data = {name: text for name, text in data.items() if not any(other.startswith(name + "/") for other in data)}
    root = tmp_path_factory.mktemp("zip")
    for name, text in data.items():
        (root / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "in" / name).write_bytes(text)
    (root / "in").mkdir(exist_ok=True)
    zip_dir(root / "in", root / "a.zip")
    os.utime(root / "in", (0, 0))
    zip_dir(root / "in", root / "b.zip")
    assert (root / "a.zip").read_bytes() == (root / "b.zip").read_bytes()
    (root / "out").mkdir()
    unzip_to(root / "a.zip", root / "out", max_bytes=10_000)
    found = {p.relative_to(root / "out").as_posix(): p.read_bytes() for p in (root / "out").rglob("*") if p.is_file()}
    assert found == data


def _zip(path: Path, entries: list[tuple[str | zipfile.ZipInfo, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries:
            archive.writestr(name, text)
    return path


def _link(path: Path) -> Path:
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return _zip(path, [(info, b"/etc/passwd")])


def _twice(path: Path) -> Path:
    _zip(path, [("same", b"1"), ("sama", b"2")])
    path.write_bytes(path.read_bytes().replace(b"sama", b"same"))
    return path


def _encrypted(path: Path) -> Path:
    _zip(path, [("secret", b"x")])
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    path.write_bytes(data)
    return path


def _truncated(path: Path) -> Path:
    _zip(path, [("x", os.urandom(5000))])
    path.write_bytes(path.read_bytes()[:2000])
    return path


def _damaged(path: Path) -> Path:
    _zip(path, [("x", b"text " * 5000)])
    data = bytearray(path.read_bytes())
    data[40:60] = b"\xff" * 20
    path.write_bytes(data)
    return path


def _lying(path: Path) -> Path:
    """Headers say 10 bytes, the data unpacks to a million."""
    _zip(path, [("x", b"\0" * 1_000_000)])
    data = path.read_bytes().replace(struct.pack("<I", 1_000_000), struct.pack("<I", 10))
    path.write_bytes(data)
    return path


HOSTILE: dict[str, Callable[[Path], Path]] = {
    "parent": lambda path: _zip(path, [("../evil", b"x")]),
    "inner-parent": lambda path: _zip(path, [("a/../../evil", b"x")]),
    "absolute": lambda path: _zip(path, [("/tmp/evil", b"x")]),
    "drive": lambda path: _zip(path, [("C:/evil", b"x")]),
    "backslash": lambda path: _zip(path, [("..\\evil", b"x")]),
    "link": _link,
    "twice": _twice,
    "encrypted": _encrypted,
    "truncated": _truncated,
    "damaged": _damaged,
    "lying-sizes": _lying,
    "bomb": lambda path: _zip(path, [("x", b"\0" * 5_000_000)]),
    "bomb-of-many": lambda path: _zip(path, [(f"{i}", b"") for i in range(60)]),
    "file-and-folder": lambda path: _zip(path, [("a", b"x"), ("a/b", b"x")]),
    "not-a-zip": lambda path: (path.write_bytes(b"hello") and path) or path,
    "empty-file": lambda path: path.touch() or path,
    "missing": lambda path: path,
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_archives_are_refused_and_write_nothing_outside(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    archive = make(tmp_path / "x.zip")
    folder = tmp_path / "deep" / "out"
    folder.mkdir(parents=True)
    with pytest.raises(BundleError, match=r"x\.zip"):
        unzip_to(archive, folder, max_bytes=2_000_000, max_files=50)
    assert not list(tmp_path.rglob("evil"))
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 2_000_000


@given(st.binary(max_size=400), st.integers(0, 300), st.integers(0, 400))
def test_any_damage_to_an_archive_is_a_bundle_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, start: int, cut: int
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", b"hello " * 50)
        archive.writestr("b/c.txt", b"world")
    data = bytearray(buffer.getvalue())
    data[start : start + len(noise)] = noise
    root = tmp_path_factory.mktemp("damage")
    (root / "x.zip").write_bytes(data[: len(data) - cut % len(data)])
    (root / "out").mkdir()
    with contextlib.suppress(BundleError):
        unzip_to(root / "x.zip", root / "out", max_bytes=10_000)
    assert {path.name for path in root.iterdir()} == {"x.zip", "out"}


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGEDS_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("EDGEDS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "edgeds"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "edgeds"


def test_a_user_without_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("EDGEDS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(SpecError, match="EDGEDS_CACHE"):
        cache_dir()


def test_pipes_and_devices_are_never_replaced(tmp_path: Path) -> None:
    """As root a rename onto /dev/null succeeds and takes it away from the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SpecError, match="pipe or device"):
        write_json(pipe, {})
    for replace in (False, True):
        with pytest.raises(SpecError, match="exists"), atomic_dir(pipe, replace=replace):
            pass
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert [item.name for item in tmp_path.iterdir()] == ["pipe"]


def test_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def write() -> None:
        with atomic_dir(target) as temporary:
            (temporary / "mine").write_text("")
            target.mkdir()
            (target / "theirs").write_text("")

    with pytest.raises(SpecError, match="exists"):
        write()
    assert [item.name for item in target.iterdir()] == ["theirs"]
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_old_folder_comes_back_when_the_new_one_cannot_be_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("")
    rename, calls = Path.rename, []

    def failing(self: Path, other: Path) -> Path:
        calls.append(self)
        if len(calls) == 3:  # the new folder, after the old one was set aside
            raise OSError(5, "I/O error", str(self))
        return rename(self, other)

    def write() -> None:
        with atomic_dir(target, replace=True) as temporary:
            (temporary / "new").write_text("")
            monkeypatch.setattr(Path, "rename", failing)

    with pytest.raises(OSError, match="I/O error"):
        write()
    assert [item.name for item in target.iterdir()] == ["old"]
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_link_to_a_folder_is_followed_and_a_loop_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    with atomic_dir(tmp_path / "link") as temporary:
        (temporary / "file").write_text("")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").exists()
    with pytest.raises(SpecError, match="exists"), atomic_dir(tmp_path / "loop"):
        pass


def test_full_disk_names_what_was_to_be_written(tmp_path: Path) -> None:
    """write() fails without a file name; a user must learn which disk is full."""

    def fill(error: OSError) -> None:
        with atomic_path(tmp_path / "out.txt"):
            raise error

    with pytest.raises(OSError, match=r"No space left.*out\.txt"):
        fill(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(BrokenPipeError):
        fill(BrokenPipeError(errno.EPIPE, "Broken pipe"))

    def fill_folder() -> None:
        with atomic_dir(tmp_path / "folder"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left.*folder"):
        fill_folder()
    assert list(tmp_path.iterdir()) == []


def test_temporary_names_do_not_reach_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / ".out-x1y2.txt"))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    for place in (atomic_path(tmp_path / "out.txt"), atomic_dir(tmp_path / "out")):
        with pytest.raises(PermissionError) as caught, place:
            pass
        assert "x1y2" not in str(caught.value)


def test_what_killed_writers_left_is_removed_and_an_old_folder_comes_back(tmp_path: Path) -> None:
    target = tmp_path / "out[1]"
    with atomic_dir(target) as temporary:
        prefix = temporary.name[: -len("12345678")]
    target.rmdir()
    (tmp_path / f"{prefix}half").mkdir()
    (tmp_path / f"{prefix}old-x" / "old" / "content").mkdir(parents=True)
    (tmp_path / ".out[1]-mine").mkdir()
    remove_partial(target)
    assert sorted(item.name for item in tmp_path.iterdir()) == [".out[1]-mine", "out[1]"]
    assert (target / "content").is_dir()
    (tmp_path / f"{prefix}old-y" / "old").mkdir(parents=True)
    remove_partial(target)
    assert sorted(item.name for item in tmp_path.iterdir()) == [".out[1]-mine", "out[1]"]
    assert (target / "content").is_dir()
