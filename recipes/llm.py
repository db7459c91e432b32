"""A small language model for the edge: INT8 or INT4 weights, planned, packed, perplexity and speed measured.

    python -m recipes.llm --out runs/llm [--weights int4] [--data DIR] [--model FOLDER|FILE.gguf] [--target NAME@MODE]

``--data``: text; its first half (or *test* file) is measured on, the rest (or *train* file) calibrated on. docs/llm.md
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from edgeds import create_llm_bundle, fetch_model, open_bundle
from edgeds.errors import SpecError
from edgeds.workshop.llmshow import (
    ask,
    measure_language_speed,
    measure_perplexity_of,
    split_text,
    write_language_report,
)
from edgeds.workshop.stages import run_stages
from edgeds.zoo import find_entry

MODEL = "smollm2-135m"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.llm", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for bundle/ and report.html")
    parser.add_argument("--weights", choices=("float", "int8", "int4"), default="int4", help="default int4")
    parser.add_argument("--kv", choices=("float32", "float16", "int8"), help="KV cache (default: by engine)")
    parser.add_argument("--data", type=Path, help="text file, or a folder of them, to calibrate and measure on")
    parser.add_argument("--model", type=Path, help=f"checkpoint folder or .gguf file (default: {MODEL})")
    parser.add_argument("--target", metavar="NAME@MODE", help="board the bundle is meant for: predicted figures")
    parser.add_argument("--samples", type=int, default=32, help="windows of 512 tokens to calibrate on (default 32)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens to measure perplexity on (default 2048)")
    parser.add_argument("--no-float", action="store_true", help="leave out the float model's perplexity")
    parser.add_argument("--seconds", type=float, default=12.0, help="measuring time")
    parser.add_argument("--stop-after", choices=STAGES, default="bench")
    return parser.parse_args(argv)


def fetch(args: argparse.Namespace, done: dict) -> dict:
    if not 0 < args.seconds <= 3600:
        raise SpecError(f"--seconds {args.seconds}: give a number above 0, up to 3600")
    if args.tokens < 2:
        raise SpecError(f"--tokens {args.tokens}: give at least 2")
    args.measured, args.calib = split_text(args.data, args.out / "text") if args.data else (None, None)
    args.license = None if args.model else find_entry(MODEL).license
    return {"model": str(args.model or fetch_model(MODEL))}


def pack(args: argparse.Namespace, source: str, out: Path, weights: str) -> Path:
    calibration = {"calib": args.calib, "samples": args.samples} if weights == "int4" else {}
    how = {"kv": args.kv, "target": args.target, "license": args.license, "replace": True}
    return create_llm_bundle(source, out=out, weights=weights, **calibration, **how)


def bundle(args: argparse.Namespace, done: dict) -> dict:
    path = pack(args, done["model"], args.out / "bundle", args.weights)
    with open_bundle(path) as opened:
        facts = opened.manifest
        return {"bundle": str(path), "weights": args.weights, "target": args.target, "predicted": facts.predicted}


def evaluate(args: argparse.Namespace, done: dict) -> dict:
    found = {"answer": ask(done["bundle"])}
    if args.measured is None:
        return found
    found["perplexity"] = measure_perplexity_of(done["bundle"], args.measured, tokens=args.tokens)
    if args.weights != "float" and not args.no_float:
        with tempfile.TemporaryDirectory() as folder:
            whole = pack(args, done["model"], Path(folder) / "float", "float")
            found["perplexity_float"] = measure_perplexity_of(whole, args.measured, tokens=args.tokens)
    return found


def bench(args: argparse.Namespace, done: dict) -> dict:
    speed = measure_language_speed(done["bundle"], seconds=args.seconds)
    page = write_language_report(args.out, speed, model=Path(done["model"]).stem, figures=done)
    rates = {f"tokens_per_s_{name}": report.tokens_per_s for name, report in speed.items()}
    return {"report": str(page), "decode_tokens_per_s": speed["one"].decode_tokens_per_s, **rates}


STAGES = {"fetch": fetch, "bundle": bundle, "eval": evaluate, "bench": bench}


def main(argv: list[str] | None = None) -> int:
    return run_stages("recipes.llm", STAGES, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
