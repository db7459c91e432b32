"""A text model and texts in, bundle out: build the graph, quantize, check, add the tokenizer, write."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto

from edgeds.bundle import Manifest, write_bundle
from edgeds.compress.accuracy_limit import Limit
from edgeds.compress.quantize import DEFAULT_METHOD, DEFAULT_PERCENTILE
from edgeds.errors import CalibrationError, ModelError, SpecError
from edgeds.graph.io import input_specs, load_model, output_specs
from edgeds.graph.view import GraphView
from edgeds.pipelines.bert.encode import TextEncoder
from edgeds.pipelines.bert.feeds import check_inputs
from edgeds.pipelines.bert.head import TEXT_TASKS, TextHead, choose_head
from edgeds.pipelines.bert.lengths import default_lengths, plan_lengths
from edgeds.pipelines.bert.opening import MAX_BATCH, TOKENIZER_FOLDER
from edgeds.pipelines.tokenizer_file import TOKENIZER_FILES, load_tokenizer
from edgeds.report.textaccuracy import evaluate_text
from edgeds.specs import Budget, to_json
from edgeds.workshop.describe import build_manifest, describe_calibration
from edgeds.workshop.outfolder import claim_folder, writing_errors
from edgeds.workshop.parts import (
    FLOAT_NAME,
    BundleParts,
    bundle_entries,
    count_parts,
    float_parts,
    quantize_parts,
    work_folder,
)
from edgeds.workshop.planning import PlannedParts, parse_target, plan_parts
from edgeds.workshop.textcalib import open_text_set

MAX_LENGTHS = 10
COST_LENGTH = 128
"""Tokens that layer costs are counted for (fewer where the model takes fewer)."""
WEIGHT_NAMES = ("model.safetensors", "model.safetensors.index.json", "config.json")
METRICS = {"embed": "spearman", "classify": "accuracy", "tag": "f1", "answer": "f1"}


@dataclass(frozen=True, kw_only=True)
class _TextModel:
    """The model before it is quantized, and what goes with it."""

    model: ModelProto
    head: TextHead
    source: Path
    tokenizer: Path

    def encoder(self) -> TextEncoder:
        return TextEncoder(
            load_tokenizer(self.tokenizer), max_length=self.head.max_length, vocab_size=self.head.vocab_size
        )


def create_text_bundle(
    model: str | Path,
    *,
    out: str | Path,
    task: str | None = None,
    tokenizer: str | Path | None = None,
    calib: Any = None,
    max_batch: int = MAX_BATCH,
    method: str = DEFAULT_METHOD,
    percentile: float = DEFAULT_PERCENTILE,
    samples: int | None = None,
    names: Mapping[int, str] | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
    float_only: bool = False,
    evaluate: str | Path | None = None,
    max_drop: float | None = None,
    target: str | None = None,
    budget: Budget | None = None,
    license: str | None = None,
    replace: bool = False,
    quiet: bool = False,
) -> Path:
    """Quantize a text model over ``calib`` and pack it with its tokenizer; returns the bundle's folder.

    ``model`` is the folder of a Hugging Face checkpoint (an ONNX graph is built from it) or an ONNX encoder;
    ``tokenizer`` a folder or file, by default beside the model. ``task`` (embed, classify, tag, answer), ``pooling``,
    ``normalize``, ``names`` (labels) and ``max_length`` default to what the model says. ``calib`` is what
    ``textcalib.open_text_set`` takes. With ``evaluate`` (a labelled file) the accuracy of float and INT8 is measured
    and stored; with ``max_drop`` points of it allowed to be lost, weights and layers are fitted until that holds, and
    nothing is written when it does not. ``license`` goes into the manifest where the model does not state one.

    Raises SpecError for arguments that do not fit, ModelError, CalibrationError, EngineMismatch for another model's
    tokenizer, and BundleError when ``out`` cannot be written; nothing is left behind on failure.
    """
    _check(task, calib=calib, float_only=float_only, max_batch=max_batch, evaluate=evaluate, max_drop=max_drop)
    board, folder_out = parse_target(target, budget=budget), Path(out)
    with claim_folder(folder_out, replace=replace, ours=bundle_entries(folder_out), what="a bundle"):
        given: dict[str, Any] = {"tokenizer": tokenizer, "names": names, "pooling": pooling, "normalize": normalize}
        found = _open_model(Path(model), task=task, limit=max_length, **given)
        encoder = found.encoder()
        with work_folder() as folder:
            parts = float_parts(found.model, folder, name="model.onnx" if float_only else FLOAT_NAME)
            if not float_only:
                specs, work = input_specs(found.model), found.head.task
                chosen, lengths = open_text_set(calib, encoder=encoder, specs=specs, task=work, limit=samples)
                found = _with_lengths(found, lengths)
                how: dict[str, Any] = {"method": method, "percentile": percentile, "target": target, "quiet": quiet}
                limit = _limit(found, evaluate, max_drop)
                quantize_parts(parts, parts.path("float"), chosen, folder, limit=limit, **how)
            if evaluate is not None:
                _measure(parts, found, Path(evaluate), max_drop=max_drop, quiet=quiet)
            cost = count_parts(parts, shapes=_cost_shapes(found))
            planned = plan_parts(
                board, cost=cost, accuracy=parts.accuracy, budget=budget, sizes=(), max_batch=max_batch
            )
            manifest = _manifest(found, parts, planned=planned, max_batch=max_batch, license=license)
            parts.files |= _tokenizer_files(found.tokenizer)
            with writing_errors(folder_out):
                return write_bundle(folder_out, files=parts.files, manifest=manifest, replace=replace)


def _manifest(
    found: _TextModel, parts: BundleParts, *, planned: PlannedParts, max_batch: int, license: str | None
) -> Manifest:
    made = build_manifest(
        found.model,
        source=found.source,
        task=found.head.task,
        models=parts.models,
        setup=None,
        names=found.head.id2label,
        max_batch=_fixed_batch(found.model) or max_batch,
        calibration=describe_calibration(parts.report, notes=parts.notes) if parts.report else None,
        accuracy=parts.accuracy,
        planned=planned,
        speedup=parts.speedup,
    )
    known = license if license and made.license == "unknown" else made.license
    return dataclasses.replace(made, head=to_json(found.head), license=known)


def _with_lengths(found: _TextModel, lengths: Sequence[int]) -> _TextModel:
    """The model with padded lengths to serve that suit the calibration texts, where there are texts.

    Each of the usual lengths counts as one more text: what is served may be longer than what was calibrated with.
    """
    if not lengths:
        return found
    limit = found.head.max_length
    planned = plan_lengths([*lengths, *default_lengths(limit)], max_length=limit, max_buckets=MAX_LENGTHS)
    return dataclasses.replace(found, head=dataclasses.replace(found.head, lengths=planned))


def _open_model(
    source: Path,
    *,
    task: str | None,
    tokenizer: str | Path | None,
    names: Mapping[int, str] | None,
    pooling: str | None,
    normalize: bool | None,
    limit: int | None,
) -> _TextModel:
    if source.is_dir():
        from edgeds.graph.encoder import build_encoder

        model = build_encoder(source, head=task, pooling=pooling, normalize=normalize)
        # Pooled and scaled inside the graph, as its metadata says.
        pooling, normalize = None, None
        weights = next((source / name for name in WEIGHT_NAMES if (source / name).is_file()), source / WEIGHT_NAMES[-1])
    else:
        model, weights = load_model(source), source
    metadata = {item.key: item.value for item in model.metadata_props}
    head = choose_head(
        output_specs(model),
        metadata=metadata,
        task=task,
        pooling=pooling,
        normalize=normalize,
        id2label=names,
        max_length=limit,
    )
    fixed = check_inputs(input_specs(model))
    if fixed is not None and fixed < head.max_length:
        head = dataclasses.replace(head, max_length=fixed)
    stated = metadata.get("edgeds.max_length", "")
    if limit is not None and stated.isdecimal() and limit > int(stated):
        raise SpecError(f"--max-length {limit}: the model takes at most {stated} tokens")
    if head.vocab_size is None:
        head = dataclasses.replace(head, vocab_size=_vocabulary(model))
    place = Path(tokenizer) if tokenizer is not None else (source if source.is_dir() else source.parent)
    return _TextModel(model=model, head=head, source=weights, tokenizer=place)


def _vocabulary(model: ModelProto) -> int | None:
    """Rows of the table that ``input_ids`` index, for graphs that do not state it."""
    view = GraphView(model, copy=False)
    names = {"input_ids", *(node.output[0] for node in view.consumers("input_ids") if node.op_type == "Cast")}
    for name in names:
        for node in view.consumers(name):
            table = view.constant(node.input[0]) if node.op_type == "Gather" and node.input[1] == name else None
            if table is not None and table.ndim:
                return int(table.shape[0])
    return None


def _limit(found: _TextModel, evaluate: str | Path | None, max_drop: float | None) -> Limit | None:
    if max_drop is None or evaluate is None:
        return None

    def measure(path: Path) -> float:
        return float(_evaluate(path, found, Path(evaluate), quiet=True)["value"])

    return Limit(max_drop=max_drop, measure=measure, metric=METRICS[found.head.task])


def _evaluate(path: Path, found: _TextModel, data: Path, *, quiet: bool) -> dict[str, Any]:
    from edgeds.engines import open_engine
    from edgeds.pipelines.bert.opening import open_engine_pipeline

    with (
        open_engine(path, backend="onnxruntime") as engine,
        open_engine_pipeline(engine, tokenizer=found.tokenizer, head=found.head) as pipeline,
    ):
        return evaluate_text(pipeline, data, quiet=quiet)


def _measure(parts: BundleParts, found: _TextModel, data: Path, *, max_drop: float | None, quiet: bool) -> None:
    """Add the accuracy of what this machine runs: float, and the CPU form of INT8."""
    parts.accuracy |= {"data": data.name}
    values: dict[str, float] = {}
    for label, variant in (("float", "float"), ("int8", "cpu_int8")):
        if variant in parts.models:
            scores = _evaluate(parts.path(variant), found, data, quiet=quiet)
            values[label] = float(scores["value"])
            parts.accuracy |= {"metric": scores["metric"], f"{label}_{scores['metric']}": values[label]}
            parts.accuracy["eval_samples"] = scores["samples"]
    lost = values["float"] - values.get("int8", values["float"])
    if max_drop is not None and lost > max_drop:
        raise CalibrationError(
            f"INT8 loses {lost:.2f} points of {parts.accuracy['metric']} ({values['float']:.2f} to "
            f"{values['int8']:.2f}), more than the {max_drop:g} allowed; try another --method or more calibration texts"
        )


def _cost_shapes(found: _TextModel) -> dict[str, tuple[int, ...]]:
    """One text of usual length."""
    length = min(COST_LENGTH, found.head.max_length)
    fixed = check_inputs(input_specs(found.model))
    batch = _fixed_batch(found.model) or 1
    return {spec.name: (batch, fixed or length) for spec in input_specs(found.model)}


def _fixed_batch(model: ModelProto) -> int | None:
    batch = input_specs(model)[0].shape[0]
    return batch if isinstance(batch, int) else None


def _tokenizer_files(place: Path) -> dict[str, Path | bytes]:
    folder = place if place.is_dir() else place.parent
    names = TOKENIZER_FILES if place.is_dir() else (place.name, *TOKENIZER_FILES[2:])
    files: dict[str, Path | bytes] = {}
    for name in names:
        if (folder / name).is_file():
            known = name if name in TOKENIZER_FILES else TOKENIZER_FILES[0 if name.endswith(".json") else 1]
            files[f"{TOKENIZER_FOLDER}/{known}"] = folder / name
    if not files:
        raise ModelError(f"{place}: the tokenizer's files are gone")
    return files


def _check(
    task: str | None, *, calib: Any, float_only: bool, max_batch: int, evaluate: Any, max_drop: float | None
) -> None:
    if task is not None and task not in TEXT_TASKS:
        raise SpecError(f"--task {task!r}: the text tasks are {', '.join(TEXT_TASKS)}")
    if calib is None and not float_only:
        raise SpecError("calibration texts are needed for INT8; give --calib PATH, or --float-only to pack without")
    if calib is not None and float_only:
        raise SpecError("--float-only packs the model as it is; leave --calib out, or leave --float-only out for INT8")
    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or not 1 <= max_batch <= 4096:
        raise SpecError(f"--max-batch {max_batch!r}: need a whole number from 1 to 4096")
    if max_drop is not None and (evaluate is None or float_only):
        raise SpecError("--max-drop limits what INT8 loses on labelled texts; give --eval FILE, without --float-only")
    if max_drop is not None and not (math.isfinite(max_drop) and max_drop >= 0):
        raise SpecError(f"--max-drop {max_drop}: give points, 0 or more (0.5 allows 82.0 to become 81.5)")
    if evaluate is not None and not Path(evaluate).is_file():
        raise SpecError(f"{evaluate}: no such file; --eval takes a labelled file")
