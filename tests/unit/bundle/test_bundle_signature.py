"""Signed bundles: who made it is checked wherever a bundle is opened, and a signature that does not fit is refused."""

import base64
import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeds.bundle import Manifest, open_bundle, unzip_bundle, verify_bundle, write_bundle, zip_bundle
from edgeds.bundle import keys as keys_module
from edgeds.bundle.keys import PASSPHRASE_VARIABLE, key_id, make_keys, read_private, read_public
from edgeds.bundle.signature import Trust, check_signature, find_trust, sign_bundle
from edgeds.cli.main import main
from edgeds.errors import BundleError, MissingDependency, SpecError
from edgeds.specs import TensorSpec

SIGNATURE = "bundle.json.sig"


@pytest.fixture(autouse=True)
def _no_keys_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("EDGEDS_TRUSTED_KEYS", "EDGEDS_REQUIRE_SIGNATURE", PASSPHRASE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def write(folder: Path, *, task: str = "other") -> Path:
    spec = (TensorSpec(name="x", dtype="float32", shape=(2,)),)
    manifest = Manifest(
        task=task, models={"float": "model.onnx"}, inputs=spec, outputs=spec, precision="float", license="Apache-2.0"
    )
    return write_bundle(folder, files={"model.onnx": b"weights"}, manifest=manifest)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "b")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "team.key").private


def public(key: Path) -> Path:
    return Path(f"{key}.pub")


def trusting(*paths: Path, required: bool = True) -> Trust:
    return Trust(keys={str(path): read_public(path) for path in paths}, required=required)


def test_a_signed_bundle_opens_where_its_key_is_trusted(bundle: Path, key: Path) -> None:
    made = sign_bundle(bundle, key=key)
    with open_bundle(bundle, trust=trusting(public(key))) as opened:
        assert opened.signature.status == "signed"
        assert opened.signature.key_id == made.key_id == key_id(read_public(public(key)))
    assert verify_bundle(bundle, trust=trusting(public(key))) == []


def test_the_signature_is_plain_ed25519_over_the_manifest(bundle: Path, key: Path) -> None:
    """Checked without our code, so that another tool can: RFC 8032 over a purpose line and the bytes of bundle.json."""
    sign_bundle(bundle, key=key)
    stored = json.loads((bundle / SIGNATURE).read_text())
    loaded = serialization.load_pem_public_key(public(key).read_bytes())
    assert isinstance(loaded, ed25519.Ed25519PublicKey)
    message = b"edgeds bundle manifest 1\n" + (bundle / "bundle.json").read_bytes()
    loaded.verify(base64.b64decode(stored["signature"]), message)


def test_unsigned_and_foreign_bundles_are_refused_only_when_asked(bundle: Path, key: Path, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other.key").public
    with open_bundle(bundle) as opened:
        assert opened.signature.status == "unsigned"
    with pytest.raises(BundleError, match="not signed, and a signature"):
        open_bundle(bundle, trust=trusting(other))
    sign_bundle(bundle, key=key)
    with open_bundle(bundle) as opened:
        assert opened.signature.status == "untrusted"
    with pytest.raises(BundleError, match="not among the 1 trusted"):
        open_bundle(bundle, trust=trusting(other))
    assert [problem.file for problem in verify_bundle(bundle, trust=trusting(other))] == [SIGNATURE]


def test_a_manifest_changed_after_signing_is_refused_by_everyone(bundle: Path, key: Path) -> None:
    sign_bundle(bundle, key=key)
    path = bundle / "bundle.json"
    path.write_text(path.read_text().replace('"other"', '"others"'))
    for trust in (None, trusting(public(key)), trusting(required=False)):
        with pytest.raises(BundleError, match="changed after signing"):
            open_bundle(bundle, trust=trust)
    assert any("changed after signing" in str(problem) for problem in verify_bundle(bundle))


def test_a_signature_of_another_bundle_does_not_fit(bundle: Path, key: Path, tmp_path: Path) -> None:
    second = write(tmp_path / "second", task="another")
    sign_bundle(second, key=key)
    (bundle / SIGNATURE).write_bytes((second / SIGNATURE).read_bytes())
    with pytest.raises(BundleError, match="does not fit"):
        open_bundle(bundle)


def _changed(**changes: Any) -> Any:
    return lambda text: json.dumps({**json.loads(text), **changes}).encode()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: b"", "JSON|empty|expected"),
        (lambda text: text[: len(text) // 2], "JSON"),
        (lambda text: b"\xff\xfe", "JSON|UTF-8"),
        (lambda text: b"[]", "expected"),
        (lambda text: b" " * 5000, "too large"),
        (_changed(schema=2), "schema 2"),
        (_changed(algorithm="rsa"), "rsa"),
        (_changed(extra=1), "unknown key"),
        (_changed(signature="!"), "base64"),
        (_changed(signature="AAAA"), "length"),
        (_changed(signature=base64.b64encode(bytes(64)).decode()), "does not fit"),
        (_changed(public_key=base64.b64encode(bytes(32)).decode()), "does not fit"),
        (_changed(key_id="0" * 16), "does not fit"),
    ],
)
def test_damaged_signatures_are_refused(bundle: Path, key: Path, damage: Any, says: str) -> None:
    sign_bundle(bundle, key=key)
    path = bundle / SIGNATURE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BundleError, match=says) as caught:
        open_bundle(bundle)
    assert SIGNATURE in str(caught.value)


