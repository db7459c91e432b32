"""Recover a pruned or quantized model by learning from its own dense original, on samples without labels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from edgeds.compress.calibread import takes_images
from edgeds.compress.calibset import Feeds
from edgeds.compress.fakequant import open_student
from edgeds.compress.quantize import prepare_float
from edgeds.compress.recover_loss import plan_targets
from edgeds.compress.recover_options import MAX_SAMPLES_MIB, RecoverOptions
from edgeds.compress.recover_train import Lesson, Trainer
from edgeds.compress.torch_graph import TorchGraph
from edgeds.compress.torch_lib import choose_device, import_torch
from edgeds.errors import CalibrationError, ModelError, SpecError
from edgeds.files import read_json, real_path, refuse_special, sha256_file
from edgeds.graph.io import input_specs, parse_names, save_model
from edgeds.graph.session import open_session, runtime_errors
from edgeds.specs import to_json

MIN_SAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class RecoverReport:
    """What training did. ``loss`` figures are of samples that were not trained on; lower is better, 0 is the teacher.

    ``kept`` is False when no step helped on those samples: the model is then the one that came in.
    """

    model: str
    teacher: str
    steps: int
    seconds: float
    samples: int
    held_out: int
    targets: int
    parameters: int
    quantized: bool
    device: str
    loss_before: float
    loss_after: float
    kept: bool
    losses: tuple[float, ...]
    notes: tuple[str, ...] = ()


def recover_model(
    student: str | Path,
    *,
    teacher: str | Path,
    samples: Any,
    out: str | Path,
    options: RecoverOptions | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> RecoverReport:
    """Train ``student`` to give what ``teacher`` gives and write it to ``out``; same inputs and outputs.

    Args:
        student: the pruned model, or a Q/DQ model (its rounding is then part of training: QAT; see ``options.qat``).
        teacher: the float model it was made from; tensors are matched by name.
        samples: a CalibrationSet or an iterable of feeds; labels are not needed.
        resume: go on from the checkpoint beside ``out`` that an interrupted run left.

    Raises SpecError, ModelError, CalibrationError, MissingDependency (extra ``train``); KeyboardInterrupt after a
    checkpoint was written. Nothing is written to ``out`` unless the result loads and runs.
    """
    options = options or RecoverOptions()
    source, dense, place = Path(student), Path(teacher), Path(out).absolute()
    _check_place((source, dense), place)
    device = choose_device(options.device)
    torch = import_torch()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    reference = prepare_float(dense)
    feeds = _collect(samples)
    pupil = open_student(
        source, reference=reference, feeds=feeds, qat=options.qat, threads=options.threads, quiet=quiet
    )
    lesson = _lesson(pupil.model, reference, source, feeds, options)
    graph = TorchGraph(pupil.model, device=device, masters=pupil.masters)
    if not graph.parameters:
        raise ModelError(f"{source}: has no weights that can be trained")
    state = place.with_suffix(".recover.safetensors")
    trainer = Trainer(graph, TorchGraph(reference, device=device), lesson=lesson, options=options, state=state)
    digest = _digest((source, dense), feeds, options)
    _start(trainer, digest, resume=resume, place=place)
    outcome = trainer.train(quiet=quiet)
    result = graph.export(outcome.weights)
    _check_runs(result, feeds[0], place, threads=options.threads)
    save_model(result, place)
    state.unlink(missing_ok=True)
    return RecoverReport(
        model=str(place),
        teacher=str(dense),
        steps=outcome.facts.step,
        seconds=round(outcome.facts.elapsed_s, 1),
        samples=len(lesson.train),
        held_out=len(lesson.held_out),
        targets=len(lesson.targets),
        parameters=sum(int(value.numel()) for value in graph.parameters.values()),
        quantized=pupil.quantized,
        device=device,
        loss_before=outcome.facts.loss_before,
        loss_after=outcome.loss_after,
        kept=outcome.kept,
        losses=outcome.facts.losses,
        notes=() if outcome.kept else ("no step helped on the samples held out: the model is as it was",),
    )


def _check_place(sources: Sequence[Path], place: Path) -> None:
    if place.suffix.lower() != ".onnx":
        raise SpecError(f"{place}: name a file that ends in .onnx")
    if place.is_dir():
        raise SpecError(f"{place}: is a directory; name a file")
    refuse_special(place)
    for source in sources:
        if real_path(source) == real_path(place):
            raise SpecError(f"{place}: is one of the models given; write to another file")
    if not place.parent.is_dir():
        raise SpecError(f"{place.parent}: no such folder")


def _collect(samples: Any) -> list[dict[str, np.ndarray]]:
    feeds: list[dict[str, np.ndarray]] = []
    size = 0
    for feed in samples:
        feeds.append(dict(feed))
        size += sum(array.nbytes for array in feed.values())
        if size > MAX_SAMPLES_MIB * 2**20:
            raise CalibrationError(
                f"{len(feeds)} samples take {size >> 20} MiB and training holds them in memory, at most "
                f"{MAX_SAMPLES_MIB} MiB; use fewer (--samples) or smaller ones (--size)"
            )
    if len(feeds) < MIN_SAMPLES:
        raise CalibrationError(
            f"{len(feeds)} samples are too few to train on and to check with; give at least {MIN_SAMPLES}, better 100"
        )
    return feeds


def _lesson(
    model: ModelProto, reference: ModelProto, source: Path, feeds: list[dict[str, np.ndarray]], options: RecoverOptions
) -> Lesson:
    specs = input_specs(model)
    mine, theirs = [(s.name, s.dtype) for s in specs], [(s.name, s.dtype) for s in input_specs(reference)]
    if mine != theirs:
        raise ModelError(f"{source}: has the inputs {mine}, its teacher {theirs}; they must be the same")
    names = next((item.value for item in reference.metadata_props if item.key == "names"), None)
    classes = len(parse_names(names)) or None if names else None
    cut = source.with_suffix(".mapping.json")
    mapping = read_json(cut).get("tensors", {}) if cut.is_file() else {}
    held = min(options.held_out, max(1, len(feeds) // 5))
    step = len(feeds) / held
    chosen = {int(step * index + step / 2) for index in range(held)}
    image = next((s.name for s in specs if len(s.shape) == 4), None) if takes_images(specs) else None
    return Lesson(
        targets=plan_targets(model, reference, classes=classes, mapping=mapping),
        classes=classes,
        train=tuple(feed for index, feed in enumerate(feeds) if index not in chosen),
        held_out=tuple(feed for index, feed in enumerate(feeds) if index in chosen),
        image=image,
        stacks=all(not isinstance(spec.shape[0], int) for spec in specs if spec.shape),
    )


def _digest(paths: Sequence[Path], feeds: Sequence[Feeds], options: RecoverOptions) -> str:
    """What a checkpoint must agree with: models, samples and options, except those that may change on the way."""
    total = hashlib.sha256()
    for path in paths:
        total.update(sha256_file(path).encode())
    for feed in feeds:
        for name in sorted(feed):
            total.update(name.encode())
            total.update(np.ascontiguousarray(feed[name]).tobytes())
    settings = to_json(replace(options, device="cpu", threads=None, checkpoint_s=1.0, learning_rate=1.0))
    total.update(repr(sorted(settings.items())).encode())
    return total.hexdigest()


def _start(trainer: Trainer, digest: str, *, resume: bool, place: Path) -> None:
    if not resume:
        if trainer.state.exists():
            raise SpecError(
                f"{trainer.state}: an interrupted run left this checkpoint; go on with --resume, or delete it"
            )
        trainer.begin(digest)
    elif not trainer.state.exists():
        raise SpecError(f"{trainer.state}: there is no checkpoint to resume; leave --resume out")
    else:
        trainer.resume(digest)


def _check_runs(model: ModelProto, feeds: Feeds, place: Path, *, threads: int | None) -> None:
    try:
        outputs = open_session(model, threads=threads).run(None, dict(feeds))
    except runtime_errors() as error:
        raise ModelError(f"{place}: the trained model does not run, so it was not written: {error}") from error
    for item, value in zip(model.graph.output, outputs, strict=True):
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all():
            raise ModelError(f"{place}: output '{item.name}' of the trained model is not finite; nothing was written")
