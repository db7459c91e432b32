"""Perplexity of a small language model: weights in float, INT8 and INT4, keys and values in INT8, and evicted.

    python -m benchmarks.llm_accuracy --text wiki.txt

Measured on the first 2048 tokens in windows of 512; INT4 is calibrated on the second half of the text, of which nothing
is measured. Eviction: windows of 2048 tokens with half of them cached, against all of them.

Stated limits: INT8 weights 1 % worse, INT4 12 %, INT8 keys and values 0.5 %, eviction 2 %.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Limit, count, finish, make_parser, run_main
from benchmarks.llm import find_model
from edgeds.report.perplexity import evaluate_language_model
from edgeds.workshop.llmpackage import create_llm_bundle
from edgeds.workshop.llmshow import split_text

TOKENS, WINDOW, LONG = 2048, 512, 2048
LIMITS = {"INT8 weights": 1.0, "INT4 weights": 12.0, "INT8 KV": 0.5, "half of the cache": 2.0}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("llm_accuracy", about="Perplexity of weights, KV types and eviction.", data=False)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="text to calibrate and measure on")
    parser.add_argument("--tokens", type=count, default=TOKENS, help=f"tokens to measure on (default {TOKENS})")
    parser.add_argument("--long", type=count, default=LONG, help=f"window of eviction (default {LONG})")
    parser.add_argument("--long-tokens", type=count, default=6 * LONG, help="tokens of that (default six windows)")
    parser.add_argument("--samples", type=count, default=32, help="calibration windows (default 32)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    model = find_model(arguments.model, quiet=arguments.quiet)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured, calib = split_text(arguments.text, folder / "text")

        def score(
            what: str, against: str | None, *, window: int, tokens: int, budget: int | None = None, **how: Any
        ) -> None:
            out = folder / "bundle"
            if how:
                create_llm_bundle(model, out=out, replace=True, quiet=arguments.quiet, **how)
            found = evaluate_language_model(
                out,
                measured,
                limit=tokens,
                window=window,
                kv_budget=budget,
                backend="onnxruntime",
                threads=arguments.threads,
                quiet=arguments.quiet,
            )
            value = float(found["perplexity"])
            before = next((row["perplexity"] for row in rows if row["what"] == against), None)
            worse = None if before is None else 100 * (value / before - 1)
            rows.append({"what": what, "perplexity": value, "worse_percent": worse, "tokens": found["samples"]})

        short: dict[str, Any] = {"window": min(WINDOW, arguments.long), "tokens": arguments.tokens}
        score("float", None, **short, weights="float")
        score("INT8 KV", "float", **short, weights="float", kv="int8")
        score("INT8 weights", "float", **short, weights="int8")
        score("INT4 weights", "float", **short, weights="int4", calib=calib, samples=arguments.samples)
        long: dict[str, Any] = {"window": arguments.long, "tokens": arguments.long_tokens}
        score("float, long windows", None, **long, weights="float", eviction=True)
        score("half of the cache", "float, long windows", **long, budget=arguments.long // 2)
    limits = [
        Limit(name=f"{row['what']}, % worse", value=row["worse_percent"], limit=LIMITS[row["what"]])
        for row in rows
        if row["what"] in LIMITS
    ]
    return finish(
        "llm_accuracy",
        header=["what", "perplexity", "% worse", "tokens"],
        rows=[[row["what"], row["perplexity"], row["worse_percent"], row["tokens"]] for row in rows],
        limits=limits,
        arguments=arguments,
        figures={"rows": rows},
    )


if __name__ == "__main__":
    run_main(main)
