"""Show a bundle at work: annotated pictures, float against INT8, one page. Used by the demo and the recipes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeds.errors import SpecError
from edgeds.files import atomic_dir, write_json
from edgeds.imagefile import read_image
from edgeds.pipelines.yolo import Result, YoloPipeline
from edgeds.progress import track
from edgeds.report.bench import BenchReport, BenchRequest, run_bench
from edgeds.report.page import Picture, Table, write_page
from edgeds.runtime import BatchPolicy
from edgeds.specs import Resolution, to_json
from edgeds.workshop.outfolder import check_folder, writing_errors

BENCH_ROUNDS = 3
NAME_CHARS = 80


def annotate_photos(
    bundle: Path, photos: Sequence[Path], folder: Path, *, quiet: bool = True
) -> tuple[list[Path], list[Result]]:
    """Run the bundle on photographs and save annotated copies as ``folder``, in place of those of an earlier run.

    One result per photograph; those that cannot be read have ``error`` set and no picture. Raises SpecError when the
    folder holds other things, BundleError when it cannot be written.
    """
    earlier = {path.name for path in folder.glob("*.jpg") if re.match(r"\d{2,}-", path.name)}
    check_folder(folder, replace=True, ours=earlier, what="an earlier run")
    pictures: list[Path] = []
    results: list[Result] = []
    with (
        YoloPipeline.from_bundle(bundle) as pipeline,
        writing_errors(folder),
        atomic_dir(folder, replace=True) as temporary,
    ):
        found = track(pipeline.predict_each(photos), what="detecting", total=len(photos), unit="image", quiet=quiet)
        for number, (photo, result) in enumerate(zip(photos, found, strict=True)):
            results.append(result)
            if result.error is None:
                name = f"{number:02d}-{photo.stem[:NAME_CHARS]}.jpg"
                result.save(temporary / name)
                pictures.append(folder / name)
    return pictures, results


def measure_speed(bundle: Path, photos: Sequence[Path], *, seconds: float, quiet: bool) -> dict[str, BenchReport]:
    """Float and INT8 in alternating rounds, so that a machine that slows down slows both; the best round counts.

    ``seconds`` of measuring per precision. A bundle without INT8 models gives ``float`` alone. Ctrl-C ends all of it.
    """
    if not 0 < seconds <= 3600:
        raise SpecError(f"seconds {seconds!r}: give a number above 0, up to 3600")
    images = [read_image(path) for path in photos]
    best: dict[str, BenchReport] = {}
    policy = BatchPolicy(max_batch=4, max_delay_ms=5, on_full="block")
    for precision in (p for _ in range(BENCH_ROUNDS) for p in precisions_of(bundle)):
        with YoloPipeline.from_bundle(bundle, precision=precision, policy=policy) as pipeline:
            report = run_bench(
                pipeline,
                [BenchRequest(payload=image) for image in images],
                seconds=seconds / BENCH_ROUNDS,
                warmup_seconds=0.2,
                concurrency=4,
                quiet=quiet,
            )
        if report.interrupted:  # the bench ends its window early; here that means: stop
            raise KeyboardInterrupt
        if precision not in best or report.fps > best[precision].fps:
            best[precision] = report
    return best


def precisions_of(bundle: Path) -> tuple[str, ...]:
    """``float``, and ``int8`` where the bundle has a form of it for the CPU."""
    from edgeds.bundle.manifest import read_manifest

    models = read_manifest(bundle).models
    return tuple(label for label, variant in (("float", "float"), ("int8", "cpu_int8")) if variant in models)


def write_run_report(
    folder: Path,
    sizes: Sequence[Resolution],
    pictures: Sequence[Path],
    results: Sequence[Result],
    reports: Mapping[str, BenchReport],
    *,
    model: str,
    accuracy: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``report.html`` (self-contained) and ``report.json`` below ``folder``; returns the page's path."""
    counts = Counter(result.label(index) for result in results for index in range(len(result)))
    found = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [result for result in results if result.error is None]
    measured = reports.get("int8") or reports["float"]
    with writing_errors(folder):
        page = write_page(
            folder / "report.html",
            title=f"{model} on this machine's CPU",
            summary=_summary(model, reports, accuracy, objects=counts.total(), pictures=len(pictures)),
            tables=[_speed_table(reports), Table(title="Objects found", columns=["class", "count"], rows=_rows(found))],
            pictures=[
                Picture(path=path, caption=f"{path.stem}: {_counted(result)}")
                for path, result in zip(pictures, shown, strict=True)
            ],
            facts={
                "device": measured.device,
                "backend": f"{measured.backend}, {measured.threads} threads",
                "resolutions": ", ".join(map(str, sizes)),
                "date": measured.date,
                "versions": ", ".join(f"{name} {version}" for name, version in measured.versions.items()),
            },
        )
        data = {"bench": to_json(reports), "objects": dict(found), "sizes": to_json(list(sizes)), "accuracy": accuracy}
        write_json(folder / "report.json", data)
    return page


def _summary(
    model: str,
    reports: Mapping[str, BenchReport],
    accuracy: Mapping[str, Any] | None,
    *,
    objects: int,
    pictures: int,
) -> list[str]:
    plain, quantized = reports["float"], reports.get("int8")
    found = f"found {objects} objects on {pictures} pictures"
    if quantized is None:
        lines = [f"{model} in float {found} and runs at {plain.fps:.1f} frames per second."]
    else:
        ratio = f", {quantized.fps / plain.fps:.2f} times the float model ({plain.fps:.1f})" if plain.fps > 0 else ""
        lines = [f"{model} in INT8 {found} and runs at {quantized.fps:.1f} frames per second{ratio}."]
    if accuracy and "int8_map50_95" in accuracy:
        before, after = 100 * accuracy["float_map50_95"], 100 * accuracy["int8_map50_95"]
        lines.append(
            f"mAP50-95 on {accuracy['images']} labelled images of {accuracy['data']}, measured on this CPU: float "
            f"{before:.2f}, INT8 {after:.2f} ({after - before:+.2f} points)."
        )
    lines.append(
        f"Speed is measured end to end: letterbox, network in batches by resolution, decoding and suppression, with "
        f"{plain.concurrency} pictures in flight, so latency includes waiting for the others. These are figures of "
        "this CPU; they do not predict a Jetson."
    )
    return lines


def _speed_table(reports: Mapping[str, BenchReport]) -> Table:
    rows = []
    for name, report in reports.items():
        latencies = (report.latency_p50_ms, report.latency_p95_ms, report.latency_p99_ms)
        rows.append(
            [name, f"{report.fps:.1f}", *("-" if ms is None or math.isnan(ms) else f"{ms:.1f}" for ms in latencies)]
        )
    return Table(title="Speed, measured", columns=["model", "frames/s", "p50 ms", "p95 ms", "p99 ms"], rows=rows)


def _rows(found: Sequence[tuple[str, int]]) -> list[list[str]]:
    return [[label, str(count)] for label, count in found]


def _counted(result: Result) -> str:
    counts = Counter(result.label(index) for index in range(len(result)))
    return ", ".join(f"{count} × {label}" for label, count in counts.most_common()) or "nothing found"
