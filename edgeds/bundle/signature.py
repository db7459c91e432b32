"""Who made a bundle: an Ed25519 signature over its manifest, which holds the checksum of every file.

``bundle.json.sig`` stands beside ``bundle.json`` and is the only file that the manifest does not list. A signature that
does not fit is refused wherever a bundle is opened. Which keys are trusted, and whether an unsigned bundle is refused,
is the device's to say: arguments, environment, or the user's folder of trusted keys.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeds.bundle.keys import fits, has_crypto, key_id, raw_public, read_private, read_public
from edgeds.bundle.manifest import MANIFEST_NAME, MAX_SIGNATURE_BYTES, SIGNATURE_NAME
from edgeds.errors import BundleError, MissingDependency, SpecError
from edgeds.files import open_regular, parse_json, real_path, write_json
from edgeds.specs import from_json, to_json

KEYS_VARIABLE = "EDGEDS_TRUSTED_KEYS"
REQUIRE_VARIABLE = "EDGEDS_REQUIRE_SIGNATURE"
_PURPOSE = b"edgeds bundle manifest 1\n"
"""Stands before the signed bytes, so that a signature made for another purpose never fits a bundle."""

Status = Literal["signed", "unsigned", "untrusted", "unchecked", "wrong"]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What ``bundle.json.sig`` holds; key and signature in base64."""

    schema: int = 1
    algorithm: str = "ed25519"
    key_id: str
    public_key: str
    signature: str


@dataclass(frozen=True, kw_only=True)
class SignatureState:
    """What became of a check. ``signed``: by a trusted key; ``untrusted``: it fits, by a key that nobody here trusts;
    ``unchecked``: the package cryptography is missing; ``wrong``: it does not fit the manifest or cannot be read."""

    status: Status
    message: str
    key_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Public keys (32 bytes by file) that this user trusts, and whether a bundle must be signed by one of them."""

    keys: Mapping[str, bytes]
    required: bool


def sign_bundle(path: str | Path, *, key: str | Path) -> Signature:
    """Sign a bundle folder with the private key in the file ``key``; an older signature is replaced.

    The whole bundle is checked first. Raises BundleError when it is not sound, SpecError for the key.
    """
    from edgeds.bundle.check import compare_files
    from edgeds.bundle.manifest import read_manifest

    folder = Path(path)
    if not folder.is_dir():
        raise BundleError(f"{folder}: not a bundle folder; unzip it, sign the folder and zip that")
    private = read_private(Path(key))
    root = real_path(folder)
    for problem in compare_files(root, read_manifest(root), quiet=True):
        raise BundleError(f"{folder}: {problem}; not signed")
    raw = raw_public(private.public_key())
    made = private.sign(_PURPOSE + _manifest_bytes(root))
    signature = Signature(
        key_id=key_id(raw),
        public_key=base64.b64encode(raw).decode("ascii"),
        signature=base64.b64encode(made).decode("ascii"),
    )
    try:
        write_json(root / SIGNATURE_NAME, to_json(signature))
    except OSError as error:
        raise BundleError(f"{folder}: the signature cannot be written: {error.strerror or error}") from error
    return signature


def find_trust(extra: Iterable[str | Path] = (), *, required: bool | None = None) -> Trust:
    """The keys of ``extra``, of ``$EDGEDS_TRUSTED_KEYS`` (files, separated as in PATH) and of the user's folder
    ``edgeds/trusted/*.pub`` under ``$XDG_CONFIG_HOME`` or ``~/.config``.

    ``required`` None takes ``$EDGEDS_REQUIRE_SIGNATURE`` (1 or 0). Raises SpecError for keys that cannot be read.
    """
    if required is None:
        text = os.environ.get(REQUIRE_VARIABLE, "")
        if text not in ("", "0", "1"):
            raise SpecError(f"{REQUIRE_VARIABLE} is {text!r}; set it to 1 or 0")
        required = text == "1"
    named = [str(path) for path in extra]
    named += [part for part in os.environ.get(KEYS_VARIABLE, "").split(os.pathsep) if part]
    configured = [str(path) for path in _trusted_folder_keys()]
    if configured and (named or required or has_crypto()):  # without the package, bundles that need no key still open
        named += configured
    return Trust(keys={path: read_public(Path(path)) for path in dict.fromkeys(named)}, required=required)


def check_signature(root: Path, *, trust: Trust) -> SignatureState:
    """Compare the signature of the bundle folder ``root`` with its manifest and with the trusted keys. Never raises
    for what the bundle holds; ``state_error`` says what is to be refused."""
    path = root / SIGNATURE_NAME
    if not os.path.lexists(path):
        return SignatureState(status="unsigned", message="the bundle is not signed")
    try:
        signature, raw, made = _read_signature(path)
        message = _PURPOSE + _manifest_bytes(root)
    except (BundleError, SpecError, OSError) as error:
        return SignatureState(status="wrong", message=str(error).removeprefix(f"{path}: "))
    if not has_crypto():
        missing = MissingDependency("cryptography", extra="sign", purpose="checking the signature")
        return SignatureState(status="unchecked", message=str(missing), key_id=signature.key_id)
    identity = key_id(raw)
    if signature.key_id != identity or not fits(raw, made, message):
        what = f"the signature by key {identity} does not fit {MANIFEST_NAME}: it was changed after signing"
        return SignatureState(status="wrong", message=what, key_id=identity)
    for name, trusted in trust.keys.items():
        if trusted == raw:
            return SignatureState(status="signed", message=f"signed by key {identity} ({name})", key_id=identity)
    what = f"signed by key {identity}, which is not among the {len(trust.keys)} trusted here"
    return SignatureState(status="untrusted", message=what, key_id=identity)


def refuse_signature(state: SignatureState, *, trust: Trust, where: str | Path) -> None:
    """Raise BundleError when a bundle in this state may not be used: a wrong signature never, others when required."""
    if state.status == "wrong":
        raise BundleError(f"{where}: {SIGNATURE_NAME}: {state.message}; get the bundle again from who made it")
    if trust.required and state.status != "signed":
        advice = "sign it with 'edgeds bundle sign', or trust its key with --trust KEY.pub"
        raise BundleError(f"{where}: {state.message}, and a signature by a trusted key is required; {advice}")


def _read_signature(path: Path) -> tuple[Signature, bytes, bytes]:
    """(the file, 32 bytes of the public key, 64 bytes of the signature)."""
    if path.is_symlink():
        raise BundleError("is a link; it must be a file of the bundle")
    with open_regular(path) as stream:
        data = stream.read(MAX_SIGNATURE_BYTES + 1)
    if len(data) > MAX_SIGNATURE_BYTES:
        raise BundleError("is too large for a signature")
    signature = from_json(Signature, parse_json(data, where=str(path)), where=str(path))
    if signature.schema != 1 or signature.algorithm != "ed25519":
        raise BundleError(f"schema {signature.schema}, {signature.algorithm!r}: this edgeds reads schema 1, 'ed25519'")
    try:
        raw = base64.b64decode(signature.public_key, validate=True)
        made = base64.b64decode(signature.signature, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BundleError("key or signature is not base64") from error
    if len(raw) != 32 or len(made) != 64:
        raise BundleError("key or signature has the wrong length")
    return signature, raw, made


def _manifest_bytes(root: Path) -> bytes:
    with open_regular(root / MANIFEST_NAME) as stream:
        return stream.read()


def _trusted_folder_keys() -> list[Path]:
    base = os.environ.get("XDG_CONFIG_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".config") / "edgeds" / "trusted"
    except RuntimeError:  # no home directory: no such folder
        return []
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".pub")
    except OSError:
        return []
