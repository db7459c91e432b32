"""YOLOv7-class detector on AGX Orin: a fifth of the channels less, INT8, 35 FPS under 25 W. Plan it, then do it.

    python -m recipes.yolov7_agx_orin --out runs/yolov7 [--model yolov7.onnx] [--data DIR] [--ratio 0.2]

YOLOv7 is planned from its per-layer costs; then the model that is given (default: yolo11n) is pruned, calibrated and
packed with its plan. Figures of the board are predicted: edgeds push, tune and report measure there. docs/recipes.md"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgeds import Budget, Resolution, create_bundle, fetch_model, fetch_photos, open_bundle, resolve_target
from edgeds.boards.cost_file import read_cost
from edgeds.boards.plan_choice import resize_to
from edgeds.boards.plan_file import choice_document, plan_document
from edgeds.boards.plan_spec import Candidate, PlanOptions
from edgeds.boards.planner import plan_model
from edgeds.files import write_json
from edgeds.report.html import write_report
from edgeds.report.sources import read_runs
from edgeds.workshop.pruning import prune_detector
from edgeds.workshop.samples import PhotoCrops
from edgeds.workshop.stages import run_stages

COSTS = Path(__file__).resolve().parents[1] / "benchmarks" / "predictor" / "costs" / "yolov7.json"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.yolov7_agx_orin", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for bundle/, plan.json and report.html")
    parser.add_argument("--model", type=Path, help="ONNX of a YOLO detector (default: yolo11n from the zoo)")
    parser.add_argument("--data", type=Path, help="folder of unlabelled images (default: the zoo's photographs)")
    parser.add_argument("--target", default="agx-orin-64gb", metavar="NAME[@MODE]", help="board (default %(default)s)")
    parser.add_argument("--size", default="640", metavar="HxW", help="input resolution (default 640)")
    parser.add_argument("--ratio", type=float, default=0.2, help="share of the removable channels (default 0.2)")
    parser.add_argument("--fps", type=float, default=35.0)
    parser.add_argument("--watts", type=float, default=25.0)
    parser.add_argument("--stop-after", choices=STAGES, default="report")
    return parser.parse_args(argv)


def plan(args: argparse.Namespace, _: dict) -> dict:
    args.budget, size = Budget(fps=args.fps, watts=args.watts), Resolution.parse(args.size)
    options = PlanOptions(budget=args.budget)
    dense = Candidate(name="yolov7", precision="int8", work=resize_to(read_cost(COSTS), size))
    result = plan_model([dense], target=resolve_target(args.target), options=options)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "plan.json", plan_document(result, options=options))
    best = result.plan or result.nearest[0]
    about = {"goal": {"fps": args.fps, "watts": args.watts}, "yolov7_fits": result.feasible}
    return {**about, "yolov7_predicted": choice_document(best, options)}


def prune(args: argparse.Namespace, _: dict) -> dict:
    model = args.model or fetch_model("yolo11n")
    args.calib = args.data or PhotoCrops(fetch_photos())
    size = Resolution.parse(args.size)
    done = prune_detector(model, out=args.out / "pruned.onnx", ratio=args.ratio, calib=args.calib, size=size)
    return {"model": str(model), "pruned": done.model, "params": [done.params_before, done.params_after]}


def bundle(args: argparse.Namespace, done: dict) -> dict:
    wanted = {"target": args.target, "budget": args.budget, "sizes": (Resolution.parse(args.size),)}
    fixed = {"out": args.out / "bundle", "task": "detect", "calib": args.calib, "replace": True}
    path = create_bundle(done["pruned"], **fixed, **wanted)
    with open_bundle(path) as opened:
        return {"bundle": str(path), "plan": opened.manifest.plan, "predicted": opened.manifest.predicted}


def report(args: argparse.Namespace, done: dict) -> dict:
    runs = [*read_runs(args.out / "plan.json"), *read_runs(Path(done["bundle"]))]
    title = f"{args.ratio:.0%} of the channels less, INT8, {args.fps:g} FPS under {args.watts:g} W"
    return {"report": str(write_report(args.out / "report.html", runs, title=title))}


STAGES = {"plan": plan, "prune": prune, "bundle": bundle, "report": report}


def main(argv: list[str] | None = None) -> int:
    return run_stages("recipes.yolov7_agx_orin", STAGES, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
