"""COCO instances json to a DetectionDataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.errors import SpecError
from edgeds.files import read_json
from edgeds.report.datasets import DetectionDataset, Sample

# The annotations of COCO train2017 are 450 MB.
MAX_COCO_BYTES = 1 << 30


def open_coco(
    path: Path, root: Path, *, split: str | None, names: Mapping[int, str] | None, limit: int | None
) -> DetectionDataset:
    """Read COCO json; images are looked for under ``root``. Raises SpecError for anything missing or malformed."""
    data = read_json(path, max_bytes=MAX_COCO_BYTES)
    if not isinstance(data, dict):
        raise SpecError(f"{path}: expected a JSON object with images, annotations and categories")
    images, notes, categories = (_rows(data, key, path) for key in ("images", "annotations", "categories"))
    classes = _class_numbers(categories, names, path)
    by_image: dict[Any, list[Mapping[str, Any]]] = {}
    for index, note in enumerate(notes):
        _check_note(note, classes, where=f"{path}: annotations[{index}]")
        by_image.setdefault(note["image_id"], []).append(note)
    if not images:
        raise SpecError(f"{path}: lists no images")
    known = {row.get("id") for row in images if isinstance(row.get("id"), int | str)}
    if stray := next((key for key in by_image if key not in known), None):
        raise SpecError(f"{path}: an annotation names image {stray!r}, which is not listed")
    images = sorted(images, key=lambda row: str(row.get("file_name")))[:limit]
    find = _finder(root, path.stem, split)
    samples = []
    for index, row in enumerate(images):
        if not isinstance(row.get("file_name"), str):
            raise SpecError(f"{path}: images[{index}] has no file_name")
        samples.append(_sample(find(row["file_name"]), by_image.get(row.get("id"), []), classes))
    labels = {classes[row["id"]]: str(row.get("name")) for row in categories if row["id"] in classes}
    return DetectionDataset(root=root, split=split, samples=tuple(samples), names=dict(sorted(labels.items())))


def _rows(data: Mapping[str, Any], key: str, path: Path) -> list[Mapping[str, Any]]:
    rows = data.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SpecError(f"{path}: {key!r} is missing or not a list of objects; is this COCO instances json?")
    return rows


def _class_numbers(categories: list[Mapping[str, Any]], names: Mapping[int, str] | None, path: Path) -> dict[Any, int]:
    """Category id to the model's class number: by name where all names are known, else by order of the ids."""
    if not all(isinstance(row.get("id"), int) for row in categories):
        raise SpecError(f"{path}: a category has no number as id")
    ordered = sorted(categories, key=lambda row: row["id"])
    if names is None:
        return {row["id"]: index for index, row in enumerate(ordered)}
    number = {name.strip().lower(): index for index, name in names.items()}
    matched = {row["id"]: number.get(str(row.get("name")).strip().lower()) for row in ordered}
    missing = [str(row.get("name")) for row in ordered if matched[row["id"]] is None]
    if not missing:
        return {key: value for key, value in matched.items() if value is not None}
    if len(ordered) == len(names) and len(missing) == len(ordered):
        return {row["id"]: index for index, row in enumerate(ordered)}
    raise SpecError(f"{path}: the model has no class named {', '.join(missing[:5])}; its classes differ from the data")


def _check_note(note: Mapping[str, Any], classes: Mapping[Any, int], *, where: str) -> None:
    box = note.get("bbox")
    if not isinstance(note.get("image_id"), int | str) or not isinstance(box, list) or len(box) != 4:
        raise SpecError(f"{where}: needs image_id and bbox [x, y, width, height]")
    if not all(isinstance(value, int | float) and np.isfinite(value) for value in [*box, note.get("area") or 0]):
        raise SpecError(f"{where}: bbox {box} or area holds something that is not a finite number")
    if not isinstance(note.get("category_id"), int) or note["category_id"] not in classes:
        raise SpecError(f"{where}: category_id {note.get('category_id')!r} is not among the categories")


def _sample(path: Path, notes: list[Mapping[str, Any]], classes: Mapping[Any, int]) -> Sample:
    boxes = np.array([note["bbox"] for note in notes], np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    areas = [float(note.get("area") or note["bbox"][2] * note["bbox"][3]) for note in notes]
    return Sample(
        path=path,
        cls=np.array([classes[note["category_id"]] for note in notes], np.int64),
        boxes=boxes,
        normalised=False,
        crowd=np.array([bool(note.get("iscrowd")) for note in notes], bool),
        area_px=np.array(areas, np.float64),
    )


def _finder(root: Path, stem: str, split: str | None) -> Any:
    """A function that finds an image file; folders named like the json or the split are tried first."""
    part = stem.removeprefix("instances_")
    base = root.parent if root.name == "annotations" else root
    folders = [base / part, base / "images" / part, base / "images", base]
    if split:
        folders[:0] = [base / split, base / "images" / split]
    folders += [folder for folder in sorted((base / "images").glob("*")) if folder.is_dir()]

    def find(name: str) -> Path:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise SpecError(f"{root}: image path {name!r} leaves the data set")
        for folder in folders:
            if (folder / name).is_file():
                return folder / name
        raise SpecError(
            f"{base}: image {name!r} is listed but was not found in {folders[0]}, {base / 'images'} or {base}"
        )

    return find
