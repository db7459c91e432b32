"""Images of any size in, results in order out: letterbox to a bucket, submit to the session, decode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeds.buckets import pick_bucket
from edgeds.errors import InputError, SessionClosed, SpecError
from edgeds.pipelines.sources import Frame, open_sources
from edgeds.pipelines.yolo.layout import HeadLayout
from edgeds.pipelines.yolo.options import DetectOptions
from edgeds.pipelines.yolo.postprocess import results_from_outputs
from edgeds.pipelines.yolo.result import Result
from edgeds.preproc import ImagePreprocess, Placement, prepare_image, read_image, to_bgr
from edgeds.specs import Resolution, TensorSpec

if TYPE_CHECKING:
    from edgeds.bundle import Bundle
    from edgeds.engines.base import Engine
    from edgeds.runtime.session import Session

log = logging.getLogger("edgeds.pipelines.yolo")

ImageLike = str | Path | NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything a pipeline needs to know about its model."""

    layout: HeadLayout
    preprocess: ImagePreprocess
    buckets: tuple[Resolution, ...]
    names: Mapping[int, str]
    input: TensorSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pending:
    future: Future[Any] | None
    placement: Placement | None
    result: Result
    prepare_ms: float = 0.0


class YoloPipeline:
    """A YOLO model behind a batching session; thread-safe, a context manager. Made by the ``from_`` functions."""

    def __init__(
        self,
        session: Session,
        setup: Setup,
        *,
        options: DetectOptions | None = None,
        window: int = 16,
        owned: Sequence[Callable[[], None]] = (),
    ) -> None:
        """``window`` bounds the images in flight; ``owned`` are closed, in order, with the pipeline."""
        self.session = session
        self.setup = setup
        self.options = options or DetectOptions()
        self._window = max(1, window)
        self._owned = tuple(owned)
        self._closed = False

    @classmethod
    def from_bundle(cls, source: str | Path | Bundle, **options: Any) -> YoloPipeline:
        """Open a bundle. ``options``: ``backend``, ``precision``, ``threads``, ``buckets``, ``policy``, and the
        thresholds ``conf``, ``iou``, ``max_det``, ``agnostic``, ``multi_label``. Raises BundleError, and
        EngineMismatch when preprocessing or model input do not belong to the bundle (report B49)."""
        from edgeds.pipelines.yolo.opening import open_bundle_pipeline

        return open_bundle_pipeline(source, **options)

    @classmethod
    def from_engine(cls, engine: Engine, **options: Any) -> YoloPipeline:
        """Wrap an open engine, which stays the caller's. ``options``: ``names``, ``head``, ``preprocess``,
        ``buckets``, ``policy`` and the thresholds; what is not given comes from the model's metadata."""
        from edgeds.pipelines.yolo.opening import open_engine_pipeline

        return open_engine_pipeline(engine, **options)

    @classmethod
    def from_model(cls, path: str | Path, **options: Any) -> YoloPipeline:
        """Open a plain model file (.onnx); ``options`` as ``from_engine`` plus ``backend`` and ``threads``."""
        from edgeds.pipelines.yolo.opening import open_model_pipeline

        return open_model_pipeline(path, **options)

    @property
    def names(self) -> Mapping[int, str]:
        return self.setup.names

    @property
    def task(self) -> str:
        return self.setup.layout.task

    def with_options(self, **changes: Any) -> YoloPipeline:
        """The same model and session with other thresholds; closing the copy leaves the session open."""
        _check_keys(changes)
        return YoloPipeline(self.session, self.setup, options=replace(self.options, **changes), window=self._window)

    def predict(self, images: ImageLike | Iterable[ImageLike]) -> list[Result]:
        """Results in the order of the images; a single image gives a list of one.

        An image is a path or an array that ``preproc.to_bgr`` takes. One bad image raises InputError when it is alone;
        in a list its own Result has ``error`` set and the others are not affected (report B89). SessionClosed,
        ModelError and engine errors end the whole call.
        """
        if isinstance(images, str | Path | np.ndarray):
            return [self.predict_one(images)]
        if not isinstance(images, Iterable):
            raise InputError(f"images: expected a path, an array or several of them, got {type(images).__name__}")
        return list(self.predict_each(images))

    def predict_one(self, image: ImageLike) -> Result:
        """The result of one image. Raises InputError when it cannot be used."""
        (result,) = self._run(iter([self._submit(image, "image")]), window=1)
        if result.error is not None:
            raise result.error
        return result

    def predict_each(self, images: Iterable[ImageLike]) -> Iterator[Result]:
        """``predict`` one by one: images are taken as there is room, at most ``window`` are in flight."""
        submitted = (self._submit(image, f"image {index}") for index, image in enumerate(images))
        for result in self._run(submitted, window=self._window):
            if result.error is not None:
                log.warning("skipped: %s", result.error)
            yield result

    async def predict_async(self, images: ImageLike | Iterable[ImageLike]) -> list[Result]:
        """``predict`` without blocking the event loop."""
        return await asyncio.to_thread(self.predict, images)

    def stream(self, sources: Any, *, policy: str = "auto") -> Generator[tuple[Frame, Result], None, None]:
        """(frame, result) pairs in order for everything ``open_sources`` takes, or for an iterable of ``Frame``.

        At most ``window`` frames are in flight. A frame that cannot be used gives a result with ``error`` set. Sources
        opened here are closed when the iterator ends or is closed.
        """
        opened = sources if _has_frames(sources) else open_sources(sources, policy=policy)
        frames: deque[Frame] = deque()

        def submit() -> Iterator[_Pending]:
            for frame in opened:
                frames.append(frame)
                yield self._submit_frame(frame)

        try:
            # In-flight frames of a live source are delay, so there only enough of them to keep the engine busy.
            live = getattr(opened, "live_count", 0)
            for result in self._run(submit(), window=max(2, live) if live else self._window):
                yield frames.popleft(), result
        finally:
            if opened is not sources:
                opened.close()

    def close(self) -> None:
        """Close the session, and the engine and bundle when they were opened here. Safe to call twice."""
        if not self._closed:
            self._closed = True
            for close in self._owned:
                close()

    def __enter__(self) -> YoloPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, submitted: Iterator[_Pending], *, window: int) -> Iterator[Result]:
        """Keep up to ``window`` requests in flight and finish them in order; cancel the rest when abandoned."""
        waiting: deque[_Pending] = deque()
        try:
            for pending in submitted:
                waiting.append(pending)
                # What is done already goes out at once, so that a slow source does not delay finished results.
                while waiting and (len(waiting) >= window or _is_done(waiting[0])):
                    yield self._finish(waiting.popleft())
            while waiting:
                yield self._finish(waiting.popleft())
        finally:
            for pending in waiting:
                if pending.future is not None:
                    pending.future.cancel()

    def _submit_frame(self, frame: Frame) -> _Pending:
        if frame.error is not None or frame.image_bgr is None:
            error = frame.error or InputError(f"{frame.source}: frame {frame.index} has no picture")
            return _Pending(future=None, placement=None, result=self._failed(error, frame.source))
        return self._submit(frame.image_bgr, frame.source)

    def _submit(self, image: ImageLike, source: str) -> _Pending:
        if self._closed:
            raise SessionClosed("this pipeline is closed; open a new one")
        start = time.perf_counter()
        path = None if isinstance(image, np.ndarray) or not isinstance(image, str | Path) else Path(image)
        source = source if path is None else str(path)
        try:
            pixels = to_bgr(image, where=source) if path is None else read_image(path)
            size = Resolution(*pixels.shape[:2])
            bucket = pick_bucket(size, self.setup.buckets)
            chw, placement = prepare_image(pixels, self.setup.preprocess, bucket, where=source)
        except InputError as error:
            return _Pending(future=None, placement=None, result=self._failed(error, source, path=path))
        feed = chw[None].astype(self.setup.input.np_dtype, copy=False)
        kept = pixels if path is None else None
        return _Pending(
            future=self.session.submit({self.setup.input.name: feed}),
            placement=placement,
            result=Result(names=self.names, task=self.task, size=size, source=source, image=kept, path=path),
            prepare_ms=(time.perf_counter() - start) * 1e3,
        )

    def _failed(self, error: InputError, source: str, *, path: Path | None = None) -> Result:
        return Result(names=self.names, task=self.task, source=source, path=path, error=error)

    def _finish(self, pending: _Pending) -> Result:
        if pending.future is None or pending.placement is None:
            return pending.result
        answer = pending.future.result()
        start = time.perf_counter()
        (found,) = results_from_outputs(
            answer.outputs,
            self.setup.layout,
            placements=[pending.placement],
            names=self.names,
            options=self.options,
        )
        timings = {
            "prepare": pending.prepare_ms,
            "queue": answer.queue_ms,
            "compute": answer.compute_ms,
            "decode": (time.perf_counter() - start) * 1e3,
        }
        known = pending.result
        return replace(found, source=known.source, image=known.image, path=known.path, timings_ms=timings)


def _is_done(pending: _Pending) -> bool:
    return pending.future is None or pending.future.done()


def _has_frames(sources: Any) -> bool:
    """Whether this is an opened source (its frames are consumed, but closing it stays with its owner)."""
    return hasattr(sources, "__next__") and hasattr(sources, "close") and getattr(sources, "yields_frames", False)


def _check_keys(changes: Mapping[str, Any]) -> None:
    known = DetectOptions.__dataclass_fields__
    if unknown := sorted(set(changes) - set(known)):
        raise SpecError(f"unknown option {unknown[0]!r}; known options: {', '.join(known)}")
