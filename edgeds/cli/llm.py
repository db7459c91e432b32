"""What ``generate`` and ``chat`` share: options of sampling and of the model, opening the bundle."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.cli.options import given_path
from edgeds.errors import SpecError
from edgeds.files import read_json

if TYPE_CHECKING:
    from edgeds.pipelines.llm.options import SamplingOptions
    from edgeds.pipelines.llm.pipeline import LlmPipeline, Prompt
    from edgeds.pipelines.llm.stream import Completion, Stream

TASK = "generate"
MAX_TOKENS = 512


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The bundle and how it is run."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle folder or zip of a language model")
    group = parser.add_argument_group("model")
    group.add_argument("--backend", default="auto", help="auto, onnxruntime (cpu) or tensorrt (default %(default)s)")
    group.add_argument(
        "--precision", choices=("auto", "float", "int8", "int4"), default="auto", help="model of the bundle"
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the physical cores)")
    group.add_argument(
        "--kv-tokens", type=int, metavar="N", help="tokens the KV cache holds (default: 512 MiB of them)"
    )
    group.add_argument(
        "--kv-budget", type=int, metavar="N", help="tokens one request may keep cached; others are evicted"
    )
    group.add_argument(
        "--max-batch", type=int, default=8, metavar="N", help="requests run at once (default %(default)s)"
    )
    group.add_argument(
        "--speculate", choices=("off", "lookup"), default="off", help="guess from the text (default off)"
    )
    group.add_argument(
        "--draft", type=given_path, metavar="BUNDLE", help="smaller model of the same vocabulary to guess"
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``SamplingOptions`` under the names that vLLM and the OpenAI interface have for them."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"tokens at most (default {MAX_TOKENS}, or to the end of the context)",
    )
    group.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no end before so many tokens")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (default %(default)s)"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens only (0: off)")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="of the likeliest with P together (1: off)"
    )
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="at least P of the likeliest (0: off)")
    for name in ("repetition", "presence", "frequency"):
        default = 1.0 if name == "repetition" else 0.0
        group.add_argument(f"--{name}-penalty", type=float, default=default, metavar="X", help=f"default {default:g}")
    group.add_argument("--dynamic-temperature", type=float, default=0.0, metavar="T", help="added where text repeats")
    group.add_argument("--seed", type=int, metavar="S", help="makes a request reproducible")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after end tokens")
    group.add_argument("--logprobs", type=int, metavar="N", help="log probabilities of the N likeliest tokens (--json)")
    guide = group.add_mutually_exclusive_group()
    guide.add_argument("--json-schema", type=given_path, metavar="FILE", help="only JSON that fits this schema")
    guide.add_argument("--regex", metavar="PATTERN", help="only text that fits this regular expression")


def sampling_options(args: argparse.Namespace) -> SamplingOptions:
    """Raises SpecError for values out of range and for a schema that cannot be read."""
    from edgeds.pipelines.llm.options import SamplingOptions

    schema = None
    if args.json_schema is not None:
        schema = read_json(args.json_schema)
        if not isinstance(schema, dict):
            raise SpecError(f"{args.json_schema}: expected a JSON schema, an object")
    names = set(SamplingOptions.__dataclass_fields__) - {"json_schema", "stop_tokens", "stop"}
    values = {name: getattr(args, name) for name in names}
    values["max_tokens"] = MAX_TOKENS if args.max_tokens is None else args.max_tokens
    return SamplingOptions(**values, stop=tuple(args.stop), json_schema=schema)


def open_pipeline(args: argparse.Namespace) -> LlmPipeline:
    """The pipeline of the bundle. Raises SpecError, BundleError, ModelError."""
    from edgeds.pipelines.llm.pipeline import LlmPipeline
    from edgeds.pipelines.llm.scheduler import SchedulerPolicy
    from edgeds.pipelines.llm.settings import LlmSettings

    settings = LlmSettings(
        policy=SchedulerPolicy(max_batch=args.max_batch),
        kv_tokens=args.kv_tokens,
        kv_budget=args.kv_budget,
        speculate=args.speculate,
    )
    return LlmPipeline.from_bundle(
        args.bundle,
        backend=args.backend,
        precision=args.precision,
        threads=args.threads,
        settings=settings,
        draft=args.draft,
    )


def start(pipeline: LlmPipeline, prompt: Prompt, options: SamplingOptions, args: argparse.Namespace) -> Stream:
    """The request; where no number of tokens was asked for it ends where the context does."""
    tokens = pipeline.encode(prompt)
    room = pipeline.context - len(tokens)
    if args.max_tokens is None and 0 < room < options.max_tokens:
        options = replace(options, max_tokens=room, min_tokens=min(options.min_tokens, room))
    return pipeline.stream(tokens, options=options)


def completion_json(found: Completion, pipeline: LlmPipeline) -> dict[str, Any]:
    """A finished request for ``--json``."""
    document: dict[str, Any] = {
        "text": found.text,
        "finish_reason": found.finish_reason,
        "stop": found.stop,
        "prompt_tokens": found.prompt_tokens,
        "completion_tokens": found.completion_tokens,
        "cached_tokens": found.cached_tokens,
        "ttft_ms": found.ttft_ms,
        "total_ms": found.total_ms,
        "tokens_per_s": found.tokens_per_s,
        "drafted": found.drafted,
        "accepted": found.accepted,
    }
    if found.logprobs:

        def piece(token: int) -> str:
            return pipeline.text.decode([token], skip_special=False)

        document["logprobs"] = [
            {
                "token": piece(choice.token),
                "logprob": choice.logprob,
                "top_logprobs": [{"token": piece(token), "logprob": value} for token, value in choice.top_logprobs],
            }
            for choice in found.logprobs
        ]
    return document
