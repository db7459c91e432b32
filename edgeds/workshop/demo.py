"""The whole way in one call: a known model, real photographs, INT8, a bundle, detections, speed, a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeds.buckets import cover_resolutions
from edgeds.errors import SpecError
from edgeds.imagefile import IMAGE_SUFFIXES, read_image
from edgeds.workshop.package import create_bundle
from edgeds.workshop.samples import PhotoCrops
from edgeds.workshop.show import annotate_photos, measure_speed, write_run_report
from edgeds.zoo import fetch_model, fetch_photos

MODEL = "yolo11n"
MAX_PHOTOS = 16


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

    ``data`` is a folder of images to calibrate and run on; without it the zoo's sample photographs are used.
    ``seconds`` is the measuring time per precision. Writes ``bundle/``, ``pictures/``, ``report.html`` and
    ``report.json`` below ``out``. Raises SpecError when ``out`` already holds something and ``replace`` is off.
    """
    folder = Path(out)
    if folder.exists() and not replace and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(f"{folder} exists and is not an empty directory; choose another --out or pass --replace")
    model = fetch_model(MODEL, quiet=quiet)
    photos = _photos(data, quiet=quiet)
    shown = photos[:MAX_PHOTOS]
    sizes = cover_resolutions([read_image(path).shape[:2] for path in shown], max_buckets=2, long_side_px=long_side_px)
    calib = Path(data) if data is not None else PhotoCrops(photos)
    bundle = create_bundle(
        model, out=folder / "bundle", task="detect", calib=calib, sizes=sizes, replace=replace, quiet=quiet
    )
    pictures, results = annotate_photos(bundle, shown, folder / "pictures")
    reports = measure_speed(bundle, shown, seconds=seconds, quiet=quiet)
    page = write_run_report(folder, sizes, pictures, results, reports, model=MODEL)
    return DemoResult(
        bundle=bundle,
        images=tuple(pictures),
        fps_float=reports["float"].fps,
        fps_int8=reports["int8"].fps,
        report=page,
        detections=sum(len(result) for result in results),
    )


def _photos(data: str | Path | None, *, quiet: bool) -> list[Path]:
    if data is None:
        return fetch_photos(quiet=quiet)
    folder = Path(data)
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    if not found:
        raise SpecError(f"--data {folder}: no images in it")
    return found