def test_links_pipes_and_folders_are_no_signatures(bundle: Path, key: Path, tmp_path: Path) -> None:
    sign_bundle(bundle, key=key)
    path = bundle / SIGNATURE
    path.rename(tmp_path / "elsewhere.sig")
    path.symlink_to(tmp_path / "elsewhere.sig")
    with pytest.raises(BundleError, match="is a link"):
        open_bundle(bundle)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BundleError, match=SIGNATURE):
        open_bundle(bundle)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_of_a_signed_bundle_passes(bundle: Path, key: Path, position: int, bit: int) -> None:
    """Whatever bit of manifest, signature or model changes, the bundle does not open as signed by that key."""
    sign_bundle(bundle, key=key)
    files = [bundle / name for name in ("bundle.json", SIGNATURE, "model.onnx")]
    sizes = [path.stat().st_size for path in files]
    position %= sum(sizes)
    path = files[0]
    for candidate, size in zip(files, sizes, strict=True):
        path = candidate
        if position < size:
            break
        position -= size
    before = path.read_bytes()
    path.write_bytes(before[:position] + bytes([before[position] ^ 1 << bit]) + before[position + 1 :])
    try:
        try:
            with open_bundle(bundle, trust=trusting(public(key))):
                # JSON between the values and unused bits at the end of base64 carry nothing.
                assert path.name == SIGNATURE
                assert json.loads(path.read_bytes()).keys() == json.loads(before).keys()
        except BundleError:
            pass
    finally:
        path.write_bytes(before)


def test_zip_and_unzip_keep_the_signature(bundle: Path, key: Path, tmp_path: Path) -> None:
    sign_bundle(bundle, key=key)
    archive = zip_bundle(bundle, tmp_path / "b.zip")
    with open_bundle(archive, trust=trusting(public(key))) as opened:
        assert opened.signature.status == "signed"
    folder = unzip_bundle(archive, tmp_path / "out")
    assert check_signature(folder, trust=trusting(public(key))).status == "signed"


def test_a_zip_with_a_wrong_signature_leaves_nothing(bundle: Path, key: Path, tmp_path: Path) -> None:
    archive = zip_bundle(bundle, tmp_path / "plain.zip")
    with zipfile.ZipFile(archive, "a") as packed:
        packed.writestr(SIGNATURE, "{}")
    with pytest.raises(BundleError, match=SIGNATURE):
        unzip_bundle(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert verify_bundle(archive)


def test_engines_built_later_do_not_break_it(bundle: Path, key: Path) -> None:
    sign_bundle(bundle, key=key)
    (bundle / "engines" / "abc").mkdir(parents=True)
    (bundle / "engines" / "abc" / "model.plan").write_bytes(b"plan")
    with open_bundle(bundle, trust=trusting(public(key))) as opened:
        assert opened.signature.status == "signed"


def test_a_damaged_bundle_is_not_signed(bundle: Path, key: Path) -> None:
    (bundle / "model.onnx").write_bytes(b"changed")
    with pytest.raises(BundleError, match="not signed"):
        sign_bundle(bundle, key=key)
    assert not (bundle / SIGNATURE).exists()


def test_private_keys_are_for_their_owner_and_never_overwritten(key: Path) -> None:
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    for path in (key, public(key)):
        with pytest.raises(SpecError, match="never overwritten"):
            make_keys(key)
        path.unlink()


def test_a_passphrase_encrypts_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "long and secret")
    made = make_keys(tmp_path / "k")
    assert b"ENCRYPTED" in made.private.read_bytes()
    read_private(made.private)
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "wrong")
    with pytest.raises(SpecError, match="decrypted"):
        read_private(made.private)
    monkeypatch.delenv(PASSPHRASE_VARIABLE)
    with pytest.raises(SpecError, match=PASSPHRASE_VARIABLE):
        read_private(made.private)


