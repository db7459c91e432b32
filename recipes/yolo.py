"""A YOLO detector for the edge: calibrate to INT8, check the accuracy, pack a bundle, run it, measure it.

    python -m recipes.yolo --out runs/yolo [--data DIR] [--model yolo.onnx] [--max-drop 0.5] [--stop-after STAGE]

``--data`` is a YOLO folder (images/, labels/): calibrated on its train half, measured on its val half. Without it the
zoo's sample photographs are used and no accuracy is measured. Stages: fetch, bundle, pictures, bench.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from edgeds import Resolution, cover_resolutions, fetch_model, fetch_photos, open_bundle
from edgeds.errors import EdgedsError
from edgeds.imagefile import IMAGE_SUFFIXES, read_image
from edgeds.workshop.package import create_bundle
from edgeds.workshop.samples import PhotoCrops
from edgeds.workshop.show import annotate_photos, measure_speed, write_run_report

STAGES = ("fetch", "bundle", "pictures", "bench")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.yolo", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for bundle/, pictures/ and report.html")
    parser.add_argument("--data", type=Path, help="labelled YOLO folder with images/ and labels/")
    parser.add_argument("--model", type=Path, help="ONNX of a YOLO (default: yolo11n from the zoo)")
    parser.add_argument("--target", metavar="NAME@MODE", help="board the bundle is meant for, recorded in it")
    parser.add_argument("--size", type=int, default=640, help="long side of the input in pixels")
    parser.add_argument("--max-drop", type=float, help="largest loss of mAP50-95 allowed, in points")
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring time per precision")
    parser.add_argument("--stop-after", choices=STAGES, default="bench")
    return parser.parse_args(argv)


def find_images(folder: Path, split: str) -> list[Path]:
    """Images of one half of a YOLO folder, all of them when it is not split."""
    halves = sorted(path for path in (folder / "images").glob(f"{split}*") if path.is_dir())
    root = halves[0] if halves else folder
    return sorted(path for path in root.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        print(json.dumps(run(args)))
    except EdgedsError as error:
        print(f"recipes.yolo: error: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> dict:
    model = args.model or fetch_model("yolo11n")
    photos = find_images(args.data, "val")[:16] if args.data else fetch_photos()
    done = {"stage": "fetch", "model": str(model)}
    if args.stop_after == "fetch":
        return done
    sizes: tuple[Resolution, ...] = (Resolution(args.size, args.size),)
    if not args.data:
        sizes = cover_resolutions([read_image(p).shape[:2] for p in photos], max_buckets=2, long_side_px=args.size)
    bundle = create_bundle(
        model,
        out=args.out / "bundle",
        task="detect",
        calib=find_images(args.data, "train")[0].parent if args.data else PhotoCrops(photos),
        sizes=sizes,
        evaluate=args.data,
        max_drop=args.max_drop,
        target=args.target,
        replace=True,
    )
    with open_bundle(bundle) as opened:
        accuracy = opened.manifest.accuracy
    done |= {"stage": "bundle", "bundle": str(bundle), "accuracy": accuracy}
    if args.stop_after == "bundle":
        return done
    pictures, results = annotate_photos(bundle, photos, args.out / "pictures")
    done |= {"stage": "pictures", "images": [str(path) for path in pictures]}
    if args.stop_after == "pictures":
        return done
    speed = measure_speed(bundle, photos, seconds=args.seconds, quiet=False)
    page = write_run_report(args.out, sizes, pictures, results, speed, model=Path(model).stem, accuracy=accuracy)
    fps = {f"fps_{name}": report.fps for name, report in speed.items()}
    return done | {"stage": "bench", "report": str(page), **fps}


if __name__ == "__main__":
    sys.exit(main())
