"""Damaged and hostile bundles: refused with the file named, and nothing outside is read or written."""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeds.bundle import Manifest, open_bundle, unzip_bundle, verify_bundle, write_bundle, zip_bundle
from edgeds.bundle.golden import read_golden
from edgeds.errors import BundleError


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    manifest = Manifest(
        task="detect", models={"float": "model.onnx"}, inputs=(), outputs=(), precision="float", license="Apache-2.0"
    )
    np.savez(tmp_path / "g.npz", x=np.ones(3))
    files = {"model.onnx": b"weights", "sub/data.bin": b"0123456789", "golden.npz": tmp_path / "g.npz"}
    return write_bundle(tmp_path / "good", files=files, manifest=manifest)


def edit_manifest(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = bundle / "bundle.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def relist(bundle: Path, name: str) -> None:
    """Make the manifest agree with the file, as somebody who builds a hostile bundle would."""
    data = (bundle / name).read_bytes()
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    edit_manifest(bundle, lambda manifest: manifest["files"].update({name: entry}))


def outside_link(bundle: Path) -> None:
    secret = bundle.parent / "secret"
    secret.write_bytes(b"0123456789")
    (bundle / "sub" / "data.bin").unlink()
    (bundle / "sub" / "data.bin").symlink_to(secret)


def outside_folder_link(bundle: Path) -> None:
    shutil.move(bundle / "sub", bundle.parent / "elsewhere")
    (bundle / "sub").symlink_to(bundle.parent / "elsewhere")


def link_loop(bundle: Path) -> None:
    (bundle / "model.onnx").unlink()
    (bundle / "model.onnx").symlink_to("model.onnx")


def pipe(bundle: Path) -> None:
    (bundle / "model.onnx").unlink()
    os.mkfifo(bundle / "model.onnx")


def folder_in_place(bundle: Path) -> None:
    (bundle / "model.onnx").unlink()
    (bundle / "model.onnx").mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "changed-byte": (lambda b: (b / "model.onnx").write_bytes(b"weightz"), "model.onnx", "damaged"),
    "cut": (lambda b: (b / "sub/data.bin").write_bytes(b"01234"), "sub/data.bin", "5 bytes, listed 10"),
    "gone": (lambda b: (b / "model.onnx").unlink(), "model.onnx", "missing"),
    "extra": (lambda b: (b / "sub/extra.so").write_bytes(b""), "sub/extra.so", "not listed"),
    "extra-link": (lambda b: (b / "extra").symlink_to("/etc"), "extra", "not listed"),
    "engines-file-elsewhere": (lambda b: (b / "sub/engines").mkdir() or (b / "sub/engines/x").touch(), "x", "listed"),
    "link-outside": (outside_link, "sub/data.bin", "leaves the bundle"),
    "folder-link-outside": (outside_folder_link, "sub", "listed"),
    "link-loop": (link_loop, "model.onnx", "cannot be read"),
    "pipe": (pipe, "model.onnx", "not a regular file"),
    "folder-in-place": (folder_in_place, "model.onnx", "not a regular file"),
}


