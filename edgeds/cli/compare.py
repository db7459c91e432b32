"""``edgeds compare``: what two models, precisions or backends give for the same inputs, and where they part."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.cli.comparetext import (
    Side,
    bisect_json,
    describe,
    describe_bisect,
    describe_layers,
    layer_json,
    report_json,
)
from edgeds.cli.inspect import parse_shapes
from edgeds.cli.output import emit_json, emit_text
from edgeds.difference import Tolerance
from edgeds.engines import open_engine
from edgeds.engines.base import Engine
from edgeds.errors import SpecError
from edgeds.report.compare import DEFAULT_TOLERANCE, check_inputs, compare_engines
from edgeds.report.feeds import golden_feeds, random_feeds
from edgeds.specs import Resolution

if TYPE_CHECKING:
    from edgeds.graph.bisect import BisectResult, LayerDifference

SUMMARY = (
    "Compare the outputs of two models, precisions or backends on the same inputs; exit code 1 beyond a tolerance."
)

EXAMPLES = """\
examples:
  edgeds compare model.onnx model.fp16.onnx --tolerance 0.01       random inputs, largest absolute difference
  edgeds compare yolo.bundle@float yolo.bundle@int8                two variants on the bundle's own samples
  edgeds compare yolo.bundle yolo.bundle --backend-a onnxruntime --backend-b tensorrt
  edgeds compare model.onnx int8.onnx --data images/ --size 320 --samples 8 --layers
  edgeds compare model.onnx int8.onnx --rel-tolerance 0.05 --bisect --json       the first layer that breaks it
"""

RANDOM_SAMPLES = 2
LAYER_SAMPLES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = ".onnx file, BUNDLE, or BUNDLE@VARIANT (float, int8, cpu_int8, ...)"
    parser.add_argument("a", metavar="A", help=f"the reference: {what}")
    parser.add_argument("b", metavar="B", help="what is compared with it, in the same forms")
    limits = parser.add_argument_group("tolerance (default: a relative one of 0.01)")
    limits.add_argument("--tolerance", type=float, metavar="T", help="largest absolute difference of any output")
    limits.add_argument("--rel-tolerance", type=float, metavar="R", help="the same over the output's largest magnitude")
    feeds = parser.add_argument_group("inputs (default: a bundle's golden samples, else seeded random values)")
    feeds.add_argument("--data", type=Path, metavar="PATH", help="images, .npz/.npy or a folder of them, as --calib")
    feeds.add_argument("--samples", type=int, metavar="N", help="use N samples (random inputs: 2)")
    feeds.add_argument("--random", action="store_true", help="random inputs even where a bundle has samples")
    feeds.add_argument("--seed", type=int, default=0, metavar="S", help="of random inputs (default %(default)s)")
    feeds.add_argument("--input", action="append", default=[], metavar="NAME:SHAPE", help="shape of a random input")
    feeds.add_argument("--size", metavar="HxW", help="resolution that images are brought to")
    layers = parser.add_argument_group("layers (two ONNX forms of one network, run by onnxruntime)")
    layers.add_argument("--layers", action="store_true", help="difference at every tensor that both forms compute")
    layers.add_argument(
        "--bisect", action="store_true", help="first layer beyond the tolerance when given equal inputs"
    )
    for side in "ab":
        parser.add_argument(
            f"--backend-{side}", default="auto", metavar="NAME", help=f"backend of {side.upper()} (default auto)"
        )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when an output is beyond the tolerance or has no counterpart."""
    tolerance = _tolerance(args)
    shapes = parse_shapes(args.input)
    if args.samples is not None and args.samples < 1:
        raise SpecError(f"--samples {args.samples}: must be at least 1")
    if args.data is not None and (args.random or shapes):
        raise SpecError("--data gives the inputs; leave out --random and --input")
    with contextlib.ExitStack() as stack:
        a = _open_side(args.a, args.backend_a, args, stack)
        b = _open_side(args.b, args.backend_b, args, stack)
        notes = check_inputs(a.engine, b.engine)
        feeds, source = _feeds(a, b, shapes, args)
        report = compare_engines(a.engine, b.engine, feeds, tolerance=tolerance, quiet=args.quiet)
        document = report_json(report, a=a, b=b, source=source)
        layers: tuple[LayerDifference, ...] = ()
        found: BisectResult | None = None
        if args.layers or args.bisect:
            layers, found = _compare_layers(a, b, feeds, tolerance, args)
    if args.layers:
        document["layers"] = [layer_json(item) for item in layers]
    if found is not None:
        document["bisect"] = bisect_json(found)
    document["notes"] = list(dict.fromkeys([*notes, *document["notes"]]))
    if args.json:
        emit_json(document)
    else:
        emit_text("\n".join([*describe(report, document), *describe_layers(layers), *describe_bisect(found)]))
    return 0 if report.ok else 1


