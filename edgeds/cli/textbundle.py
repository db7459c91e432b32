"""``edgeds bundle create`` for text models: a checkpoint's folder, or an ONNX encoder with its tokenizer."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgeds.cli.options import given_path
from edgeds.errors import SpecError
from edgeds.pipelines.bert.head import POOLINGS, TEXT_TASKS
from edgeds.specs import Budget


def add_text_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(f"text models (--task {'|'.join(TEXT_TASKS)})")
    group.add_argument("--tokenizer", type=given_path, metavar="PATH", help="folder or file (default: in MODEL)")
    group.add_argument("--pooling", choices=POOLINGS, help="of token states to one vector (default: the model's)")
    group.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="vectors of length 1 (default: as stated)",
    )
    group.add_argument("--max-length", type=int, metavar="N", help="most tokens of a text (default: the model's)")


def wants_text_bundle(args: argparse.Namespace) -> bool:
    """Whether MODEL is a text model: a checkpoint's folder, or an ONNX file given with a tokenizer."""
    return args.task in TEXT_TASKS and (args.model.is_dir() or args.tokenizer is not None)


def refuse_text_options(args: argparse.Namespace) -> None:
    """Raise SpecError for options that only text models have."""
    for flag in ("tokenizer", "pooling", "normalize", "max_length"):
        if getattr(args, flag) is not None:
            raise SpecError(
                f"--{flag.replace('_', '-')} is for text models: --task {', '.join(TEXT_TASKS)} with a checkpoint's "
                "folder, or with an ONNX file and --tokenizer"
            )


def create(args: argparse.Namespace, *, percentile: float, names: dict[int, str] | None, budget: Budget | None) -> Path:
    """Make the bundle that the arguments name."""
    for flag in ("size", "head", "split"):
        if getattr(args, flag):
            raise SpecError(f"--{flag} is for images; a text model has none")
    from edgeds.pipelines.bert.opening import MAX_BATCH
    from edgeds.workshop.textpackage import create_text_bundle

    return create_text_bundle(
        args.model,
        out=args.out,
        task=args.task,
        tokenizer=args.tokenizer,
        calib=args.calib,
        max_batch=args.max_batch if args.max_batch is not None else MAX_BATCH,
        method=args.method,
        percentile=percentile,
        samples=args.samples,
        names=names,
        pooling=args.pooling,
        normalize=args.normalize,
        max_length=args.max_length,
        float_only=args.float_only,
        evaluate=args.eval,
        max_drop=args.max_drop,
        target=args.target,
        budget=budget,
        replace=args.replace,
        quiet=args.quiet,
    )
