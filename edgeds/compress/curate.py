"""Calibration sets as reviewable text: definitions of what is in a set, and collecting frames without near-duplicates.

Neighbouring video frames are nearly equal; calibrating on hundreds of them weighs one scene. A frame is kept when its
difference hash (dHash: 64 signs of horizontal brightness differences on a 9x8 thumbnail; N. Krawetz, "Kind of Like
That", hackerfactor.com, 2013) is at least ``min_difference`` bits away from that of every frame kept before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgeds.compress.calibread import spread
from edgeds.errors import CalibrationError, SpecError
from edgeds.files import atomic_dir, read_json, write_json
from edgeds.imagefile import IMAGE_SUFFIXES, import_cv2, to_bgr
from edgeds.preproc import ImagePreprocess
from edgeds.specs import Resolution, from_json, to_json

HASH_BITS = 64


@dataclass(frozen=True, kw_only=True)
class SetDefinition:
    """What is in a calibration set, without the data: which images below a folder, and how they are prepared."""

    name: str
    source: str
    license: str
    folder: str
    """Where the images lie below the data folder given at run time; empty for the data folder itself."""
    images: int
    """How many are taken, evenly spaced over the sorted names; the folder must hold at least that many."""
    size: Resolution
    preprocess: ImagePreprocess
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class CollectReport:
    """Frames read, kept, dropped as near-duplicates, and unreadable; SHA-256 over the kept files in name order."""

    read: int
    kept: int
    near_duplicates: int
    unreadable: int
    min_difference: int
    digest: str
    files: tuple[str, ...]


class FrameLike(Protocol):
    """What ``pipelines.sources.open_sources`` yields, as far as it matters here."""

    @property
    def index(self) -> int: ...

    @property
    def image_bgr(self) -> Any: ...


def load_set(path: Path) -> SetDefinition:
    """Read a definition; SpecError names the file and key of anything wrong."""
    data = read_json(path)
    try:
        found = from_json(SetDefinition, data, where=str(path))
    except SpecError as error:  # value types do not know the file they come from
        raise SpecError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    if found.images < 1:
        raise SpecError(f"{path}: images {found.images}: must be at least 1")
    if Path(found.folder).is_absolute() or ".." in Path(found.folder).parts:
        raise SpecError(f"{path}: folder {found.folder!r}: must lie below the data folder")
    return found


def select_images(definition: SetDefinition, data: Path) -> list[Path]:
    """The files of a set below ``data``; CalibrationError when there are too few."""
    folder = data / definition.folder
    if not folder.is_dir():
        raise CalibrationError(f"{folder}: no such folder; set '{definition.name}' is {definition.source}")
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.name[0] != ".")
    if len(found) < definition.images:
        raise CalibrationError(f"{folder}: {len(found)} images, set '{definition.name}' takes {definition.images}")
    return spread(found, definition.images)


def difference_hash(image: Any) -> int:
    """64-bit dHash of an image (anything ``to_bgr`` takes)."""
    cv2 = import_cv2("comparing frames")
    gray = cv2.cvtColor(to_bgr(image), cv2.COLOR_BGR2GRAY)
    small = cv2.resize(gray, (9, 8), interpolation=cv2.INTER_AREA).astype(np.int16)
    return int.from_bytes(np.packbits(small[:, 1:] > small[:, :-1]).tobytes(), "big")


def collect_images(
    frames: Iterable[FrameLike], out: Path, *, limit: int | None = None, every: int = 1, min_difference: int = 6
) -> CollectReport:
    """Write the frames that differ from all kept ones as PNG files named by content, and ``set.json`` with the counts.

    ``every`` looks at each n-th frame of a source only; ``limit`` stops after that many kept. ``out`` appears as a
    whole or not at all, and must not exist or be empty. Raises CalibrationError when nothing was kept.
    """
    if not 0 <= min_difference <= HASH_BITS:
        raise SpecError(f"min_difference {min_difference}: must be 0 to {HASH_BITS} bits")
    if every < 1 or (limit is not None and limit < 1):
        raise SpecError(f"every {every}, max {limit}: must be at least 1")
    cv2 = import_cv2("writing frames")
    hashes: list[int] = []
    names: dict[str, str] = {}
    read = near = unreadable = 0
    with atomic_dir(out) as folder:
        for frame in frames:
            if frame.index % every:
                continue
            if frame.image_bgr is None:
                unreadable += 1
                continue
            read += 1
            code = difference_hash(frame.image_bgr)
            if any((code ^ known).bit_count() < min_difference for known in hashes):
                near += 1
                continue
            data = cv2.imencode(".png", frame.image_bgr)[1].tobytes()
            digest = hashlib.sha256(data).hexdigest()
            if digest in names:  # equal frames, with min_difference 0
                near += 1
                continue
            hashes.append(code)
            names[digest] = f"{digest[:16]}.png"
            (folder / names[digest]).write_bytes(data)
            if len(names) == limit:
                break
        if not names:
            raise CalibrationError(f"no frame was kept ({read} read, {unreadable} unreadable); give other sources")
        report = CollectReport(
            read=read,
            kept=len(names),
            near_duplicates=near,
            unreadable=unreadable,
            min_difference=min_difference,
            digest=hashlib.sha256("".join(sorted(names)).encode()).hexdigest(),
            files=tuple(sorted(names.values())),
        )
        write_json(folder / "set.json", to_json(report))
    return report
