"""A YOLO detector for the edge: prune if asked, calibrate to INT8, check the accuracy, pack, run and measure it.

    python -m recipes.yolo --out runs/yolo [--data DIR] [--model yolo.onnx] [--prune 0.1 --recover 10] [--max-drop 0.5]

``--data``: a labelled YOLO or COCO folder, calibrated on its train half, measured on its val half. docs/recipes.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgeds import Resolution, cover_resolutions, create_bundle, fetch_model, fetch_photos, open_bundle
from edgeds import open_detection_dataset as open_dataset
from edgeds.errors import SpecError
from edgeds.imagefile import read_image
from edgeds.workshop.pruning import prune_detector
from edgeds.workshop.recovering import recover_detector
from edgeds.workshop.samples import PhotoCrops
from edgeds.workshop.show import annotate_photos, measure_speed, write_run_report
from edgeds.workshop.stages import run_stages


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.yolo", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for bundle/, pictures/ and report.html")
    parser.add_argument("--data", type=Path, help="labelled folder with images/ and labels/, train and val halves")
    parser.add_argument("--model", type=Path, help="ONNX of a YOLO detector (default: yolo11n from the zoo)")
    parser.add_argument("--target", metavar="NAME@MODE", help="board the bundle is meant for: its plan is stored")
    parser.add_argument("--prune", type=float, metavar="R", help="share of the removable channels to remove")
    parser.add_argument(
        "--recover", type=float, metavar="MIN", help="minutes to train what pruning left (edgeds[train])"
    )
    parser.add_argument("--size", default="640", metavar="HxW", help="input resolution (default 640)")
    parser.add_argument("--max-drop", type=float, help="largest loss of mAP50-95 allowed, in points")
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring time per precision")
    parser.add_argument("--stop-after", choices=STAGES, default="bench")
    return parser.parse_args(argv)


def fetch(args: argparse.Namespace, done: dict) -> dict:
    size = Resolution.parse(args.size)
    if not 0 < args.seconds <= 3600:
        raise SpecError(f"--seconds {args.seconds}: give a number above 0, up to 3600")
    if args.recover is not None and args.prune is None:
        raise SpecError("--recover trains what --prune left; give --prune R as well")
    if args.data:  # both halves are looked at before anything is downloaded
        calib, shown = ([s.path for s in open_dataset(args.data, split=half).samples] for half in ("train", "val"))
        args.calib, args.photos, args.sizes = calib, shown[:16], (size,)
    model = args.model or fetch_model("yolo11n")
    if not args.data:
        args.photos, longest = fetch_photos(), max(size.height_px, size.width_px)
        args.calib, sizes = PhotoCrops(args.photos), [read_image(path).shape[:2] for path in args.photos]
        args.sizes = cover_resolutions(sizes, max_buckets=2, long_side_px=longest)
    return {"model": str(model)}


def prune(args: argparse.Namespace, done: dict) -> dict:
    how = {"out": args.out / "pruned.onnx", "ratio": args.prune, "calib": args.calib, "size": args.sizes[0]}
    return {} if args.prune is None else {"dense": done["model"], "model": prune_detector(done["model"], **how).model}


def recover(args: argparse.Namespace, done: dict) -> dict:
    if args.recover is None:
        return {}
    how = {"out": args.out / "recovered.onnx", "calib": args.calib, "minutes": args.recover, "size": args.sizes[0]}
    report = recover_detector(done["model"], teacher=done["dense"], **how)
    return {"model": report.model, "loss": [report.loss_before, report.loss_after], "kept": report.kept}


def bundle(args: argparse.Namespace, done: dict) -> dict:
    plan = {"calib": args.calib, "sizes": args.sizes, "target": args.target}
    limits = {"evaluate": args.data, "split": "val" if args.data else None, "max_drop": args.max_drop}
    path = create_bundle(done["model"], out=args.out / "bundle", task="detect", replace=True, **plan, **limits)
    with open_bundle(path) as opened:
        return {"bundle": str(path), "accuracy": opened.manifest.accuracy}


def pictures(args: argparse.Namespace, done: dict) -> dict:
    args.paths, args.results = annotate_photos(Path(done["bundle"]), args.photos, args.out / "pictures", quiet=False)
    return {"images": [str(path) for path in args.paths], "detections": sum(map(len, args.results))}


def bench(args: argparse.Namespace, done: dict) -> dict:
    speed = measure_speed(Path(done["bundle"]), args.photos, seconds=args.seconds, quiet=False)
    about = {"model": Path(done["model"]).stem, "accuracy": done["accuracy"]}
    page = write_run_report(args.out, args.sizes, args.paths, args.results, speed, **about)
    return {"report": str(page), **{f"fps_{name}": report.fps for name, report in speed.items()}}


STAGES = {"fetch": fetch, "prune": prune, "recover": recover, "bundle": bundle, "pictures": pictures, "bench": bench}


def main(argv: list[str] | None = None) -> int:
    return run_stages("recipes.yolo", STAGES, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
