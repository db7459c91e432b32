"""The whole way in one call: a known model, real photographs, INT8, a bundle, detections, speed, a page."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from edgeds.buckets import cover_resolutions
from edgeds.errors import InputError, SpecError
from edgeds.files import atomic_dir, sha256_file
from edgeds.imagefile import IMAGE_SUFFIXES, read_image
from edgeds.progress import track
from edgeds.specs import Resolution
from edgeds.workshop.outfolder import claim_folder, writing_errors
from edgeds.workshop.package import create_bundle
from edgeds.workshop.samples import PhotoCrops
from edgeds.workshop.show import annotate_photos, measure_speed, write_run_report
from edgeds.zoo import fetch_model, fetch_photos

log = logging.getLogger("edgeds.workshop")

MODEL = "yolo11n"
MAX_PHOTOS = 16
MAX_CALIBRATION = 64
FEW_PHOTOS = 24
"""Below this, crops of the photographs are added to calibrate with."""

ENTRIES = ("bundle", "pictures", "report.html", "report.json")


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Paths and measured figures of one demo run."""

    bundle: Path
    images: tuple[Path, ...]
    fps_float: float
    fps_int8: float
    report: Path
    detections: int


def run_demo(
    out: str | Path,
    *,
    data: str | Path | None = None,
    long_side_px: int = 640,
    seconds: float = 4.0,
    replace: bool = False,
    quiet: bool = False,
) -> DemoResult:
    """Fetch yolo11n, calibrate it, pack a bundle, run it on photographs and measure float against INT8.

    ``data`` is a folder of images to calibrate and run on (64 evenly spaced ones of a larger folder; what cannot be
    read is left out with a warning); without it the zoo's sample photographs are used. ``seconds`` is the measuring
    time per precision. Writes ``bundle/``, ``pictures/``, ``report.html`` and ``report.json`` below ``out``, which
    appears when all of it is complete. Raises SpecError when ``out`` already holds something and ``replace`` is off,
    or holds more than an earlier demo; ModelError when the model cannot be fetched.
    """
    folder = Path(out)
    if not 0 < seconds <= 3600:
        raise SpecError(f"seconds {seconds!r}: give a number above 0, up to 3600")
    with claim_folder(folder, replace=replace, ours=ENTRIES, what="an earlier demo"):
        given = _find_images(Path(data)) if data is not None else None
        model = fetch_model(MODEL, quiet=quiet)
        photos, sizes = _readable(given or fetch_photos(quiet=quiet), long_side_px=long_side_px, quiet=quiet)
        with writing_errors(folder), atomic_dir(folder, replace=replace) as work:
            calib = photos if len(photos) >= FEW_PHOTOS else PhotoCrops(photos)
            bundle = create_bundle(model, out=work / "bundle", task="detect", calib=calib, sizes=sizes, quiet=quiet)
            shown = photos[:MAX_PHOTOS]
            pictures, results = annotate_photos(bundle, shown, work / "pictures", quiet=quiet)
            reports = measure_speed(bundle, shown, seconds=seconds, quiet=quiet)
            page = write_run_report(work, sizes, pictures, results, reports, model=MODEL)
    return DemoResult(
        bundle=folder / bundle.relative_to(work),
        images=tuple(folder / path.relative_to(work) for path in pictures),
        fps_float=reports["float"].fps,
        fps_int8=reports["int8"].fps,
        report=folder / page.relative_to(work),
        detections=sum(len(result) for result in results),
    )


def _find_images(folder: Path) -> list[Path]:
    """Up to 64 evenly spaced images of a folder."""
    if not folder.is_dir():
        raise SpecError(
            f"--data {folder}: {'not a folder' if folder.exists() else 'no such folder'}; give one of images"
        )
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    if not found:
        raise SpecError(f"--data {folder}: no images in it ({', '.join(sorted(IMAGE_SUFFIXES))})")
    count = min(len(found), MAX_CALIBRATION)
    return [found[(2 * index + 1) * len(found) // (2 * count)] for index in range(count)]


def _readable(photos: list[Path], *, long_side_px: int, quiet: bool) -> tuple[list[Path], tuple[Resolution, ...]]:
    """The photographs that can be read, each content once, and up to two resolutions that cover them."""
    kept: dict[Path, Resolution] = {}
    contents: dict[str, Path] = {}
    for path in track(photos, what="reading images", total=len(photos), unit="image", quiet=quiet):
        try:
            kept[path] = Resolution(*read_image(path).shape[:2])
        except InputError as error:
            log.warning("left out: %s", error)
            continue
        first = contents.setdefault(sha256_file(path), path)
        if first != path:
            log.warning("left out: %s has the same content as %s", path, first)
            del kept[path]
    if not kept:
        raise InputError(f"none of the {len(photos)} images can be read; the first is {photos[0]}")
    return list(kept), cover_resolutions(kept.values(), max_buckets=2, long_side_px=long_side_px)
