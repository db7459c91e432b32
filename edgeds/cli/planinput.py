"""What ``edgeds plan`` reads: models, bundles and cost files as candidates of a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.cli.predict import bundle_work, load_work
from edgeds.errors import SpecError

if TYPE_CHECKING:
    from edgeds.boards.cost_file import ModelWork
    from edgeds.boards.plan_spec import Candidate
    from edgeds.bundle import Bundle

DEFAULT_PRECISIONS = ("fp16", "int8")


def read_candidates(
    path: Path, *, precisions: list[str] | None = None, accuracy: float | None = None
) -> list[Candidate]:
    """The ways to run a model, a bundle or a cost file; ``accuracy`` in points, where the user knows it.

    Raises SpecError, ModelError or BundleError that names the file.
    """
    if path.is_dir() or path.suffix.lower() == ".zip":
        from edgeds.bundle import open_bundle

        with open_bundle(path) as bundle:
            found = bundle_candidates(bundle)
        chosen = [one for one in found if precisions is None or one.precision in precisions]
        if not chosen:
            have = ", ".join(one.precision for one in found)
            raise SpecError(f"{path}: the bundle has no form in {', '.join(precisions or ())}; it has {have}")
        return [replace(one, accuracy=accuracy) if accuracy is not None else one for one in chosen]
    return work_candidates(load_work(path, {}), name=path.stem, precisions=precisions, accuracy=accuracy)


def usual_batches(path: Path, batches: tuple[int, ...]) -> tuple[int, ...]:
    """The batches to try where none were named: of a bundle up to its largest, since it serves no larger ones.
    Only the manifest is looked at; the bundle is checked when its candidates are read."""
    if not (path.is_dir() or path.suffix.lower() == ".zip"):
        return batches
    from edgeds.bundle.archive import peek_manifest
    from edgeds.bundle.manifest import read_manifest

    most = (read_manifest(path) if path.is_dir() else peek_manifest(path)[0]).max_batch
    return (*(batch for batch in batches if batch < most), most)


def work_candidates(
    work: ModelWork, *, name: str, precisions: list[str] | None = None, accuracy: float | None = None
) -> list[Candidate]:
    """A model alone: in each precision, INT8 with the note that it is not quantized yet."""
    from edgeds.boards.plan_spec import Candidate

    note = "INT8 is assumed for every layer with weights: quantize the model and measure its accuracy"
    return [
        Candidate(
            name=name,
            precision=precision,
            work=work,
            accuracy=accuracy,
            note=note if precision == "int8" and not work.is_quantized else None,
        )
        for precision in dict.fromkeys(precisions or DEFAULT_PRECISIONS)
    ]


def bundle_candidates(bundle: Bundle) -> list[Candidate]:
    """The forms that a bundle has, with the accuracy and the device measurements stored in it."""
    from edgeds.boards.plan_file import MEASURED_NAME, read_measured
    from edgeds.boards.plan_spec import Candidate
    from edgeds.boards.refit import SCALE_NAME, read_scale
    from edgeds.bundle.manifest import ENGINES_FOLDER

    manifest, work = bundle.manifest, bundle_work(bundle)
    stored = bundle.root / ENGINES_FOLDER / MEASURED_NAME
    measured = read_measured(stored) if stored.is_file() else ()
    factors = bundle.root / ENGINES_FOLDER / SCALE_NAME
    scale = read_scale(factors) if factors.is_file() else None
    accuracy = manifest.accuracy or {}
    found = []
    for precision, label, variants in (
        ("int8", "int8", {"int8", "int8_fp16"}),
        ("fp16", "float", {"float16", "float"}),
        ("fp32", "float", {"float"}),
    ):
        if not variants & set(manifest.models):
            continue
        share = accuracy.get(f"{label}_map50_95")
        found.append(
            Candidate(
                name=bundle.source.name,
                precision=precision,
                work=work,
                accuracy=100 * share if isinstance(share, float) else None,
                measured=tuple(row for row in measured if row.precision == precision),
                scale=scale,
            )
        )
    return found


def parse_variant(text: str) -> tuple[Path, float | None]:
    """``FILE`` or ``FILE=ACCURACY``. Raises SpecError."""
    name, sign, points = text.rpartition("=")
    if not sign:
        return Path(text), None
    try:
        return Path(name), float(points)
    except ValueError as error:
        raise SpecError(f"--variant {text!r}: expected FILE or FILE=ACCURACY, as in pruned.onnx=40.1") from error
