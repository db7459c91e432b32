"""``edgeds profile``: where the time of a model goes, per layer and against what the device can do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.cli.inspect import parse_shapes
from edgeds.cli.options import add_trust
from edgeds.cli.output import emit_json, emit_text
from edgeds.cli.predict import bundle_work, load_work
from edgeds.engines.base import check_threads
from edgeds.errors import BundleError, SpecError

if TYPE_CHECKING:
    from edgeds.boards.cost_file import ModelWork
    from edgeds.boards.spec import Target
    from edgeds.report.profile import Profile

SUMMARY = "Show where the time of a model goes: per layer, against peak operations and bandwidth, and by batch."

EXAMPLES = """\
examples:
  edgeds profile --model yolo11n.onnx --batch-size 1 --precision fp32 --output metrics.json     measured here
  edgeds profile --model yolo.bundle --batch-size 4 --precision int8 --output metrics.json
  edgeds profile --model yolo11n.onnx --batch-size 8 --precision fp16 --target orin-nx-16gb@25W --output metrics.json
  edgeds report metrics.json --out report.html                                                  as a page
"""

MAX_BATCH = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, type=Path, metavar="MODEL|BUNDLE|COST.json", help="what to profile")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="rows of one run (default 1)")
    parser.add_argument("--precision", required=True, choices=("fp32", "fp16", "int8", "int4"))
    parser.add_argument("--output", required=True, type=Path, metavar="metrics.json", help="file to write")
    parser.add_argument(
        "--target", metavar="NAME@MODE", help="predict for this board; without it the model is run on this machine"
    )
    parser.add_argument("--input", action="append", default=[], metavar="NAME:1x3x640x640", help="shape of an input")
    parser.add_argument("--size", metavar="HxW", help="image size, where the model leaves it open")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="time of each rate (default 2)")
    parser.add_argument("--backend", default="auto", help="auto, onnxruntime (cpu) or tensorrt (default: auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of one run")
    parser.add_argument("--boards", type=Path, metavar="FILE", help="own boards (docs/boards.md)")
    parser.add_argument("--json", action="store_true", help="print the same document")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    from edgeds.files import write_json
    from edgeds.report.profile import describe, to_document

    if not 1 <= args.batch_size <= MAX_BATCH:
        raise SpecError(f"--batch-size: expected 1 to {MAX_BATCH}, got {args.batch_size}")
    if not 0 < args.seconds <= 3600:
        raise SpecError(f"--seconds: expected more than 0 and at most 3600, got {args.seconds}")
    if args.threads is not None:
        check_threads(args.threads)
    if args.output.is_dir():
        raise SpecError(f"--output {args.output}: is a folder; name a file, as in {args.output / 'metrics.json'}")
    profile = _profile(args)
    document = to_document(profile)
    try:
        write_json(args.output, document)
    except OSError as error:
        raise SpecError(f"--output {args.output}: cannot be written to: {error.strerror or error}") from error
    if args.json:
        emit_json(document)
    else:
        emit_text("\n".join([*describe(profile), f"written to {args.output}"]))
    return 0


def _profile(args: argparse.Namespace) -> Profile:
    from edgeds.report.profile import predict_profile

    shapes = parse_shapes(args.input)
    target = _target(args)
    if target is not None:
        work, name = _sized_work(args, shapes), args.model.stem
        return predict_profile(work, model=name, target=target, precision=args.precision, batch=args.batch_size)
    if args.model.suffix.lower() == ".json":
        raise SpecError(f"{args.model}: costs cannot be run; name a board to predict for with --target NAME@MODE")
    return _measure(args, shapes)


def _sized_work(args: argparse.Namespace, shapes: dict[str, tuple[int, ...]]) -> ModelWork:
    """Costs at ``--input`` or ``--size``: a model file is counted anew, costs that are given are scaled."""
    from edgeds.boards.plan_choice import resize_to
    from edgeds.specs import Resolution

    if args.size is None or shapes:
        return load_work(args.model, shapes)
    if args.model.is_dir() or args.model.suffix.lower() in (".json", ".zip"):
        return resize_to(load_work(args.model, {}), Resolution.parse(args.size))
    return load_work(args.model, _image_shapes(args))


def _target(args: argparse.Namespace) -> Target | None:
    """The board to predict for; None when none is named or it is the machine that this runs on."""
    from edgeds.boards.catalogue import load_catalogue
    from edgeds.boards.probe import probe_machine
    from edgeds.boards.targets import resolve_target

    if args.target is None:
        return None
    catalogue = load_catalogue(args.boards)
    target = resolve_target(args.target, catalogue=catalogue)
    probe = probe_machine(catalogue=catalogue)
    here = probe.board is not None and probe.board.name == target.board.name
    same_mode = target.mode is None or (probe.current_mode is not None and probe.current_mode.name == target.mode.name)
    return None if here and same_mode else target


def _measure(args: argparse.Namespace, shapes: dict[str, tuple[int, ...]]) -> Profile:
    from edgeds.boards.resize import resize_work
    from edgeds.bundle import open_bundle
    from edgeds.report.profile_run import profile_here

    size = args.size
    if args.model.is_dir() or args.model.suffix.lower() == ".zip":
        with open_bundle(args.model, quiet=args.quiet) as bundle:
            if size is None and bundle.manifest.buckets:
                size = str(bundle.manifest.buckets[0])
            try:
                work: ModelWork | None = resize_work(bundle_work(bundle), shapes)
            except BundleError:
                work = None  # an old bundle without costs: times alone
            return profile_here(
                bundle, model=args.model.name, work=work, precision=args.precision, batch=args.batch_size, size=size,
                shapes=shapes, seconds=args.seconds, backend=args.backend, threads=args.threads, quiet=args.quiet,
            )  # fmt: skip
    return profile_here(
        args.model, model=args.model.stem, work=load_work(args.model, shapes or _image_shapes(args)),
        precision=args.precision, batch=args.batch_size, size=size, shapes=shapes, seconds=args.seconds,
        backend=args.backend, threads=args.threads, quiet=args.quiet,
    )  # fmt: skip


def _image_shapes(args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """The shape of a model's one image input at ``--size``, for counting costs."""
    from edgeds.graph.io import input_specs, load_model
    from edgeds.specs import Resolution

    if args.size is None:
        return {}
    size = Resolution.parse(args.size)
    specs = [spec for spec in input_specs(load_model(args.model)) if len(spec.shape) == 4]
    if len(specs) != 1 or not isinstance(specs[0].shape[1], int):
        raise SpecError(f"--size {args.size}: the model has not one image input; give --input NAME:1x3x{size}")
    return {specs[0].name: (1, specs[0].shape[1], size.height_px, size.width_px)}
