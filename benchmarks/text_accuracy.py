"""Spearman of a sentence encoder in float and in INT8: our default, the autopilot, onnxruntime's quantizer.

    python -m benchmarks.text_accuracy --calib sts-dev.csv --data sts-test.csv

Calibrated on sentences of ``--calib``, whose scores only the autopilot sees, for its search; measured on ``--data``.
Stated limit for the autopilot: at most 0.5 points lost with at least 90 % of the MatMul FLOPs in INT8, in both forms.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Limit, count, finish, make_parser, run_main
from benchmarks.forms import CPU_INT8, FLOAT, TRT_INT8
from benchmarks.peer import PEER, quantize_with_peer
from edgeds.compress.accuracy_limit import Limit as AccuracyLimit
from edgeds.compress.calibset import CalibrationSet
from edgeds.compress.quantize import DEFAULT_METHOD, quantize_model
from edgeds.graph.cost import count_cost
from edgeds.graph.encoder import build_encoder
from edgeds.graph.io import input_specs, load_model, save_model
from edgeds.pipelines.bert.encode import TextEncoder
from edgeds.pipelines.bert.pipeline import BertPipeline
from edgeds.pipelines.tokenizer_file import load_tokenizer
from edgeds.report.textaccuracy import evaluate_text
from edgeds.workshop.textcalib import open_text_set
from edgeds.zoo import fetch_model

MODEL = "minilm-l6"
DROP, SHARE = 0.5, 0.9
TOKENS = 32
"""Length that FLOPs are counted for."""


def spearman(path: Path, folder: Path, data: Path, *, threads: int, limit: int | None = None) -> float:
    """Points of Spearman's correlation on labelled pairs."""
    with BertPipeline.from_model(path, folder, threads=threads, backend="cpu") as pipeline:
        return float(evaluate_text(pipeline, data, limit=limit, quiet=True)["value"])


def matmul_share(path: Path) -> float:
    """Share of the FLOPs of MatMul and Gemm that have INT8 inputs."""
    model = load_model(path)
    layers = count_cost(model, {spec.name: (1, TOKENS) for spec in input_specs(model)}).layers
    linear = [layer for layer in layers if layer.op in ("MatMul", "Gemm")]
    total = sum(layer.flops for layer in linear)
    return sum(layer.flops for layer in linear if layer.precision == "int8") / total if total else 0.0


def open_sentences(model: Path, folder: Path, calib: Path, samples: int) -> CalibrationSet:
    """Sentences of the calibration file, one per run and without padding."""
    encoder = TextEncoder(load_tokenizer(folder), max_length=128)
    chosen, _ = open_text_set(calib, encoder=encoder, specs=input_specs(load_model(model)), task="embed", limit=samples)
    return chosen


def measure_all(arguments: argparse.Namespace, folder: Path, work: Path) -> list[dict[str, Any]]:
    """One row per form."""
    source, threads = work / "float.onnx", arguments.threads
    save_model(build_encoder(folder), source)
    rows: list[dict[str, Any]] = []

    def add(what: str, path: Path) -> None:
        value = spearman(path, folder, arguments.data, threads=threads, limit=arguments.limit)
        rows.append({"what": what, "spearman": value, "share": matmul_share(path)})

    def search(path: Path) -> float:
        return spearman(path, folder, arguments.calib, threads=threads, limit=arguments.limit)

    add(FLOAT, source)
    wanted = AccuracyLimit(max_drop=DROP, measure=search, metric="spearman", min_share=SHARE)
    for name, limit in ((DEFAULT_METHOD, None), ("autopilot", wanted)):
        out, cpu = work / f"{name}.onnx", work / f"{name}.cpu.onnx"
        report = quantize_model(
            source,
            open_sentences(source, folder, arguments.calib, arguments.samples),
            out=out,
            cpu_out=cpu,
            limit=limit,
            threads=threads,
            quiet=arguments.quiet,
        )
        add(f"{TRT_INT8}, {name}", out)
        add(f"{CPU_INT8}, {name}", cpu)
        if report.autopilot is not None:
            print(f"autopilot: {json.dumps(report.autopilot)}", file=sys.stderr)
    if not arguments.no_peer:
        peer = work / "peer.onnx"
        sentences = open_sentences(source, folder, arguments.calib, arguments.samples)
        quantize_with_peer(source, sentences, peer, method="MinMax", total=arguments.samples, quiet=arguments.quiet)
        add(f"{PEER}, MinMax", peer)
    for row in rows:
        row["loss"] = rows[0]["spearman"] - row["spearman"]
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "text_accuracy", about="Spearman of a sentence encoder: float, INT8, autopilot, peer.", data=False
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="scored pairs to measure on")
    parser.add_argument("--calib", type=Path, required=True, metavar="FILE", help="scored pairs to calibrate on")
    parser.add_argument("--samples", type=count, default=200, help="sentences to calibrate on (default 200)")
    parser.add_argument("--limit", type=count, help="measure on the first so many pairs only")
    parser.add_argument("--no-peer", action="store_true", help="leave the peer out")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    folder = Path(arguments.model) if arguments.model else fetch_model(MODEL, quiet=arguments.quiet)
    with tempfile.TemporaryDirectory() as work:
        rows = measure_all(arguments, folder, Path(work))
    limits = []
    for row in rows:
        if row["what"].endswith("autopilot"):
            limits.append(Limit(name=f"points lost, {row['what']}", value=row["loss"], limit=DROP))
        if row["what"] == f"{TRT_INT8}, autopilot":
            limits.append(Limit(name="MatMul FLOPs in INT8, autopilot", value=row["share"], limit=SHARE, at_most=False))
    return finish(
        "text_accuracy",
        header=["what", "Spearman", "points lost", "MatMul FLOPs INT8"],
        rows=[[row["what"], f"{row['spearman']:.2f}", f"{row['loss']:.2f}", f"{row['share']:.1%}"] for row in rows],
        limits=limits,
        arguments=arguments,
        figures={"rows": rows},
    )


if __name__ == "__main__":
    run_main(main)
