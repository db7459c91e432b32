"""Sentence embeddings for the edge: a BERT-family encoder to INT8, planned, packed, checked on pairs, measured.

    python -m recipes.bert --out runs/bert [--data DIR] [--model FOLDER] [--heads 0.1 --ffn 0.2] [--max-drop 0.5]

``--data``: a folder of sentence pairs, calibrated on its ``*dev*`` file, measured on its ``*test*`` file. docs/bert.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgeds import create_text_bundle, evaluate_text, fetch_model, open_bundle
from edgeds.errors import SpecError
from edgeds.pipelines.bert import BertPipeline
from edgeds.workshop.pruning import prune_encoder
from edgeds.workshop.stages import run_stages
from edgeds.workshop.textsamples import SENTENCES
from edgeds.workshop.textshow import measure_text_speed, write_text_report
from edgeds.zoo import find_entry


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.bert", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for bundle/ and report.html")
    parser.add_argument("--data", type=Path, help="folder with a *dev* and a *test* file of scored sentence pairs")
    parser.add_argument("--model", type=Path, help="checkpoint folder or ONNX encoder (default: minilm-l6)")
    parser.add_argument("--target", metavar="NAME@MODE", help="board the bundle is meant for: its plan is stored")
    parser.add_argument("--heads", type=float, default=0.0, metavar="R", help="share of attention heads to remove")
    parser.add_argument("--ffn", type=float, default=0.0, metavar="R", help="share of feed-forward width to remove")
    parser.add_argument("--samples", type=int, default=100, help="texts to calibrate on (default 100)")
    parser.add_argument("--limit", type=int, help="pairs to measure on (default: all)")
    parser.add_argument("--max-drop", type=float, help="largest loss of Spearman allowed, in points")
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring time per precision")
    parser.add_argument("--stop-after", choices=STAGES, default="bench")
    return parser.parse_args(argv)


def fetch(args: argparse.Namespace) -> dict:
    if not 0 < args.seconds <= 3600:
        raise SpecError(f"--seconds {args.seconds}: give a number above 0, up to 3600")
    args.dev, args.test = (find_pairs(args.data, half) for half in ("dev", "test")) if args.data else (None, None)
    if args.max_drop is not None and args.dev is None:
        raise SpecError("--max-drop needs sentence pairs to measure on; give --data DIR")
    args.license = None if args.model else find_entry("minilm-l6").license
    return {"model": str(args.model or fetch_model("minilm-l6"))}


def prune(args: argparse.Namespace, done: dict) -> dict:
    if not (args.heads or args.ffn):
        return {}
    out, texts = args.out / "pruned.onnx", args.dev or SENTENCES
    report = prune_encoder(done["model"], out=out, heads=args.heads, ffn=args.ffn, calib=texts)
    return {"tokenizer": done["model"], "model": report.model, "params": [report.params_before, report.params_after]}


def find_pairs(folder: Path, half: str) -> Path:
    found = sorted(path for path in folder.glob(f"*{half}*") if path.is_file())
    if not found:
        raise SpecError(f"{folder}: holds no *{half}* file of sentence pairs")
    return found[0]


def bundle(args: argparse.Namespace, done: dict) -> dict:
    limits = {"evaluate": args.dev if args.max_drop is not None else None, "max_drop": args.max_drop}
    how = {"calib": args.dev or SENTENCES, "samples": args.samples, "target": args.target, "license": args.license}
    files = {"out": args.out / "bundle", "tokenizer": done.get("tokenizer")}
    path = create_text_bundle(done["model"], task="embed", replace=True, **files, **how, **limits)
    with open_bundle(path) as opened:
        facts = opened.manifest
        return {"bundle": str(path), "plan": facts.plan, "calibration": facts.calibration["samples"]}


def evaluate(args: argparse.Namespace, done: dict) -> dict:
    values = {}
    for precision in ("float", "int8") if args.test else ():
        with BertPipeline.from_bundle(done["bundle"], precision=precision) as pipeline:
            values[f"spearman_{precision}"] = evaluate_text(pipeline, args.test, limit=args.limit)["spearman"]
    return values


def bench(args: argparse.Namespace, done: dict) -> dict:
    speed = measure_text_speed(Path(done["bundle"]), seconds=args.seconds)
    page = write_text_report(args.out, speed, model=Path(done["model"]).stem, figures=done)
    return {"report": str(page), **{f"fps_{name}": report.fps for name, report in speed.items()}}


STAGES = {"fetch": lambda args, _: fetch(args), "prune": prune, "bundle": bundle, "eval": evaluate, "bench": bench}


def main(argv: list[str] | None = None) -> int:
    return run_stages("recipes.bert", STAGES, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
