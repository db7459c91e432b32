"""From a bundle, or a model file and a tokenizer, to a pipeline: every mismatch is found before the first text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.boards.stored_plan import read_stored_plan
from edgeds.errors import BundleError, EngineMismatch, SpecError
from edgeds.pipelines.bert.encode import TextEncoder
from edgeds.pipelines.bert.head import TEXT_TASKS, TextHead, choose_head
from edgeds.pipelines.bert.lengths import default_lengths
from edgeds.pipelines.bert.pipeline import BertPipeline
from edgeds.pipelines.bert.runner import RowRunner
from edgeds.pipelines.tokenizer_file import TOKENIZER_FILES, load_tokenizer
from edgeds.specs import from_json

if TYPE_CHECKING:
    from edgeds.bundle import Bundle
    from edgeds.engines.base import Engine
    from edgeds.runtime import BatchPolicy

TOKENIZER_FOLDER = "tokenizer"
MAX_BATCH = 64
MAX_TOKENS = 2048
"""Padded tokens of one run: more does not compute faster on a CPU and takes memory and latency (docs/bert.md)."""
DELAY_MS = 1.0


def read_head(bundle: Bundle) -> TextHead:
    """The ``head`` of a text bundle. Raises SpecError for another task, BundleError for a head that is not one."""
    manifest = bundle.manifest
    if manifest.task not in TEXT_TASKS:
        raise SpecError(f"{bundle.source}: task {manifest.task!r} is not one of a text model ({', '.join(TEXT_TASKS)})")
    if manifest.head is None:
        return choose_head(manifest.outputs, task=manifest.task, id2label=manifest.names or None)
    try:
        head = from_json(TextHead, manifest.head, where=f"{bundle.source}: head")
    except SpecError as error:
        raise BundleError(str(error)) from error
    if head.task != manifest.task:
        raise BundleError(f"{bundle.source}: the head is of task {head.task!r}, the bundle of {manifest.task!r}")
    return head


def open_bundle_pipeline(
    source: str | Path | Bundle,
    *,
    backend: str = "auto",
    precision: str = "auto",
    threads: int | None = None,
    policy: BatchPolicy | None = None,
    on_long: str = "truncate",
    stride: int | None = None,
    max_tokens: int = MAX_TOKENS,
) -> BertPipeline:
    """See ``BertPipeline.from_bundle``."""
    from edgeds.bundle import open_bundle
    from edgeds.engines import open_engine

    with contextlib.ExitStack() as on_failure:
        owned: list[Callable[[], None]] = []
        if isinstance(source, str | Path):
            bundle = on_failure.enter_context(open_bundle(Path(source)))
            owned.append(bundle.close)
        else:
            bundle = source
        head = read_head(bundle)
        names = [f"{TOKENIZER_FOLDER}/{name}" for name in TOKENIZER_FILES]
        listed = [name for name in names if name in bundle.manifest.files and not name.endswith("_config.json")]
        if not listed:
            raise BundleError(f"{bundle.source}: holds no tokenizer; it needs {names[0]} or {names[1]}")
        plan = read_stored_plan(bundle.manifest.plan, where=f"{bundle.source}: plan")
        planned = bundle.manifest.max_batch if plan is None else min(plan.batch, bundle.manifest.max_batch)
        engine = open_engine(bundle, backend=backend, precision=precision, threads=threads)  # type: ignore[arg-type]
        on_failure.callback(engine.close)
        pipeline = open_engine_pipeline(
            engine,
            tokenizer=bundle.path(listed[0]),
            head=head,
            policy=policy,
            max_batch=planned,
            on_long=on_long,
            stride=stride,
            max_tokens=max_tokens,
            owned=[engine.close, *owned],
        )
        on_failure.pop_all()
    return pipeline


def open_model_pipeline(
    path: str | Path,
    tokenizer: str | Path,
    *,
    backend: str = "auto",
    threads: int | None = None,
    policy: BatchPolicy | None = None,
    on_long: str = "truncate",
    stride: int | None = None,
    max_tokens: int = MAX_TOKENS,
    task: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    id2label: Mapping[int, str] | None = None,
    max_length: int | None = None,
) -> BertPipeline:
    """See ``BertPipeline.from_model``."""
    from edgeds.engines import open_engine

    with contextlib.ExitStack() as on_failure:
        engine = on_failure.enter_context(open_engine(Path(path), backend=backend, threads=threads))
        head = choose_head(
            engine.outputs,
            metadata=engine.metadata,
            task=task,
            pooling=pooling,
            normalize=normalize,
            id2label=id2label,
            max_length=max_length,
        )
        pipeline = open_engine_pipeline(
            engine,
            tokenizer=tokenizer,
            head=head,
            policy=policy,
            on_long=on_long,
            stride=stride,
            max_tokens=max_tokens,
            owned=[engine.close],
        )
        on_failure.pop_all()
    return pipeline


def open_engine_pipeline(
    engine: Engine,
    *,
    tokenizer: str | Path,
    head: TextHead,
    policy: BatchPolicy | None = None,
    max_batch: int = MAX_BATCH,
    on_long: str = "truncate",
    stride: int | None = None,
    max_tokens: int = MAX_TOKENS,
    owned: Sequence[Callable[[], None]] = (),
) -> BertPipeline:
    """A pipeline over an open engine, which stays the caller's unless its ``close`` is among ``owned``.

    Raises EngineMismatch when engine, head and tokenizer do not belong together.
    """
    from edgeds.pipelines.bert.feeds import check_inputs
    from edgeds.runtime import BatchPolicy, Session

    if max_tokens < 1:
        raise SpecError(f"max_tokens {max_tokens}: need at least 1")
    names = [spec.name for spec in engine.outputs]
    for name in head.outputs:
        if name not in names:
            raise EngineMismatch(f"the model gives {', '.join(names)}, not {name!r}, which its head names")
    fixed = check_inputs(engine.inputs)
    limit = min(head.max_length, fixed or head.max_length)
    encoder = TextEncoder(
        load_tokenizer(tokenizer),
        max_length=limit,
        on_long=on_long,
        stride=stride,
        vocab_size=head.vocab_size,
        spans=head.task in ("tag", "answer"),
    )
    # "block": the pipeline is the producer, and its window is what bounds memory.
    batching = policy or BatchPolicy(max_batch=max_batch, max_delay_ms=DELAY_MS, on_full="block")
    session = Session(engine, policy=batching)
    runner = RowRunner(
        session,
        head,
        lengths=_served_lengths(head, limit),
        pad_id=encoder.pad_id,
        max_tokens=max_tokens,
        exact=engine.backend == "onnxruntime",
    )
    return BertPipeline(runner, encoder, owned=(session.close, *owned))


def _served_lengths(head: TextHead, limit: int) -> tuple[int, ...]:
    """The head's lengths up to the limit, which is always one of them."""
    return (*(length for length in head.lengths or default_lengths(limit) if length < limit), limit)
