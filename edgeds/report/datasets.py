"""Labelled images for measuring detectors: YOLO folders and COCO json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeds.errors import SpecError
from edgeds.files import read_regular
from edgeds.imagefile import IMAGE_SUFFIXES
from edgeds.pipelines.yolo.metadata import parse_names
from edgeds.report.dataset_yaml import read_data_yaml
from edgeds.specs import Resolution

MAX_LABEL_BYTES = 16 << 20
EDGE_TOLERANCE = 0.01
"""How far outside 0..1 a normalised coordinate may lie: labelling tools round."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One image and its objects. ``boxes`` [n, 4] is xyxy, in shares of the image when ``normalised``, else pixels.

    ``crowd`` marks COCO crowd regions, ``area_px`` the COCO object area (None: that of the box).
    """

    path: Path
    cls: NDArray[np.int64]
    boxes: FloatArray
    normalised: bool = True
    crowd: NDArray[np.bool_] | None = None
    area_px: FloatArray | None = None

    def boxes_px(self, size: Resolution) -> FloatArray:
        """Boxes in pixels of the image as it was read (orientation applied)."""
        return self.boxes * ([size.width_px, size.height_px] * 2) if self.normalised else self.boxes


@dataclass(frozen=True, kw_only=True, eq=False)
class DetectionDataset:
    """Images in a fixed order. ``names`` is empty when the data set does not state them."""

    root: Path
    split: str | None
    samples: tuple[Sample, ...]
    names: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.samples)


def open_detection_dataset(
    root: str | Path,
    *,
    split: str | None = None,
    names: Mapping[int, str] | None = None,
    limit: int | None = None,
) -> DetectionDataset:
    """Open a YOLO folder (images/ and labels/, or a data .yaml) or a folder with COCO instances json (or the json).

    ``split`` picks train, val or test; without it val is taken where there are several. ``names`` are the model's
    classes: COCO categories are matched to them by name, and label numbers are checked against their count. ``limit``
    keeps the first images by name. A missing label file means no objects. Raises SpecError that names file and line.
    """
    root = Path(root)
    if not root.exists():
        raise SpecError(f"{root}: no such file or folder; pass a folder with images/ and labels/, or COCO json")
    if not root.is_dir() and not root.is_file():
        raise SpecError(f"{root}: is a pipe or device; pass a folder with images/ and labels/, or COCO json")
    if limit is not None and (isinstance(limit, bool) or limit < 1):
        raise SpecError(f"limit {limit!r}: must be at least 1")
    coco = _find_coco(root, split)
    if coco is not None:
        from edgeds.report.dataset_coco import open_coco

        return open_coco(coco, root if root.is_dir() else root.parent, split=split, names=names, limit=limit)
    folder, data = _find_yaml(root)
    stated = parse_names(data["names"], where=f"{root}: names") if data.get("names") else {}
    chosen, images = _yolo_images(folder, data, split)
    if not images:
        raise SpecError(f"{folder}: holds no images for split {chosen or 'val'!r}; expected images/ and labels/")
    count: Any = len(names) if names else len(stated) or data.get("nc") or None
    pose = "kpt_shape" in data
    samples = tuple(_yolo_sample(path, classes=count, pose=pose) for path in images[:limit])
    if not any(sample.cls.size for sample in samples):
        raise SpecError(f"{folder}: none of the {len(samples)} images has a label; are the labels beside images/?")
    return DetectionDataset(root=folder, split=chosen, samples=samples, names=stated)


def _find_coco(root: Path, split: str | None) -> Path | None:
    if root.is_file():
        return root if root.suffix.lower() == ".json" else None
    found = sorted([*root.glob("instances_*.json"), *root.glob("annotations/*.json"), *root.glob("_annotations*.json")])
    if not found:
        return None
    if len(found) == 1 and split is None:
        return found[0]
    wanted = split or "val"
    fitting = [path for path in found if wanted in path.stem]
    instances = [path for path in fitting if "instances" in path.stem] or fitting
    if len(instances) != 1:
        shown = ", ".join(path.name for path in found)
        raise SpecError(f"{root}: cannot tell which json is split {wanted!r} among {shown}; pass the file itself")
    return instances[0]


def _find_yaml(root: Path) -> tuple[Path, dict[str, Any]]:
    """The data set's folder and what its data file says ({} without one)."""
    if root.is_file():
        if root.suffix.lower() not in (".yaml", ".yml"):
            raise SpecError(f"{root}: expected a folder, a data .yaml or COCO json")
        data = read_data_yaml(root)
        base = root.parent / str(data.get("path") or ".")
        # Published files state the author's own path; the folder of the file is the next best guess.
        return (base if base.is_dir() else root.parent), data
    for path in sorted([*root.glob("*.yaml"), *root.glob("*.yml")]):
        data = read_data_yaml(path)
        if data.get("names") or data.get("val"):
            return root, data
    return root, {}


