"""Texts of any length in, results in their order out: tokens, groups by length, session, task."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeds.errors import EdgedsError, InputError, SessionClosed, SpecError
from edgeds.pipelines.bert.answer import Answer
from edgeds.pipelines.bert.classify import Label
from edgeds.pipelines.bert.embed import FloatArray
from edgeds.pipelines.bert.encode import Encoded, Text, TextEncoder
from edgeds.pipelines.bert.flow import cut_windows, list_items, when_all
from edgeds.pipelines.bert.head import TextHead
from edgeds.pipelines.bert.lengths import RowCost, plan_lengths
from edgeds.pipelines.bert.runner import Group, RowRunner, reduce_outputs
from edgeds.pipelines.bert.tag import Entity, label_words
from edgeds.pipelines.bert.tasks import Build, Item, Pair, build_result

if TYPE_CHECKING:
    from edgeds.bundle import Bundle

log = logging.getLogger("edgeds.pipelines.bert")


@dataclass(frozen=True, kw_only=True)
class TextCounts:
    """What a pipeline has encoded so far. ``truncated``: texts that were cut, by ``cut_tokens`` in all."""

    texts: int = 0
    tokens: int = 0
    rows: int = 0
    truncated: int = 0
    cut_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Items under way together."""

    items: list[Item]
    encoded: list[Encoded]
    groups: list[Group]


