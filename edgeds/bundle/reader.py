"""Open a bundle: nothing is handed out before all of it has been checked."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from edgeds.bundle.archive import MAX_BUNDLE_BYTES, unpack_checked
from edgeds.bundle.check import check_preprocess, compare_files
from edgeds.bundle.golden import read_golden
from edgeds.bundle.manifest import GOLDEN_NAME, MANIFEST_NAME, Manifest, read_manifest
from edgeds.bundle.signature import SignatureState, Trust, check_signature, find_trust, refuse_signature
from edgeds.bundle.temporary import TemporaryFolder
from edgeds.errors import BundleError, SpecError
from edgeds.files import real_path

if TYPE_CHECKING:
    from edgeds.preproc import ImagePreprocess


class Bundle:
    """A checked bundle on disk. A context manager; ``close()`` removes what a zip was unpacked to."""

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        *,
        signature: SignatureState | None = None,
        unpacked: TemporaryFolder | None = None,
        source: Path | None = None,
    ) -> None:
        self.root = root
        self.signature = signature or SignatureState(status="unchecked", message="the signature was not looked at")
        self.manifest = manifest
        self.source = source or root
        self._closed = False
        # A forgotten bundle still removes its temporary folder, when it is collected or at exit.
        self._cleanup = weakref.finalize(self, unpacked.remove) if unpacked is not None else None

    def path(self, name: str) -> Path:
        """Absolute path of a listed file. Raises BundleError for a name the manifest does not list."""
        if self._closed:
            raise BundleError(f"{self.source}: the bundle is closed")
        if name != MANIFEST_NAME and name not in self.manifest.files:
            raise BundleError(
                f"{self.source}: holds no file {name!r}; it holds {', '.join(sorted(self.manifest.files))}"
            )
        return self.root / name

    def model_path(self, variant: str) -> Path:
        """Path of one model variant (``int8``, ``cpu_int8``, ``float``). Raises BundleError when it is not there."""
        if variant not in self.manifest.models:
            have = ", ".join(sorted(self.manifest.models))
            raise BundleError(f"{self.source}: holds no model variant {variant!r}; it holds {have}")
        return self.path(self.manifest.models[variant])

    def has_golden(self) -> bool:
        """Whether the bundle carries golden samples."""
        return GOLDEN_NAME in self.manifest.files

    def golden(self) -> dict[str, np.ndarray]:
        """Golden inputs and reference outputs by name; the caller owns the arrays. Nothing is ever unpickled."""
        return read_golden(self.path(GOLDEN_NAME))

    def preprocess(self) -> ImagePreprocess:
        """The preprocessing this bundle was calibrated with.

        Raises EngineMismatch when its digest is not the one of the calibration, BundleError when there is none.
        """
        from edgeds.preproc import ImagePreprocess
        from edgeds.specs import from_json

        if self.manifest.preprocess is None:
            raise BundleError(f"{self.source}: the manifest states no image preprocessing, task {self.manifest.task!r}")
        try:
            check_preprocess(self.manifest)
            return from_json(ImagePreprocess, self.manifest.preprocess, where="preprocess")
        except SpecError as error:
            raise BundleError(f"{self.source}: {error}") from error

    def close(self) -> None:
        """Give up the bundle; removes the temporary folder of a zip. Calling it twice is fine."""
        self._closed = True
        if self._cleanup is not None:
            self._cleanup()

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Bundle({str(self.source)!r}, task={self.manifest.task!r}, files={len(self.manifest.files)})"


def open_bundle(
    path: Path | str, *, quiet: bool = True, max_bytes: int = MAX_BUNDLE_BYTES, trust: Trust | None = None
) -> Bundle:
    """Open a bundle folder or zip and check all of it: manifest, sizes, checksums, no unlisted file, no link outside,
    and its signature, where it has one (``.signature`` says what came of it).

    A zip is unpacked to a temporary folder first, to at most ``max_bytes``. Content of ``engines/`` is not covered by
    the checksums and is ignored. ``trust`` says which keys are trusted and whether a signature is required (None:
    ``find_trust()``, the environment and the user's folder). Raises BundleError naming the first file that is wrong.
    """
    path = Path(path)
    trust = trust or find_trust()
    if not path.exists():
        raise BundleError(f"{path}: no such file or folder; give a bundle folder or its .zip")
    if path.is_dir():
        return _open_folder(real_path(path), source=path, quiet=quiet, trust=trust)
    if not path.is_file():
        raise BundleError(f"{path}: neither a folder nor a regular file")
    unpacked = TemporaryFolder()
    with contextlib.ExitStack() as on_failure:  # also Ctrl-C must not leave gigabytes in the temporary folder
        on_failure.callback(unpacked.remove)
        unpack_checked(path, unpacked.root, max_bytes=max_bytes)
        bundle = _open_folder(unpacked.root, source=path, quiet=quiet, trust=trust, unpacked=unpacked)
        on_failure.pop_all()
    return bundle


def _open_folder(
    root: Path, *, source: Path, quiet: bool, trust: Trust, unpacked: TemporaryFolder | None = None
) -> Bundle:
    manifest = read_manifest(root)
    # Before the files: who may not be believed need not be hashed.
    signature = check_signature(root, trust=trust)
    refuse_signature(signature, trust=trust, where=source)
    for problem in compare_files(root, manifest, quiet=quiet):
        raise BundleError(f"{source}: {problem}")
    return Bundle(root, manifest, signature=signature, unpacked=unpacked, source=source)
