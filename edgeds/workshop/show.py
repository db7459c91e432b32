"""Show a bundle at work: annotated pictures, float against INT8, one page. Used by the demo and the recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeds.files import write_json
from edgeds.imagefile import read_image
from edgeds.pipelines.yolo import Result, YoloPipeline
from edgeds.report.bench import BenchReport, BenchRequest, run_bench
from edgeds.report.page import Picture, Table, write_page
from edgeds.runtime import BatchPolicy
from edgeds.specs import Resolution, to_json

BENCH_ROUNDS = 3


def annotate_photos(bundle: Path, photos: Sequence[Path], folder: Path) -> tuple[list[Path], list[Result]]:
    """Run the bundle on photographs and save annotated copies; unreadable ones are left out of the pictures."""
    with YoloPipeline.from_bundle(bundle) as pipeline:
        results = pipeline.predict(photos)
    pictures = []
    for number, (photo, result) in enumerate(zip(photos, results, strict=True)):
        if result.error is None:
            pictures.append(result.save(folder / f"{number:02d}-{photo.stem}.jpg"))
    return pictures, results


def measure_speed(bundle: Path, photos: Sequence[Path], *, seconds: float, quiet: bool) -> dict[str, BenchReport]:
    """Float and INT8 in alternating rounds, so that a machine that slows down slows both; the best round counts."""
    images = [read_image(path) for path in photos]
    best: dict[str, BenchReport] = {}
    policy = BatchPolicy(max_batch=4, max_delay_ms=5, on_full="block")
    for _ in range(BENCH_ROUNDS):
        for precision in ("float", "int8"):
            with YoloPipeline.from_bundle(bundle, precision=precision, policy=policy) as pipeline:
                report = run_bench(
                    pipeline,
                    [BenchRequest(payload=image) for image in images],
                    seconds=seconds / BENCH_ROUNDS,
                    warmup_seconds=0.2,
                    concurrency=4,
                    quiet=quiet,
                )
            if precision not in best or report.fps > best[precision].fps:
                best[precision] = report
    return best


def write_run_report(
    folder: Path,
    sizes: Sequence[Resolution],
    pictures: Sequence[Path],
    results: Sequence[Result],
    reports: dict[str, BenchReport],
    *,
    model: str,
    accuracy: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``report.html`` (self-contained) and ``report.json`` below ``folder``; returns the page's path."""
    ratio = reports["int8"].fps / reports["float"].fps
    any_report = reports["int8"]
    count = sum(len(result) for result in results)
    summary = [
        f"{model} in INT8 found {count} objects on {len(pictures)} photographs and runs at "
        f"{any_report.fps:.1f} frames per second on this machine's CPU, {ratio:.2f} times the float model "
        f"({reports['float'].fps:.1f}).",
        "Measured end to end: letterbox, network in batches by resolution, decoding and suppression. These are figures "
        "of this CPU; they do not predict a Jetson.",
    ]
    rows = [
        [
            name,
            f"{r.fps:.1f}",
            f"{r.latency_p50_ms or 0:.1f}",
            f"{r.latency_p95_ms or 0:.1f}",
            f"{r.latency_p99_ms or 0:.1f}",
        ]
        for name, r in reports.items()
    ]
    if accuracy and "int8_map50_95" in accuracy:
        summary.append(
            f"mAP50-95 on {accuracy['images']} labelled images of {accuracy['data']}, measured on this CPU: float "
            f"{100 * accuracy['float_map50_95']:.2f}, INT8 {100 * accuracy['int8_map50_95']:.2f}."
        )
    labels: dict[str, int] = {}
    for result in results:
        for index in result.cls:
            label = result.names.get(int(index), str(int(index)))
            labels[label] = labels.get(label, 0) + 1
    found = sorted(labels.items(), key=lambda item: (-item[1], item[0]))
    columns = ["model", "frames/s", "p50 ms", "p95 ms", "p99 ms"]
    page = write_page(
        folder / "report.html",
        title=f"edgeds demo: {model}",
        summary=summary,
        tables=[
            Table(title="Speed, measured", columns=columns, rows=rows),
            Table(title="Objects found", columns=["class", "count"], rows=[[k, str(v)] for k, v in found]),
        ],
        pictures=[Picture(path=path, caption=path.stem) for path in pictures],
        facts={
            "device": any_report.device,
            "backend": any_report.backend,
            "threads": any_report.threads,
            "resolutions": ", ".join(map(str, sizes)),
            "date": any_report.date,
            **any_report.versions,
        },
    )
    write_json(
        folder / "report.json", {"bench": to_json(reports), "objects": dict(found), "sizes": to_json(list(sizes))}
    )
    return page