def _tolerance(args: argparse.Namespace) -> Tolerance:
    if args.tolerance is None and args.rel_tolerance is None:
        return DEFAULT_TOLERANCE
    return Tolerance(absolute=args.tolerance, relative=args.rel_tolerance)


def _open_side(text: str, backend: str, args: argparse.Namespace, stack: contextlib.ExitStack) -> Side:
    path, variant = Path(text), ""
    if not path.exists() and "@" in text:
        head, _, variant = text.rpartition("@")
        path = Path(head)
        if not variant:
            raise SpecError(f"{text!r}: no variant after '@'; write BUNDLE@float, for example")
    if path.is_dir() or path.suffix.lower() == ".zip":
        from edgeds.bundle import open_bundle

        bundle = stack.enter_context(open_bundle(path))
        source = bundle.model_path(variant) if variant else bundle
        engine = stack.enter_context(open_engine(source, backend=backend, threads=args.threads))
        return Side(text, engine, bundle)
    if variant and path.exists():
        raise SpecError(f"{text!r}: {path} is a file, and variants are a bundle's; leave out '@{variant}'")
    engine = stack.enter_context(open_engine(path, backend=backend, threads=args.threads))
    return Side(text, engine, None)


def _feeds(
    a: Side, b: Side, shapes: dict[str, tuple[int, ...]], args: argparse.Namespace
) -> tuple[list[Any] | Iterable[Any], str]:
    """The feeds (iterable more than once) and where they come from, in words."""
    engine = max((a.engine, b.engine), key=lambda item: sum(spec.np_dtype.itemsize for spec in item.inputs))
    if args.data is not None:
        return _open_data(engine, a, b, args), str(args.data)
    if args.size is not None:
        raise SpecError("--size is for images; give --data FOLDER, or --input NAME:SHAPE for random inputs")
    if not args.random and not shapes:
        for side in (a, b):
            golden = golden_feeds(side.bundle, limit=args.samples) if side.bundle is not None else []
            if golden:
                return golden, f"{len(golden)} golden samples of {side.label}"
    count = args.samples or RANDOM_SAMPLES
    feeds = list(random_feeds(engine, samples=count, seed=args.seed, shapes=shapes))
    return feeds, f"{count} random samples, seed {args.seed}"


def _open_data(engine: Engine, a: Side, b: Side, args: argparse.Namespace) -> Any:
    from edgeds.compress.calibset import holds_images, open_calibration

    preprocess, sizes = None, None
    if holds_images(args.data):
        preprocess, sizes = _image_rule(a, b, args)
    elif args.size is not None:
        raise SpecError(f"--data {args.data}: --size is for images; arrays are used as they are")
    return open_calibration(
        args.data, model_inputs=engine.inputs, preprocess=preprocess, resolution=sizes, limit=args.samples
    )


def _image_rule(a: Side, b: Side, args: argparse.Namespace) -> tuple[Any, Any]:
    """Preprocessing and sizes: a bundle's own, else what the ONNX model says."""
    size = Resolution.parse(args.size) if args.size is not None else None
    for side in (a, b):
        if side.bundle is not None and side.bundle.manifest.preprocess is not None:
            return side.bundle.preprocess(), size or side.bundle.manifest.buckets
    from edgeds.workshop.detector import image_setup

    return image_setup(_onnx_path(a), size=size, preprocess=None)


def _onnx_path(side: Side) -> Path:
    path = getattr(side.engine, "path", None)
    if side.engine.backend != "onnxruntime" or not isinstance(path, Path):
        raise SpecError(
            f"{side.label}: runs on {side.engine.backend}; layers are compared between ONNX models, so use "
            "--backend-a onnxruntime --backend-b onnxruntime"
        )
    return path


def _compare_layers(
    a: Side, b: Side, feeds: Any, tolerance: Tolerance, args: argparse.Namespace
) -> tuple[tuple[LayerDifference, ...], BisectResult | None]:
    paths = [_onnx_path(side) for side in (a, b)]
    from edgeds.graph.bisect import compare_layers, find_first_break
    from edgeds.graph.io import load_model

    models = [load_model(path) for path in paths]
    samples = list(itertools.islice(feeds, LAYER_SAMPLES))
    options: dict[str, Any] = {"tolerance": tolerance, "threads": args.threads, "quiet": args.quiet}
    layers = compare_layers(models[0], models[1], samples, **options) if args.layers else ()
    return layers, find_first_break(models[0], models[1], samples, **options) if args.bisect else None
