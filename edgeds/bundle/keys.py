"""Ed25519 keys as PEM files: a private one that signs bundles, a public one that devices trust (RFC 8032, RFC 8410)."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.errors import MissingDependency, SpecError
from edgeds.files import open_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PASSPHRASE_VARIABLE = "EDGEDS_KEY_PASSPHRASE"
MAX_KEY_BYTES = 16 << 10


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """Where the two files of a new key are, and its id."""

    private: Path
    public: Path
    key_id: str


def make_keys(out: str | Path) -> KeyPair:
    """Write a new private key to ``out`` (readable by its owner alone) and the public one to ``out`` + ``.pub``.

    ``$EDGEDS_KEY_PASSPHRASE`` encrypts the private key. Raises SpecError when one of the files exists or cannot be
    written, MissingDependency without the package cryptography.
    """
    serialization, ed25519 = _crypto()
    private, public = Path(out), Path(f"{out}.pub")
    for path in (private, public):
        if path.exists() or path.is_symlink():
            raise SpecError(f"{path}: exists already, and a key is never overwritten; choose another name")
    key = ed25519.Ed25519PrivateKey.generate()
    passphrase = _passphrase()
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption(),
    )
    shared = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    written: list[Path] = []
    with contextlib.ExitStack() as on_failure:  # no half pair
        on_failure.callback(_remove, written)
        for path, text, mode in ((private, secret, 0o600), (public, shared, 0o644)):
            _write_new(path, text, mode=mode, written=written)
        on_failure.pop_all()
    return KeyPair(private=private, public=public, key_id=key_id(raw_public(key.public_key())))


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _write_new(path: Path, text: bytes, *, mode: int, written: list[Path]) -> None:
    """Write a file that must not exist yet; the mode holds from its first byte on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        written.append(path)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(text)
    except OSError as error:
        raise SpecError(f"{path}: cannot be written to: {error.strerror or error}") from error


def read_private(path: Path) -> Ed25519PrivateKey:
    """A private key from PEM. Raises SpecError that says what else the file is; never shows any of it."""
    serialization, ed25519 = _crypto()
    data = _read(path)
    if b"PUBLIC KEY" in data:
        raise SpecError(f"{path}: is a public key; sign with the private one (the file without .pub)")
    passphrase = _passphrase()
    encrypted = b"ENCRYPTED" in data
    if encrypted and passphrase is None:
        raise SpecError(f"{path}: is encrypted; set {PASSPHRASE_VARIABLE} to its passphrase")
    try:
        key = serialization.load_pem_private_key(data, password=passphrase if encrypted else None)
    except (ValueError, TypeError, _unsupported()) as error:
        what = "cannot be decrypted with that passphrase" if encrypted else "is not a private key in PEM form"
        raise SpecError(f"{path}: {what}; make one with: edgeds bundle keygen FILE") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise SpecError(f"{path}: is another kind of key, bundles are signed with Ed25519; see: edgeds bundle keygen")
    return key


def read_public(path: Path) -> bytes:
    """The 32 bytes of a public key in PEM. Raises SpecError that says what else the file is."""
    serialization, ed25519 = _crypto()
    data = _read(path)
    if b"PRIVATE KEY" in data:
        raise SpecError(f"{path}: is a private key, which does not belong here; give the .pub file beside it")
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, _unsupported()) as error:
        raise SpecError(f"{path}: is not a public key in PEM form") from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise SpecError(f"{path}: is another kind of key, bundles are signed with Ed25519")
    return raw_public(key)


def raw_public(key: Ed25519PublicKey) -> bytes:
    """The 32 bytes of a public key."""
    return key.public_bytes_raw()


def key_id(raw: bytes) -> str:
    """Sixteen hexadecimal digits that name a public key: the start of the SHA-256 of its 32 bytes."""
    return hashlib.sha256(raw).hexdigest()[:16]


def fits(raw: bytes, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` over ``message`` was made with the key whose public half is ``raw``."""
    from cryptography.exceptions import InvalidSignature

    _, ed25519 = _crypto()
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(raw).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def has_crypto() -> bool:
    """Whether signatures can be made and checked here."""
    try:
        _crypto()
    except MissingDependency:
        return False
    return True


def _crypto() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependency("cryptography", extra="sign", purpose="a signature", cause=error) from error
    return serialization, ed25519


def _unsupported() -> type[Exception]:
    from cryptography.exceptions import UnsupportedAlgorithm

    return UnsupportedAlgorithm


def _passphrase() -> bytes | None:
    return os.environ.get(PASSPHRASE_VARIABLE, "").encode("utf-8", "surrogateescape") or None


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{path}: the key cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_KEY_BYTES:
        raise SpecError(f"{path}: is too large for a key")
    return data
