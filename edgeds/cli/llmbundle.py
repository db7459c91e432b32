"""``edgeds bundle create --task generate``: a language model from a checkpoint's folder or a GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgeds.cli.llm import TASK
from edgeds.errors import SpecError

_FLAGS = ("weights", "kv", "page", "eviction")
_OTHERS = (
    *("size", "head", "split", "eval", "max_drop", "names", "percentile", "float_only", "fps", "watts", "latency_ms"),
    *("tokenizer", "pooling", "normalize", "max_length"),
)


def add_language_options(parser: argparse.ArgumentParser) -> None:
    """Options that only language models have."""
    group = parser.add_argument_group(f"language models (--task {TASK})")
    group.add_argument("--weights", choices=("float", "int8", "int4"), help="of linear layers (default int4)")
    group.add_argument(
        "--kv", choices=("float32", "float16", "int8"), help="KV cache (default: float16 on devices, float32 on CPUs)"
    )
    group.add_argument("--page", type=int, metavar="N", help="tokens of a KV page (default 64)")
    group.add_argument("--eviction", action="store_true", default=None, help="what --kv-budget needs of the graph")


def wants_language_bundle(args: argparse.Namespace) -> bool:
    """Whether a decoder is to be packed: its folder or a .gguf file (an ONNX of that task is fed arrays)."""
    return args.task == TASK and (args.model.is_dir() or args.model.suffix.lower() == ".gguf")


def refuse_language_options(args: argparse.Namespace) -> None:
    """Raise SpecError for options that only language models have."""
    for flag in _FLAGS:
        if getattr(args, flag) is not None:
            raise SpecError(
                f"--{flag} is for language models: --task {TASK} with a checkpoint's folder or a .gguf file"
            )


def create(args: argparse.Namespace) -> Path:
    """Make the bundle that the arguments name."""
    for flag in _OTHERS:
        value = getattr(args, flag)
        if value is not None and value is not False and value != []:
            raise SpecError(f"--{flag.replace('_', '-')}: a language model has none")
    from edgeds.workshop.llmpackage import MAX_BATCH, create_llm_bundle

    return create_llm_bundle(
        args.model,
        out=args.out,
        weights=args.weights or "int4",
        kv=args.kv,
        page=64 if args.page is None else args.page,
        eviction=bool(args.eviction),
        calib=args.calib,
        samples=args.samples,
        max_batch=args.max_batch if args.max_batch is not None else MAX_BATCH,
        target=args.target,
        replace=args.replace,
        quiet=args.quiet,
    )