@pytest.mark.parametrize(("damage", "name", "what"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_found_named_and_refused(bundle: Path, damage: Callable[[Path], Any], name: str, what: str) -> None:
    damage(bundle)
    problems = verify_bundle(bundle)
    assert any(name in problem.file and what in problem.what for problem in problems), problems
    with pytest.raises(BundleError, match="good"):
        open_bundle(bundle)
    with pytest.raises(BundleError):
        zip_bundle(bundle, bundle.parent / "x.zip")
    assert not (bundle.parent / "x.zip").exists()


def test_verify_reports_every_problem_not_only_the_first(bundle: Path) -> None:
    (bundle / "model.onnx").write_bytes(b"weightz")
    (bundle / "sub/data.bin").unlink()
    (bundle / "extra").touch()
    assert sorted(problem.file for problem in verify_bundle(bundle)) == ["extra", "model.onnx", "sub/data.bin"]


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer-schema": (lambda m: m.update(schema=2, new_key=1), "upgrade edgeds"),
    "schema-zero": (lambda m: m.update(schema=0), "schema"),
    "schema-true": (lambda m: m.update(schema=True), "schema"),
    "schema-text": (lambda m: m.update(schema="1"), "schema"),
    "no-schema": (lambda m: m.pop("schema"), "schema"),
    "unknown-key": (lambda m: m.update(extra=1), "unknown key 'extra'"),
    "missing-key": (lambda m: m.pop("task"), "'task' is missing"),
    "task-number": (lambda m: m.update(task=3), "task"),
    "names-text-key": (lambda m: m.update(names={"a": "b"}), "names"),
    "bad-bucket": (lambda m: m.update(buckets=["0x0"]), "65536"),
    "no-models": (lambda m: m.update(models={}), "at least one model"),
    "unlisted-model": (lambda m: m.update(models={"float": "x.onnx"}), "x.onnx"),
    "model-outside": (lambda m: m.update(models={"float": "../../x.onnx"}), "x.onnx"),
    "traversal": (lambda m: m["files"].update({"../x": m["files"]["model.onnx"]}), "'../x'"),
    "absolute": (lambda m: m["files"].update({"/etc/passwd": m["files"]["model.onnx"]}), "/etc/passwd"),
    "itself": (lambda m: m["files"].update({"bundle.json": m["files"]["model.onnx"]}), "reserved"),
    "engine-listed": (lambda m: m["files"].update({"engines/x": m["files"]["model.onnx"]}), "reserved"),
    "short-hash": (lambda m: m["files"]["model.onnx"].update(sha256="ab"), "sha256"),
    "negative-size": (lambda m: m["files"]["model.onnx"].update(bytes=-1), "negative"),
    "size-float": (lambda m: m["files"]["model.onnx"].update(bytes=7.0), "bytes"),
    "extra-file-key": (lambda m: m["files"]["model.onnx"].update(url="http://x"), "url"),
    "digest-without-preprocess": (lambda m: m.update(preprocess_digest="x"), "preprocess"),
}


@pytest.mark.parametrize(("change", "words"), MANIFESTS.values(), ids=MANIFESTS.keys())
@pytest.mark.parametrize("zipped", [False, True], ids=["folder", "zip"])
def test_wrong_manifests_are_refused(
    bundle: Path, change: Callable[[dict[str, Any]], Any], words: str, zipped: bool
) -> None:
    edit_manifest(bundle, change)
    path = bundle
    if zipped:
        shutil.make_archive(str(bundle.parent / "z"), "zip", bundle)
        path = bundle.parent / "z.zip"
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert words in str(caught.value)
    assert "bundle.json" in str(caught.value)
    assert [words in problem.what for problem in verify_bundle(path)] == [True]


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"{", b"\xff", b'{"schema": NaN}', b'{"schema": 1, "schema": 1}']
)
def test_unparsable_manifests_are_refused(bundle: Path, text: bytes) -> None:
    (bundle / "bundle.json").write_bytes(text)
    with pytest.raises(BundleError, match=r"bundle\.json"):
        open_bundle(bundle)


def test_manifest_size_is_bounded(bundle: Path) -> None:
    with (bundle / "bundle.json").open("ab") as stream:
        stream.truncate(200 << 20)
    with pytest.raises(BundleError, match="allowed"):
        open_bundle(bundle)


def test_manifest_link_is_refused(bundle: Path) -> None:
    (bundle / "bundle.json").rename(bundle.parent / "outside.json")
    (bundle / "bundle.json").symlink_to(bundle.parent / "outside.json")
    with pytest.raises(BundleError, match="symbolic link"):
        open_bundle(bundle)


@pytest.mark.parametrize("kind", ["missing", "empty-folder", "file", "empty-file", "device"])
def test_things_that_are_no_bundle(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "empty-folder":
        path.mkdir()
    elif kind == "file":
        path.write_bytes(b"hello")
    elif kind == "empty-file":
        path.touch()
    elif kind == "device":
        path = Path("/dev/null")
    with pytest.raises(BundleError, match=path.name):
        open_bundle(path)


def pack(path: Path, folder: Path, *, drop: str = "", extra: dict[str, bytes] | None = None, prefix: str = "") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder).as_posix()
            if file.is_file() and name != drop:
                archive.write(file, prefix + name)
        for name, text in (extra or {}).items():
            archive.writestr(name, text)
    return path


