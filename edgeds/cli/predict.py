"""``edgeds predict``: latency, power and memory of a model on a board that need not be here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.boards.spec import PowerMode, Target
from edgeds.cli.inspect import parse_shapes
from edgeds.cli.output import emit_json, emit_text
from edgeds.errors import BundleError, SpecError

if TYPE_CHECKING:
    from edgeds.boards.cost_file import ModelWork
    from edgeds.boards.decoder import LlmPrediction
    from edgeds.boards.footprint import MemoryParts
    from edgeds.boards.predictor import Prediction
    from edgeds.bundle import Bundle

SUMMARY = "Predict latency, power, energy and memory on a board, without having it. Labelled predicted, with a band."

EXAMPLES = """\
examples:
  edgeds predict yolo11n.onnx --target orin-nx-16gb@15W --precision int8
  edgeds predict model.bundle --target agx-orin-64gb@30W --precision fp16 --batch 8 --json
  edgeds predict cost.json --target orin-nano-super@MAXN --precision fp16 --input images:1x3x320x320
  edgeds predict yolo11n.onnx --target agx-orin-64gb@30W --precision int8 --device dla
  edgeds predict llama.json --target agx-orin-64gb@MAXN --precision int4 --prompt 512 --context 2048
"""

_SHOWN_LAYERS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL|BUNDLE|COST.json", type=Path, help="ONNX file, bundle or cost file")
    parser.add_argument("--target", required=True, metavar="NAME@MODE", help="board and power mode (edgeds targets)")
    parser.add_argument(
        "--precision",
        required=True,
        choices=("fp32", "fp32-strict", "fp16", "int8", "int4"),
        help="fp32 is computed as TF32, as TensorRT does, fp32-strict without it; int4: weights only",
    )
    parser.add_argument("--device", choices=("gpu", "dla"), default="gpu", help="dla: one core, the rest on the GPU")
    parser.add_argument(
        "--sparsity",
        choices=("none", "2:4"),
        help="take all large weights as 2:4 sparse, or none (default: as stored)",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="items per inference (default: as the model states)")
    parser.add_argument("--input", action="append", default=[], metavar="NAME:1x3x640x640", help="shape of an input")
    parser.add_argument("--prompt", type=int, metavar="N", help="language models: tokens of the prompt, per sequence")
    parser.add_argument("--context", type=int, metavar="N", help="tokens in the cache (default: the prompt's and one)")
    parser.add_argument("--kv", choices=("fp16", "int8"), default="fp16", help="precision of the KV cache")
    parser.add_argument("--boards", type=Path, metavar="FILE", help="own boards (docs/boards.md)")
    parser.add_argument("--layers", action="store_true", help="with --json: the times of every kernel too")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    from edgeds.boards.catalogue import load_catalogue
    from edgeds.boards.predictor import predict
    from edgeds.boards.targets import resolve_target

    _check_language(args)
    shapes = parse_shapes(args.input)
    target = resolve_target(args.target, catalogue=load_catalogue(args.boards))
    mode = target.mode_or_default
    if mode is None:
        raise SpecError(_no_mode(target))
    work = load_work(args.model, shapes)
    if args.prompt is not None:
        return _run_language(args, work, target=target, mode=mode)
    found = predict(
        work,
        board=target.board,
        mode=mode,
        precision=args.precision,
        batch=args.batch,
        device=args.device,
        sparsity=args.sparsity,
    )
    if args.json:
        emit_json(_document(found, with_layers=args.layers))
    else:
        emit_text("\n".join(describe(found)))
    return 0


def _check_language(args: argparse.Namespace) -> None:
    if args.prompt is None and args.context is not None:
        raise SpecError("--context: give --prompt too, the tokens that are there before the first answer")
    if args.prompt is not None and args.device == "dla":
        raise SpecError("--device dla: the DLA has no matrix products; language models run on the GPU")
    if args.prompt is not None and args.input:
        raise SpecError("--input: with --prompt the number of tokens comes from --prompt and --context")


def _run_language(args: argparse.Namespace, work: ModelWork, *, target: Target, mode: PowerMode) -> int:
    from edgeds.boards.decoder import predict_llm

    found = predict_llm(
        work,
        board=target.board,
        mode=mode,
        precision=args.precision,
        prompt=args.prompt,
        context=args.context,
        batch=1 if args.batch is None else args.batch,
        kv_precision=args.kv,
        sparsity=args.sparsity,
    )
    if args.json:
        document = _document(found.decode, with_layers=args.layers)
        emit_json({**document, "llm": _language_document(found, with_layers=args.layers)})
    else:
        emit_text("\n".join([*describe(found.decode), *describe_language(found)]))
    return 0


def describe_language(found: LlmPrediction) -> list[str]:
    """What a language model adds: first token, rate of decoding, cache."""
    return [
        f"language model: prompt {found.prompt_tokens}, {found.context_tokens} tokens in the cache",
        f"  first token {found.ttft_ms:.3g} ms   (80 % band {found.ttft_low_ms:.3g} to {found.ttft_high_ms:.3g} ms),"
        f" {found.prefill.power_w:.3g} W, limited by {found.prefill.limited_by}",
        f"  decoding    {found.tokens_per_s:.4g} tokens per second"
        f"   ({found.tokens_per_s_low:.4g} to {found.tokens_per_s_high:.4g})",
        f"  KV cache    {found.kv_cache_mib:.0f} MiB in {found.kv_precision},"
        f" {found.kv_bytes_per_token / 1024:.4g} KiB per token and sequence",
        *(f"note: {note}" for note in found.prefill.notes if note not in found.decode.notes),
    ]


def bundle_work(bundle: Bundle) -> ModelWork:
    """Costs of an opened bundle. Raises BundleError when it holds none."""
    from edgeds.boards.cost_file import read_cost

    if "cost.json" not in bundle.manifest.files:
        raise BundleError(f"{bundle.source}: holds no cost.json; create the bundle again, or give the model itself")
    return read_cost(bundle.path("cost.json"))


def load_work(path: Path, shapes: dict[str, tuple[int, ...]]) -> ModelWork:
    """Costs of an ONNX model (counted here), of a bundle, or from a cost file; ``shapes`` as from ``--input``.

    Raises SpecError, ModelError or BundleError that names the file.
    """
    from edgeds.boards.cost_file import parse_cost, read_cost
    from edgeds.boards.predictor import resize_work

    if path.suffix.lower() == ".json":
        return resize_work(read_cost(path), shapes)
    if path.is_dir() or path.suffix.lower() == ".zip":
        from edgeds.bundle import open_bundle

        with open_bundle(path) as bundle:
            return resize_work(bundle_work(bundle), shapes)
    from edgeds.graph.cost import count_cost
    from edgeds.graph.io import is_engine_file, load_model
    from edgeds.specs import to_json

    if is_engine_file(path):
        raise SpecError(f"{path}: an engine file holds no per-layer costs; give the ONNX model or the bundle")
    return parse_cost(to_json(count_cost(load_model(path), shapes)), where=str(path))


def describe(found: Prediction) -> list[str]:
    """The page for people: the label first, then figures, then the slowest kernels."""
    kind = "80 % band" if found.dla is None else "band of networks held out:"
    band = f"{kind} {found.latency_low_ms:.3g} to {found.latency_high_ms:.3g} ms"
    lines = [
        f"predicted, not measured: {found.target}, {found.device}, {found.precision}, batch {found.batch}",
        f"  latency     {found.latency_ms:.3g} ms   ({band})",
        f"  throughput  {found.fps:.4g} per second",
        f"  power       {found.power_w:.3g} W of the module, {found.energy_mj:.3g} mJ per inference",
        f"  memory      {found.memory_mib:.0f} MiB, without runtime libraries: {_parts(found.memory)}",
        f"  limited by  {found.limited_by}",
    ]
    if found.dla is not None:
        lines += [
            f"  expected on the DLA: {found.dla.dla_kernels} kernels with {found.dla.dla_flops_share:.1%} of the work,"
            f" {found.dla.transitions} changes of device",
            *(f"  on the GPU: {text}" for text in found.dla.gpu_ops),
        ]
    lines.append("slowest kernels")
    slowest = sorted(found.layers, key=lambda layer: layer.latency_us, reverse=True)[:_SHOWN_LAYERS]
    lines += [
        f"  {one.latency_us:9.1f} us  {one.precision:5} {one.limited_by:8} {one.op} {one.node}" for one in slowest
    ]
    return [*lines, *(f"note: {note}" for note in found.notes), f"fit {found.table_version}; see docs/predict.md"]


def _parts(memory: MemoryParts) -> str:
    parts = (
        ("weights", memory.weights_mib),
        ("activations", memory.activations_mib),
        ("workspace", memory.workspace_mib),
        ("KV cache", memory.kv_cache_mib),
    )
    return ", ".join(f"{name} {size:.0f}" for name, size in parts if size)


def _document(found: Prediction, *, with_layers: bool) -> dict[str, object]:
    from edgeds.specs import to_json

    document: dict[str, object] = to_json(found)
    if with_layers:
        pairs = zip(to_json(found.layers), found.layers, strict=True)
        document["layers"] = [{**layer, "limited_by": one.limited_by} for layer, one in pairs]
    else:
        del document["layers"]
    return document


def _language_document(found: LlmPrediction, *, with_layers: bool) -> dict[str, object]:
    from edgeds.specs import to_json

    document: dict[str, object] = to_json(found)
    del document["decode"]  # the document around this one
    return {**document, "prefill": _document(found.prefill, with_layers=with_layers)}


def _no_mode(target: Target) -> str:
    modes = ", ".join(mode.label for mode in target.board.modes)
    if not modes:
        return f"target {target}: no power mode of it is known; describe it in a boards file (docs/boards.md)"
    return f"target {target}: which power mode? as in {target}@{target.board.modes[0].label}; it has {modes}"