def test_other_files_are_no_keys(tmp_path: Path, key: Path) -> None:
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    (tmp_path / "rsa").write_bytes(other.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    shared = other.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "rsa.pub").write_bytes(shared)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "big").write_bytes(b"x" * 20_000)
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (tmp_path / "rsa", "another kind"),
        (public(key), "is a public key"),
        (tmp_path / "text", "not a private key"),
        (tmp_path / "big", "too large"),
        (tmp_path / "pipe", "cannot be read"),
        (tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(SpecError, match=says):
            read_private(path)
    for path, says in ((tmp_path / "rsa.pub", "another kind"), (key, "is a private key"), (tmp_path / "text", "not a")):
        with pytest.raises(SpecError, match=says):
            read_public(path)


def test_trusted_keys_come_from_arguments_environment_and_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [make_keys(tmp_path / name).public for name in "abc"]
    folder = tmp_path / "config" / "edgeds" / "trusted"
    folder.mkdir(parents=True)
    made[2].rename(folder / "c.pub")
    (folder / "notes.txt").write_text("not a key")
    monkeypatch.setenv("EDGEDS_TRUSTED_KEYS", f"{made[1]}{os.pathsep}")
    monkeypatch.setenv("EDGEDS_REQUIRE_SIGNATURE", "1")
    trust = find_trust([made[0]])
    assert set(trust.keys) == {str(made[0]), str(made[1]), str(folder / "c.pub")}
    assert trust.required
    monkeypatch.setenv("EDGEDS_REQUIRE_SIGNATURE", "yes")
    with pytest.raises(SpecError, match="1 or 0"):
        find_trust()


def test_without_cryptography_it_says_so(bundle: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign_bundle(bundle, key=key)
    trust = trusting(public(key))

    def missing() -> Any:
        raise MissingDependency("cryptography", extra="sign", purpose="a signature")

    monkeypatch.setattr(keys_module, "_crypto", missing)
    with open_bundle(bundle) as opened:
        assert opened.signature.status == "unchecked"
    with pytest.raises(BundleError, match=r"edgeds\[sign\]"):
        open_bundle(bundle, trust=trust)


def test_the_commands(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, other = tmp_path / "k", tmp_path / "o"
    assert main(["bundle", "keygen", str(key), "--json"]) == 0
    identity = json.loads(capsys.readouterr().out)["key_id"]
    assert main(["bundle", "keygen", str(other)]) == 0
    assert main(["bundle", "sign", str(bundle), "--key", str(key), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("\n", 2)[-1])["key_id"] == identity
    assert main(["bundle", "verify", str(bundle), "--trust", f"{key}.pub"]) == 0
    assert main(["bundle", "verify", str(bundle), "--trust", f"{other}.pub"]) == 1
    assert main(["bundle", "verify", str(bundle)]) == 0  # the option before did not stay in the environment
    capsys.readouterr()
    assert main(["bundle", "show", str(bundle), "--json", "--trust", f"{key}.pub"]) == 0
    assert json.loads(capsys.readouterr().out)["signature"]["status"] == "signed"
    assert main(["bundle", "show", str(bundle), "--require-signature"]) == 1
    assert main(["bundle", "verify", str(bundle), "--trust", str(tmp_path / "none.pub")]) == 2
    assert main(["bundle", "sign", str(bundle), "--key", f"{key}.pub"]) == 2
    printed = capsys.readouterr()
    assert "PRIVATE" not in printed.out + printed.err


@pytest.mark.parametrize("verb", ["run", "eval", "bench", "build", "push"])
def test_every_verb_that_uses_bundles_takes_the_option(
    verb: str, bundle: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (key.parent / "x.jpg").write_bytes(b"")
    rest = {"run": [str(key.parent / "x.jpg")], "eval": ["--data", str(bundle)], "push": ["nobody@127.0.0.1"]}.get(
        verb, []
    )
    assert main([verb, str(bundle), *rest, "--trust", str(public(key))]) == 1
    assert "not signed" in capsys.readouterr().err
