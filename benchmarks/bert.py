"""Sentence embeddings on the CPU: throughput on texts of mixed length, INT8 against float, and STS-B accuracy.

    python -m benchmarks.bert --data STSB_DIR --paragraphs wiki.txt [--soak 100000]

``--data`` holds sts-dev.csv and sts-test.csv. Traffic is sentences of STS-B with paragraphs among them, shuffled, from
a fixed seed. Peers run the same FP32 model through the same engine with as many threads: batches of 32 in order of
arrival, padded to their longest; and all texts sorted by length first, as sentence-transformers does.

Stated limits: INT8 at 2 x the first and 1.5 x the second, INT8 at 1.5 x our own float, and 0.5 points of Spearman lost.
With ``--soak`` resident memory grows by less than 50 kB per 1000 sentences once warm.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Limit, count, finish, make_parser, measure_in_turns, memory_mib, ratio, run_main
from benchmarks.memory_soak import slope_kb
from edgeds.engines import Engine, open_engine
from edgeds.errors import SpecError
from edgeds.pipelines.bert import BertPipeline
from edgeds.pipelines.bert.encode import Row, TextEncoder
from edgeds.pipelines.bert.feeds import build_feeds
from edgeds.progress import track
from edgeds.report.textaccuracy import evaluate_text
from edgeds.report.textdata import read_pairs
from edgeds.workshop.textpackage import create_text_bundle

BATCH = 32
PARAGRAPH_SHARE = 0.25
FLOAT, INT8, NAIVE, SORTED = "edgeds float", "edgeds INT8", "naive, padded to longest", "sorted by length, FP32"
SOAK_STEP = 1000


def find_folder(given: str | None, *, quiet: bool) -> Path:
    """The checkpoint or ONNX to measure; MiniLM from the zoo when none is given."""
    if given is None:
        from edgeds.zoo import fetch_model

        return fetch_model("minilm-l6", quiet=quiet)
    if not Path(given).exists():
        raise SpecError(f"--model {given}: no such file or folder")
    return Path(given)


def make_traffic(data: Path, paragraphs: Path | None, *, number: int) -> list[str]:
    """``number`` texts in a random order that is always the same."""
    sentences = [text for pair in read_pairs(data / "sts-test.csv") for text in (pair.first, pair.second)]
    long: list[str] = []
    if paragraphs is not None:
        lines = paragraphs.read_text(encoding="utf-8").splitlines()
        long = [line.strip() for line in lines if len(line.split()) >= 30]
    many = round(number * PARAGRAPH_SHARE) if long else 0
    random = np.random.default_rng(0)
    chosen = [sentences[at] for at in random.integers(0, len(sentences), number - many)]
    chosen += [long[at] for at in random.integers(0, len(long), many)] if many else []
    return [chosen[at] for at in random.permutation(len(chosen))]


def pad_and_run(engine: Engine, encoder: TextEncoder, texts: Sequence[str], *, by_length: bool) -> None:
    """What the peers do: batches of 32, each padded to its longest text."""
    rows: list[Row] = []
    if by_length:
        rows = [row for item in encoder.encode(texts) for row in item.rows]
        rows.sort(key=len, reverse=True)
    for start in range(0, len(texts), BATCH):
        batch = rows[start : start + BATCH] if by_length else []
        batch = batch or [row for item in encoder.encode(texts[start : start + BATCH]) for row in item.rows]
        length = max(map(len, batch))
        engine.infer(build_feeds(batch, engine.inputs, length=length, pad_id=encoder.pad_id))


def measure_speed(bundle: Path, texts: Sequence[str], arguments: argparse.Namespace) -> dict[str, float]:
    """Texts per second of each way, taken in turns."""
    options: dict[str, Any] = {"backend": "onnxruntime", "threads": arguments.threads}
    with (
        BertPipeline.from_bundle(bundle, precision="float", **options) as plain,
        BertPipeline.from_bundle(bundle, precision="int8", **options) as quantized,
        open_engine(bundle, precision="float", **options) as engine,
    ):
        calls: dict[str, Callable[[], Any]] = {
            NAIVE: lambda: pad_and_run(engine, plain.encoder, texts, by_length=False),
            SORTED: lambda: pad_and_run(engine, plain.encoder, texts, by_length=True),
            FLOAT: lambda: plain.embed(texts),
            INT8: lambda: quantized.embed(texts),
        }
        times = measure_in_turns(calls, rounds=arguments.rounds, what="embedding", quiet=arguments.quiet)
    by_clock = {name: len(texts) / item.wall_s for name, item in times.items()}
    return {**by_clock, **{f"{name}, CPU time": len(texts) / item.cpu_s for name, item in times.items()}}


def measure_accuracy(bundle: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Spearman on the STS-B test set in points, by precision."""
    found = {}
    for precision in ("float", "int8"):
        with BertPipeline.from_bundle(
            bundle, precision=precision, backend="onnxruntime", threads=arguments.threads
        ) as pipeline:
            data, limit = arguments.data / "sts-test.csv", arguments.pairs
            found[precision] = float(evaluate_text(pipeline, data, limit=limit, quiet=arguments.quiet)["spearman"])
    return found