def test_bomb_is_refused_by_what_the_manifest_lists(bundle: Path, tmp_path: Path) -> None:
    """A file of 10 listed bytes that unpacks to 50 MB stops after a few blocks, and nothing stays behind."""
    path = pack(tmp_path / "bomb.zip", bundle, drop="sub/data.bin", extra={"sub/data.bin": b"\0" * 50_000_000})
    with pytest.raises(BundleError, match=r"bomb\.zip"):
        unzip_bundle(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bomb.zip", "g.npz", "good"]


def test_bomb_that_is_honest_about_its_size_meets_the_limit(bundle: Path, tmp_path: Path) -> None:
    (bundle / "sub/data.bin").write_bytes(b"\0" * 3_000_000)
    relist(bundle, "sub/data.bin")
    path = zip_bundle(bundle, tmp_path / "z.zip")
    with pytest.raises(BundleError, match="more than the 1,000,000 allowed"):
        open_bundle(path, max_bytes=1_000_000)
    edit_manifest(bundle, lambda manifest: manifest["files"]["sub/data.bin"].update(bytes=1 << 60))
    with pytest.raises(BundleError, match="allowed"):
        open_bundle(pack(tmp_path / "y.zip", bundle))
    with pytest.raises(BundleError, match="free"):
        open_bundle(pack(tmp_path / "x.zip", bundle), max_bytes=1 << 62)


@pytest.mark.parametrize(
    "extra", [{"../evil": b"x"}, {"/evil": b"x"}, {"evil": b"x"}, {"engines/../../evil": b"x"}, {"sub/../evil": b"x"}]
)
def test_archives_with_more_than_the_manifest_lists_are_refused(
    bundle: Path, tmp_path: Path, extra: dict[str, bytes]
) -> None:
    path = pack(tmp_path / "z.zip", bundle, extra=extra)
    with pytest.raises(BundleError, match=r"z\.zip"):
        unzip_bundle(path, tmp_path / "deep" / "out")
    assert not list(tmp_path.rglob("evil"))
    assert verify_bundle(path)


def test_link_in_an_archive_is_refused(bundle: Path, tmp_path: Path) -> None:
    path = pack(tmp_path / "z.zip", bundle, drop="model.onnx")
    info = zipfile.ZipInfo("model.onnx")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(info, b"/etc/hostname")
    with pytest.raises(BundleError, match=r"model\.onnx"):
        open_bundle(path)


def test_zip_of_the_folder_itself_gets_a_hint(bundle: Path, tmp_path: Path) -> None:
    path = pack(tmp_path / "z.zip", bundle, prefix="good/")
    with pytest.raises(BundleError, match="zip the contents"):
        open_bundle(path)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.6, 0.95])