def _yolo_images(folder: Path, data: Mapping[str, Any], split: str | None) -> tuple[str | None, list[Path]]:
    for name in (split,) if split else ("val", "train", "test"):
        entry = data.get(name)
        if isinstance(entry, str) and (folder / entry).exists():
            return name, _images_at(folder / entry)
    base = folder / "images" if (folder / "images").is_dir() else folder
    parts = {path.name: path for path in sorted(base.iterdir()) if path.is_dir() and path.name != "labels"}
    parts = {name: path / "images" if (path / "images").is_dir() else path for name, path in parts.items()}
    parts = {name: path for name, path in parts.items() if _images_at(path)}
    if split is None and (here := _images_at(base)):
        return None, here
    for wanted in (split,) if split else ("val", "test", "train"):
        fitting = [name for name in parts if name == wanted] or [name for name in parts if name.startswith(wanted)]
        if fitting:
            return fitting[0], _images_at(parts[fitting[0]])
    if split is not None:
        raise SpecError(f"{folder}: has no split {split!r}; it has {', '.join(parts) or 'no split folders'}")
    return None, []


def _images_at(path: Path) -> list[Path]:
    """Images of a folder, or of a list file with one path per line."""
    if path.is_dir():
        return sorted(item for item in path.iterdir() if item.suffix.lower() in IMAGE_SUFFIXES and item.is_file())
    if path.suffix.lower() != ".txt":
        raise SpecError(f"{path}: expected a folder of images or a .txt list")
    lines = [line.strip() for line in _read_lines(path)]
    return [item if (item := Path(line)).is_absolute() else path.parent / line for line in lines if line]


def _label_path(image: Path) -> Path:
    """``.../images/.../x.jpg`` to ``.../labels/.../x.txt`` (the last "images"), else a .txt beside the image."""
    parts = list(image.parts)
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] == "images":
            parts[index] = "labels"
            return Path(*parts).with_suffix(".txt")
    beside = image.parent.parent / "labels" / image.name
    return beside.with_suffix(".txt") if beside.parent.is_dir() else image.with_suffix(".txt")


def _yolo_sample(image: Path, *, classes: int | None, pose: bool) -> Sample:
    path = _label_path(image)
    rows = _yolo_rows(path, classes=classes, pose=pose) if path.exists() else []
    table = np.array(rows, np.float64).reshape(-1, 5)
    # Labelling tools write some boxes twice; counting them twice would cost recall that no detector can reach.
    table = table[np.sort(np.unique(table, axis=0, return_index=True)[1])] if len(table) else table
    half = table[:, 3:5] / 2
    boxes = np.concatenate([table[:, 1:3] - half, table[:, 1:3] + half], axis=1)
    return Sample(path=image, cls=table[:, 0].astype(np.int64), boxes=np.clip(boxes, 0, 1))


def _yolo_rows(path: Path, *, classes: int | None, pose: bool) -> list[list[float]]:
    """Rows of class, centre-x, centre-y, width, height from a label file; polygons become their boxes."""
    rows = []
    for number, line in enumerate(_read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            values = [float(word) for word in line.split()]
        except ValueError as error:
            raise SpecError(f"{where}: expected numbers, got {line.strip()[:60]!r}") from error
        if len(values) < 5 or (len(values) > 5 and not pose and (len(values) < 7 or len(values) % 2 == 0)):
            raise SpecError(f"{where}: expected 'class x y width height' or a polygon, got {len(values)} values")
        rows.append(_checked([values[0], *_box(values[1:], pose=pose)], classes=classes, where=where))
    return rows


def _box(values: Sequence[float], *, pose: bool) -> Sequence[float]:
    if len(values) == 4 or pose:
        return values[:4]
    xs, ys = values[0::2], values[1::2]
    return [(min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2, max(xs) - min(xs), max(ys) - min(ys)]


def _checked(row: list[float], *, classes: int | None, where: str) -> list[float]:
    if not np.isfinite(row).all():
        raise SpecError(f"{where}: holds a value that is not a finite number")
    if row[0] < 0 or row[0] != int(row[0]):
        raise SpecError(f"{where}: class {row[0]:g} is not a whole number from 0 up")
    if classes is not None and row[0] >= classes:
        raise SpecError(f"{where}: class {row[0]:g}, but there are {classes} classes (0 to {classes - 1})")
    if min(row[1:]) < -EDGE_TOLERANCE or max(row[1:]) > 1 + EDGE_TOLERANCE:
        raise SpecError(f"{where}: coordinates must be shares of the image, 0 to 1; got {row[1:]}")
    if min(row[3:]) <= 0:
        raise SpecError(f"{where}: width and height must be positive, got {row[3]:g} and {row[4]:g}")
    return row


def _read_lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_LABEL_BYTES:
            raise SpecError(f"{path}: more than {MAX_LABEL_BYTES >> 20} MiB")
        return read_regular(path).decode("utf-8-sig").splitlines()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is not UTF-8 text (byte {error.start})") from error