class BertPipeline:
    """A text model behind a batching session; thread-safe, a context manager. Made by the ``from_`` functions."""

    def __init__(
        self,
        runner: RowRunner,
        encoder: TextEncoder,
        *,
        owned: Sequence[Callable[[], None]] = (),
    ) -> None:
        """``owned`` are closed, in order, with the pipeline."""
        self._runner = runner
        self._encoder = encoder
        self._owned = tuple(owned)
        self._closed = False
        self._lock = threading.Lock()
        self._counts = TextCounts()
        self.session = runner.session

    @classmethod
    def from_bundle(cls, source: str | Path | Bundle, **options: Any) -> BertPipeline:
        """Open a bundle with a text task. ``options``: ``backend``, ``precision``, ``threads``, ``on_long``
        (truncate, window, error), ``stride``, ``max_tokens``, ``policy``. Raises BundleError, SpecError for another
        task, EngineMismatch for a tokenizer or inputs that are not the model's."""
        from edgeds.pipelines.bert.opening import open_bundle_pipeline

        return open_bundle_pipeline(source, **options)

    @classmethod
    def from_model(cls, path: str | Path, tokenizer: str | Path, **options: Any) -> BertPipeline:
        """Open a plain .onnx with its tokenizer; ``options`` as ``from_bundle`` without ``precision``, and ``task``,
        ``pooling``, ``normalize``, ``id2label``, ``max_length`` where the model does not say."""
        from edgeds.pipelines.bert.opening import open_model_pipeline

        return open_model_pipeline(path, tokenizer, **options)

    @property
    def head(self) -> TextHead:
        return self._runner.head

    @property
    def task(self) -> str:
        return self.head.task

    @property
    def encoder(self) -> TextEncoder:
        return self._encoder

    @property
    def lengths(self) -> tuple[int, ...]:
        """Padded lengths of single requests."""
        return self._runner.lengths

    @property
    def counts(self) -> TextCounts:
        return self._counts

    @property
    def truncated(self) -> int:
        """Texts cut so far, since they were longer than the model takes."""
        return self._counts.truncated

    def embed(self, texts: Text | Iterable[Text]) -> FloatArray:
        """float32 [texts, hidden] in the order of ``texts``; no text gives no rows.

        Raises InputError for a text that cannot be used, EngineMismatch for ids outside the model's vocabulary.
        """
        rows = list(self.embed_each(list_items(texts)))
        return np.stack(rows) if rows else np.zeros((0, self.width), np.float32)

    def embed_each(self, texts: Iterable[Text]) -> Iterator[FloatArray]:
        """``embed`` one by one for any number of texts, in constant memory."""
        return self._each(texts, build_result("embed", self.head), task="embed")

    def classify(self, texts: Item | Iterable[Item], *, top_k: int | None = 1) -> list[list[Label]]:
        """The best ``top_k`` labels (None: all) of every text or pair of texts, best first."""
        return list(self.classify_each(list_items(texts), top_k=top_k))

    def classify_each(self, texts: Iterable[Item], *, top_k: int | None = 1) -> Iterator[list[Label]]:
        """``classify`` one by one for any number of texts, in constant memory."""
        return self._each(texts, build_result("classify", self.head, top_k=top_k), task="classify")

    def tag(self, texts: Text | Iterable[Text], *, aggregation: str = "first") -> list[list[Entity]]:
        """The entities of every text, with characters of the text as given; ``aggregation``: see ``label_words``."""
        return list(self.tag_each(list_items(texts), aggregation=aggregation))

    def tag_each(self, texts: Iterable[Text], *, aggregation: str = "first") -> Iterator[list[Entity]]:
        """``tag`` one by one for any number of texts, in constant memory."""
        return self._each(texts, build_result("tag", self.head, aggregation=aggregation), task="tag")

    def tag_words(self, words: Sequence[str], *, aggregation: str = "first") -> list[str]:
        """One label per given word; a word without tokens, or cut off, has ``O``."""
        self._check_task("tag")
        encoded = self._encoder.encode_words(words) if words else Encoded(rows=())
        self._count([encoded])
        groups = self._runner.start(encoded.rows)
        values = self._runner.finish(groups, len(encoded.rows))
        found = label_words(encoded.rows, values, labels=self.head.id2label, aggregation=aggregation)
        return [found[at].label if at in found else "O" for at in range(len(words))]

    def answer(
        self, question: Text, context: Text, *, n_best: int = 1, no_answer: bool = True, max_answer_tokens: int = 30
    ) -> list[Answer]:
        """At most ``n_best`` answers to ``question`` from ``context``, of any length, best first; see ``Answer``."""
        build = build_result(
            "answer", self.head, n_best=n_best, no_answer=no_answer, max_answer_tokens=max_answer_tokens
        )
        (found,) = self._each([(question, context)], build, task="answer")
        return found

    def answer_each(self, pairs: Iterable[Pair], **options: Any) -> Iterator[list[Answer]]:
        """``answer`` for (question, context) pairs, one by one, in constant memory."""
        return self._each(pairs, build_result("answer", self.head, **options), task="answer")

    def predict(self, items: Item | Iterable[Item]) -> list[Any]:
        """The results of the model's own task with its defaults: vectors, labels, entities or answers."""
        return list(self._each(list_items(items), build_result(self.task, self.head), task=self.task))

    def submit(self, item: Item, *, priority: int = 0, deadline_ms: float | None = None) -> Future[Any]:
        """The future result of one text (or pair), as ``predict`` gives it; batched with others of its length.

        Raises what ``Session.submit`` raises, and InputError for a text that cannot be used.
        """
        self._refuse_closed()
        build = build_result(self.task, self.head)
        (encoded,) = self._encode([item], first=0)
        parts = [self._runner.submit(row, priority=priority, deadline_ms=deadline_ms) for row in encoded.rows]

        def join() -> Any:
            pairs = zip(parts, encoded.rows, strict=True)
            values = [reduce_outputs(part.result().outputs, [row], self.head)[0] for part, row in pairs]
            return build(item, encoded, values)

        return when_all(parts, join)

    async def infer_async(self, item: Item, *, priority: int = 0, deadline_ms: float | None = None) -> Any:
        """``submit`` for asyncio."""
        future = await asyncio.to_thread(self.submit, item, priority=priority, deadline_ms=deadline_ms)
        return await asyncio.wrap_future(future)

    def plan_lengths(
        self, texts: Iterable[Text], *, max_buckets: int = 8, cost: RowCost | None = None
    ) -> tuple[int, ...]:
        """Padded lengths that serve ``texts`` at least cost; ``cost`` defaults to time in proportion to tokens."""
        sizes = (len(row) for text in texts for (item,) in [self._encoder.encode([text])] for row in item.rows)
        return plan_lengths(sizes, max_length=self.head.max_length, max_buckets=max_buckets, cost=cost)

    def close(self) -> None:
        """Close the session, and the engine and bundle when they were opened here. Safe to call twice."""
        if not self._closed:
            self._closed = True
            for close in self._owned:
                close()

    def __enter__(self) -> BertPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(self, items: Iterable[Item], build: Build, *, task: str) -> Iterator[Any]:
        self._check_task(task)
        return self._stream(items, build)

    def _stream(self, items: Iterable[Item], build: Build) -> Iterator[Any]:
        """Tokenize one window while the one before is computed; what came before a bad text is still given."""
        waiting: deque[_Window] = deque()
        failure: EdgedsError | None = None
        done = 0
        try:
            for chunk in cut_windows(items):
                self._refuse_closed()
                try:
                    waiting.append(self._start(chunk, first=done))
                except EdgedsError as error:
                    failure = error
                    break
                done += len(chunk)
                if len(waiting) > 1:
                    yield from self._finish(waiting.popleft(), build)
            while waiting:
                yield from self._finish(waiting.popleft(), build)
            if failure is not None:
                raise failure
        finally:
            for group in (group for window in waiting for group in window.groups):
                group.future.cancel()

    def _start(self, items: list[Item], *, first: int) -> _Window:
        encoded = self._encode(items, first=first)
        rows = [row for item in encoded for row in item.rows]
        return _Window(items=items, encoded=encoded, groups=self._runner.start(rows))

    def _finish(self, window: _Window, build: Build) -> Iterator[Any]:
        values = self._runner.finish(window.groups, sum(len(item.rows) for item in window.encoded))
        at = 0
        for item, encoded in zip(window.items, window.encoded, strict=True):
            yield build(item, encoded, values[at : at + len(encoded.rows)])
            at += len(encoded.rows)

    def _encode(self, items: Sequence[Item], *, first: int) -> list[Encoded]:
        pairs = self.task == "answer" or any(isinstance(item, tuple) for item in items)
        encoded = (
            [self._encode_pair(item, where=f"text {first + at}") for at, item in enumerate(items)]
            if pairs
            else self._encoder.encode(items, first=first)  # type: ignore[arg-type]
        )
        self._count(encoded)
        return encoded

    def _encode_pair(self, item: Item, *, where: str) -> Encoded:
        if not isinstance(item, tuple):
            if self.task == "answer":
                raise InputError(f"{where}: expected a question and its context, got {type(item).__name__}")
            return self._encoder.encode([item])[0]
        if len(item) != 2 or self.task in ("embed", "tag"):
            raise InputError(f"{where}: {len(item)} parts; {self.task} takes single texts, classify also pairs")
        return self._encoder.encode_pair(item[0], item[1], where=where, windows=self.task == "answer")

    def _count(self, encoded: Sequence[Encoded]) -> None:
        cut = [item.cut_tokens for item in encoded if item.cut_tokens]
        with self._lock:
            old = self._counts
            self._counts = replace(
                old,
                texts=old.texts + len(encoded),
                tokens=old.tokens + sum(len(row) for item in encoded for row in item.rows),
                rows=old.rows + sum(len(item.rows) for item in encoded),
                truncated=old.truncated + len(cut),
                cut_tokens=old.cut_tokens + sum(cut),
            )
        if cut and not old.truncated:
            log.warning(
                "a text is longer than the %d tokens the model takes and was cut; all are counted in .truncated, "
                "on_long='window' covers them whole",
                self._encoder.max_length,
            )

    @property
    def width(self) -> int:
        """Values of one embedding, or labels; 0 where the model leaves it open."""
        spec = next(spec for spec in self.session.engine.outputs if spec.name == self.head.outputs[0])
        return spec.shape[-1] if isinstance(spec.shape[-1], int) else 0

    def _check_task(self, task: str) -> None:
        self._refuse_closed()
        if task != self.task:
            raise SpecError(f"this model's task is {self.task!r}, so it cannot {task}; open one made for that")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise SessionClosed("this pipeline is closed; open a new one")
