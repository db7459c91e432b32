"""Show a text bundle at work: float against INT8, one page. Used by the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeds.errors import SpecError
from edgeds.files import write_json
from edgeds.pipelines.bert import BertPipeline
from edgeds.report.bench import BenchReport, BenchRequest, run_bench
from edgeds.report.page import Table, write_page
from edgeds.specs import to_json
from edgeds.workshop.outfolder import writing_errors
from edgeds.workshop.show import BENCH_ROUNDS, precisions_of
from edgeds.workshop.textsamples import SENTENCES, long_texts


def measure_text_speed(
    bundle: Path, *, seconds: float, texts: Sequence[str] = (), quiet: bool = False
) -> dict[str, BenchReport]:
    """Texts per second of float and INT8 in alternating rounds, so that a machine that slows down slows both; the best
    round counts. ``texts`` (default: sentences and paragraphs) are embedded together, over and over. Ctrl-C ends it."""
    if not 0 < seconds <= 3600:
        raise SpecError(f"seconds {seconds!r}: give a number above 0, up to 3600")
    payload = list(texts) or [*SENTENCES, *long_texts()]
    best: dict[str, BenchReport] = {}
    for precision in (name for _ in range(BENCH_ROUNDS) for name in precisions_of(bundle)):
        with BertPipeline.from_bundle(bundle, precision=precision) as pipeline:
            report = run_bench(
                pipeline,
                [BenchRequest(payload=payload, frames=len(payload))],
                seconds=seconds / BENCH_ROUNDS,
                warmup_seconds=0.0,
                quiet=quiet,
            )
        if report.interrupted:  # the bench ends its window early; here that means: stop
            raise KeyboardInterrupt
        if precision not in best or report.fps > best[precision].fps:
            best[precision] = report
    return best


def write_text_report(
    folder: Path, reports: Mapping[str, BenchReport], *, model: str, figures: Mapping[str, Any]
) -> Path:
    """Write ``report.html`` (self-contained) and ``report.json`` below ``folder``; returns the page's path.

    ``figures`` are what the recipe's stages gave: ``spearman_float`` and ``spearman_int8`` in points, ``plan``.
    """
    measured = reports.get("int8") or reports["float"]
    rows = [[name, f"{report.fps:.1f}", _points(figures.get(f"spearman_{name}"))] for name, report in reports.items()]
    with writing_errors(folder):
        page = write_page(
            folder / "report.html",
            title=f"{model} on this machine's CPU",
            summary=_summary(model, reports, figures),
            tables=[Table(title="Float and INT8, measured", columns=["model", "texts/s", "Spearman"], rows=rows)],
            facts={
                "device": measured.device,
                "backend": f"{measured.backend}, {measured.threads} threads",
                "date": measured.date,
                "versions": ", ".join(f"{name} {version}" for name, version in measured.versions.items()),
            },
        )
        write_json(folder / "report.json", {"bench": to_json(dict(reports)), **to_json(dict(figures))})
    return page


def _summary(model: str, reports: Mapping[str, BenchReport], figures: Mapping[str, Any]) -> list[str]:
    plain, quantized = reports["float"], reports.get("int8")
    lines = []
    if quantized is not None and plain.fps > 0:
        lines.append(
            f"{model} in INT8 embeds {quantized.fps:.0f} texts per second, {quantized.fps / plain.fps:.2f} times the "
            f"float model ({plain.fps:.0f})."
        )
    else:
        lines.append(f"{model} in float embeds {plain.fps:.0f} texts per second.")
    before, after = figures.get("spearman_float"), figures.get("spearman_int8")
    if before is not None and after is not None:
        lines.append(
            f"Spearman on the test pairs, measured: float {before:.2f}, INT8 {after:.2f} ({after - before:+.2f})."
        )
    plan = figures.get("plan")
    if plan:
        lines.append(
            f"Predicted for {plan['target']}@{plan['mode']}: {plan['precision']}, batch {plan['batch']}, "
            f"{plan['fps']:.0f} texts per second."
        )
    lines.append(
        "Speed is measured end to end: tokens, batches by length, network. These are figures of this CPU; they do not "
        "predict a Jetson."
    )
    return lines


def _points(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}"