def soak(bundle: Path, texts: Sequence[str], arguments: argparse.Namespace) -> list[float]:
    """Resident MiB after every 1000 of ``--soak`` sentences, none of them equal."""

    def endless() -> Iterator[str]:
        for number, text in enumerate(itertools.cycle(texts)):
            yield f"{text} {number}"

    resident = []
    with BertPipeline.from_bundle(bundle, backend="onnxruntime", threads=arguments.threads) as pipeline:
        stream = pipeline.embed_each(itertools.islice(endless(), arguments.soak))
        shown = track(stream, what="soaking", total=arguments.soak, unit="text", quiet=arguments.quiet)
        for number, _ in enumerate(shown, start=1):
            if number % SOAK_STEP == 0:
                resident.append(memory_mib())
    return resident


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "bert", about="Sentence embeddings on the CPU: speed on mixed lengths, accuracy, memory.", data=False
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder of sts-dev.csv and sts-test.csv"
    )
    parser.add_argument("--paragraphs", type=Path, metavar="FILE", help="text file with a paragraph per line")
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="measure this bundle instead of making one")
    parser.add_argument("--texts", type=count, default=256, help="texts of one timed run (default 256)")
    parser.add_argument("--rounds", type=count, default=3, help="timed runs of each way (default 3)")
    parser.add_argument("--samples", type=count, default=100, help="texts to calibrate on (default 100)")
    parser.add_argument("--pairs", type=count, metavar="N", help="only the first N pairs for accuracy")
    parser.add_argument("--soak", type=count, metavar="N", help="also embed N sentences and watch memory")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    model = find_folder(arguments.model, quiet=arguments.quiet)
    texts = make_traffic(arguments.data, arguments.paragraphs, number=arguments.texts)
    with tempfile.TemporaryDirectory() as folder:
        bundle = arguments.bundle or create_text_bundle(
            model,
            out=Path(folder) / "bundle",
            task="embed",
            calib=arguments.data / "sts-dev.csv",
            samples=arguments.samples,
            quiet=arguments.quiet,
        )
        speed = measure_speed(bundle, texts, arguments)
        accuracy = measure_accuracy(bundle, arguments)
        resident = soak(bundle, texts, arguments) if arguments.soak else []
    rows = [
        [name, speed[name], speed[f"{name}, CPU time"], ratio(speed[name], speed[NAIVE]), value]
        for name, value in ((NAIVE, None), (SORTED, None), (FLOAT, accuracy["float"]), (INT8, accuracy["int8"]))
    ]
    limits = [
        Limit(name=f"{INT8} / {NAIVE}", value=ratio(speed[INT8], speed[NAIVE]), limit=2.0, at_most=False),
        Limit(name=f"{INT8} / {SORTED}", value=ratio(speed[INT8], speed[SORTED]), limit=1.5, at_most=False),
        Limit(name=f"{INT8} / {FLOAT}", value=ratio(speed[INT8], speed[FLOAT]), limit=1.5, at_most=False),
        Limit(name="points of Spearman lost by INT8", value=accuracy["float"] - accuracy["int8"], limit=0.5),
    ]
    if resident:
        limits.append(Limit(name="growth per 1000 sentences, kB", value=slope_kb(resident), limit=50.0))
    header = ["way", "texts/s", "texts/CPU s", "x naive", "Spearman"]
    figures = {
        "rows": [dict(zip(header, row, strict=True)) for row in rows],
        "resident_mib": resident,
        "texts": arguments.texts,
    }
    return finish("bert", header=header, rows=rows, limits=limits, arguments=arguments, figures=figures)


if __name__ == "__main__":
    run_main(main)
