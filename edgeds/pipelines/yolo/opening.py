"""From a bundle, an engine or a model file to a pipeline: every mismatch is found here, before the first image."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.boards.stored_plan import DEFAULT_DELAY_MS, read_stored_plan
from edgeds.errors import EngineMismatch, SpecError
from edgeds.pipelines.yolo.layout import HeadLayout, choose_layout
from edgeds.pipelines.yolo.metadata import TASKS, parse_metadata, parse_names
from edgeds.pipelines.yolo.options import DetectOptions, default_buckets, default_preprocess, fixed_resolution
from edgeds.pipelines.yolo.pipeline import Setup, YoloPipeline
from edgeds.preproc import ImagePreprocess
from edgeds.specs import Resolution, TensorSpec

if TYPE_CHECKING:
    from edgeds.bundle import Bundle
    from edgeds.engines.base import Engine
    from edgeds.runtime import BatchPolicy


def open_bundle_pipeline(
    source: str | Path | Bundle,
    *,
    backend: str = "auto",
    precision: str = "auto",
    threads: int | None = None,
    buckets: Sequence[Resolution | int | str] | None = None,
    **options: Any,
) -> YoloPipeline:
    """See ``YoloPipeline.from_bundle``."""
    from edgeds.bundle import open_bundle
    from edgeds.engines import open_engine

    with contextlib.ExitStack() as on_failure:
        owned: list[Callable[[], None]] = []
        if isinstance(source, str | Path):
            bundle = on_failure.enter_context(open_bundle(Path(source)))
            owned.append(bundle.close)
        else:
            bundle = source
        manifest = bundle.manifest
        if manifest.task not in TASKS:
            raise SpecError(f"{bundle.source}: task {manifest.task!r} is not one of a YOLO model ({', '.join(TASKS)})")
        plan = read_stored_plan(manifest.plan, where=f"{bundle.source}: plan")
        engine = open_engine(bundle, backend=backend, precision=precision, threads=threads)  # type: ignore[arg-type]
        on_failure.callback(engine.close)
        owned.insert(0, engine.close)
        pipeline = open_engine_pipeline(
            engine,
            names=manifest.names or None,
            head=manifest.head or {"task": manifest.task},
            preprocess=bundle.preprocess(),
            buckets=buckets or manifest.buckets or None,
            max_batch=manifest.max_batch if plan is None else min(plan.batch, manifest.max_batch),
            max_delay_ms=DEFAULT_DELAY_MS if plan is None else plan.max_delay_ms,
            owned=owned,
            **options,
        )
        on_failure.pop_all()
    return pipeline


def open_model_pipeline(
    path: str | Path, *, backend: str = "auto", threads: int | None = None, **options: Any
) -> YoloPipeline:
    """See ``YoloPipeline.from_model``."""
    from edgeds.engines import open_engine

    with contextlib.ExitStack() as on_failure:
        engine = on_failure.enter_context(open_engine(Path(path), backend=backend, threads=threads))
        pipeline = open_engine_pipeline(engine, owned=[engine.close], **options)
        on_failure.pop_all()
    return pipeline


def open_engine_pipeline(
    engine: Engine,
    *,
    names: Mapping[int, str] | Sequence[str] | None = None,
    head: str | Mapping[str, Any] | HeadLayout | None = None,
    preprocess: ImagePreprocess | None = None,
    buckets: Sequence[Resolution | int | str] | None = None,
    max_batch: int = 8,
    max_delay_ms: float = DEFAULT_DELAY_MS,
    policy: BatchPolicy | None = None,
    owned: Sequence[Callable[[], None]] = (),
    **thresholds: Any,
) -> YoloPipeline:
    """See ``YoloPipeline.from_engine``; ``owned`` are closed with the pipeline, after the session."""
    from edgeds.runtime import BatchPolicy, Session

    if unknown := sorted(set(thresholds) - set(DetectOptions.__dataclass_fields__)):
        raise SpecError(f"unknown option {unknown[0]!r}; known: {', '.join(DetectOptions.__dataclass_fields__)}")
    options = DetectOptions(**thresholds)
    setup = plan_setup(engine, names=names, head=head, preprocess=preprocess, buckets=buckets)
    batch_dim = setup.input.shape[0]
    if policy is None:
        fitting = batch_dim if isinstance(batch_dim, int) else max_batch
        # "block": this pipeline is the only producer, and its window is what bounds memory.
        policy = BatchPolicy(max_batch=fitting, max_delay_ms=max_delay_ms, on_full="block")
    session = Session(engine, policy=policy, buckets=setup.buckets)
    return YoloPipeline(session, setup, options=options, window=2 * policy.max_batch, owned=(session.close, *owned))


def plan_setup(
    engine: Engine,
    *,
    names: Mapping[int, str] | Sequence[str] | None = None,
    head: str | Mapping[str, Any] | HeadLayout | None = None,
    preprocess: ImagePreprocess | None = None,
    buckets: Sequence[Resolution | int | str] | None = None,
) -> Setup:
    """Layout, preprocessing, buckets and names of an engine; what is not given comes from its metadata.

    Raises SpecError for values that do not fit the model's outputs, EngineMismatch for preprocessing or buckets that
    do not fit its input.
    """
    if len(engine.inputs) != 1:
        shown = ", ".join(str(spec) for spec in engine.inputs)
        raise SpecError(f"the model has {len(engine.inputs)} inputs ({shown}); a YOLO model has one image input")
    (input_spec,) = engine.inputs
    if input_spec.dtype not in ("float32", "float16"):
        raise SpecError(f"input {input_spec}: a YOLO model takes float32 or float16 images; export it again")
    known = parse_metadata(engine.metadata)
    labels = parse_names(names) if names is not None else dict(known.names or {})
    layout = choose_layout(
        engine.metadata, engine.outputs, override=head, input_spec=input_spec, classes=len(labels) or None
    )
    if labels and layout.classes and len(labels) != layout.classes:
        raise SpecError(f"names: {len(labels)} names were given for a model with {layout.classes} classes")
    if not labels:
        labels = {index: f"class{index}" for index in range(layout.classes)}
    chosen = preprocess or default_preprocess(layout, metadata=known, input_spec=input_spec)
    sizes = (
        tuple(size if isinstance(size, Resolution) else Resolution.parse(size) for size in buckets)
        if buckets
        else default_buckets(layout, metadata=known, input_spec=input_spec, stride=chosen.stride)
    )
    _check_input(input_spec, chosen, sizes)
    return Setup(layout=layout, preprocess=chosen, buckets=sizes, names=labels, input=input_spec)


def _check_input(spec: TensorSpec, preprocess: ImagePreprocess, buckets: Sequence[Resolution]) -> None:
    channels = spec.shape[1] if len(spec.shape) == 4 else 0
    if isinstance(channels, int) and channels != preprocess.channel_count:
        raise EngineMismatch(
            f"input {spec} does not take what the preprocessing makes: {preprocess.channel_count} channels "
            f"({preprocess.channels}), [N, C, H, W]; use the preprocessing this model was built with"
        )
    fixed = fixed_resolution(spec)
    for bucket in buckets:
        if fixed is None and (bucket.height_px % preprocess.stride or bucket.width_px % preprocess.stride):
            raise SpecError(f"bucket {bucket}: both sides must be multiples of the model's stride {preprocess.stride}")
        if not spec.accepts((1, preprocess.channel_count, bucket.height_px, bucket.width_px)) and (
            fixed is not None and fixed != bucket
        ):
            raise EngineMismatch(f"bucket {bucket} does not fit the fixed input {spec}; use {fixed}")