def test_truncated_archives_are_refused(bundle: Path, tmp_path: Path, keep: float) -> None:
    path = zip_bundle(bundle, tmp_path / "z.zip")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(BundleError, match=r"z\.zip"):
        unzip_bundle(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_zip_into_itself_or_over_a_folder_is_refused(bundle: Path) -> None:
    for target in (bundle / "x.zip", bundle / "sub"):
        with pytest.raises(ValueError, match=r"bundle|folder"):
            zip_bundle(bundle, target)
    assert verify_bundle(bundle) == []


def test_unzip_keeps_an_existing_folder(bundle: Path, tmp_path: Path) -> None:
    path = zip_bundle(bundle, tmp_path / "z.zip")
    with pytest.raises(ValueError, match="not an empty directory"):
        unzip_bundle(path, bundle)
    assert verify_bundle(bundle) == []


def test_interrupted_open_of_a_zip_leaves_no_temporary_folder(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zip_bundle(bundle, tmp_path / "z.zip")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))

    def interrupt(*_args: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgeds.bundle.reader.compare_files", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_bundle(path)
    assert list((tmp_path / "tmp").iterdir()) == []


def _npz(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def _npy(array: np.ndarray, path: Path) -> bytes:
    np.save(path, array, allow_pickle=True)
    return path.read_bytes()


def test_golden_samples_never_unpickle_and_headers_are_not_trusted(tmp_path: Path) -> None:
    good = _npy(np.arange(4.0), tmp_path / "a.npy")
    objects = _npy(np.array([{"a": 1}], dtype=object), tmp_path / "b.npy")
    huge = good.replace(b"(4,)", b"(9999999999,)").replace(b" " * 10 + b"\n", b"\n", 1)
    cases = {
        "object": {"x.npy": objects},
        "huge-header": {"x.npy": huge},
        "short": {"x.npy": good[:-1]},
        "long": {"x.npy": good + b"\0"},
        "no-magic": {"x.npy": b"hello"},
        "not-npy": {"x.txt": b"hello"},
        "text-dtype": {"x.npy": _npy(np.array(["a"]), tmp_path / "c.npy")},
        "empty": {"x.npy": b""},
        "nul-header": {"x.npy": good.replace(b"descr", b"\0escr")},
        "code-header": {"x.npy": good.replace(b"'<f8'", b"f(1) ")},
        "negative": {"x.npy": good.replace(b"(4,)", b"-4, ")},
        "two-negatives": {"x.npy": good.replace(b"(4,) ", b"(-2,-2)").replace(b"  \n", b"\n")},
        "bool-dim": {"x.npy": good.replace(b"(4,), ", b"(True,), ").replace(b"   \n", b"\n")},
        "structured": {"x.npy": _npy(np.zeros(2, dtype=[("a", "i4")]), tmp_path / "d.npy")},
        "dates": {"x.npy": _npy(np.zeros(2, dtype="M8[s]"), tmp_path / "e.npy")},
    }
    for name, entries in cases.items():
        with pytest.raises(BundleError, match=rf"{name}\.npz"):
            read_golden(_npz(tmp_path / f"{name}.npz", entries))
    with pytest.raises(BundleError, match="allowed"):
        read_golden(_npz(tmp_path / "big.npz", {"x.npy": good}), max_bytes=100)


@given(
    hnp.arrays(
        dtype=hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes(sizes=(16, 32, 64), endianness="?"),
        shape=hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    ),
    st.booleans(),
)
def test_golden_arrays_are_read_as_numpy_wrote_them(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, fortran: bool
) -> None:
    path = tmp_path_factory.mktemp("golden") / "g.npz"
    np.savez(path, x=np.array(array, order="F" if fortran else "C"))
    found = read_golden(path)["x"]
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


@given(st.binary(max_size=60), st.integers(0, 130))
def test_any_damage_to_golden_samples_is_a_bundle_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, start: int
) -> None:
    root = tmp_path_factory.mktemp("golden")
    np.save(root / "x.npy", np.arange(6.0).reshape(2, 3))
    data = bytearray((root / "x.npy").read_bytes())
    data[start : start + len(noise)] = noise
    with contextlib.suppress(BundleError):
        read_golden(_npz(root / "g.npz", {"x.npy": bytes(data)}))


def test_broken_golden_samples_are_a_problem(bundle: Path) -> None:
    (bundle / "golden.npz").write_bytes(b"not an archive")
    relist(bundle, "golden.npz")
    assert [problem.file for problem in verify_bundle(bundle)] == ["golden.npz"]
    with open_bundle(bundle) as opened, pytest.raises(BundleError, match="golden"):
        opened.golden()


def test_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path, monkeypatch):
    """SIGKILL leaves an unpacked zip behind; live ones, foreign files and links stay."""
    from edgeds.bundle import temporary

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal, tempfile, sys; tempfile.tempdir = sys.argv[1]\n"
        "from edgeds.bundle.temporary import TemporaryFolder\n"
        "kept = TemporaryFolder(); (kept.root / 'big').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    left = next(tmp_path.glob("edgeds-bundle-*"))
    assert (left / "content" / "big").exists()
    (tmp_path / "edgeds-bundle-link").symlink_to(tmp_path)
    (tmp_path / "edgeds-bundle-file").write_text("")
    first = temporary.TemporaryFolder()
    second = temporary.TemporaryFolder()
    assert not left.exists()
    assert first.root.is_dir()
    first._pid += 1  # as in a forked child
    first.remove()
    assert first.root.is_dir()
    first._pid -= 1
    first.remove()
    second.remove()
    second.remove()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["edgeds-bundle-file", "edgeds-bundle-link"]
