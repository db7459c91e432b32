"""From a bundle to a language model: every mismatch is found before the first prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.engines.base import Engine
from edgeds.errors import BundleError, SpecError
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.pipelines.llm.text import LlmText, open_text

if TYPE_CHECKING:
    from edgeds.bundle import Bundle

TASK = "generate"
TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True, kw_only=True)
class LanguageBundle:
    """What a bundle of task ``generate`` holds, opened. ``closers`` free it, in order."""

    engine: Engine
    text: LlmText
    closers: tuple[Callable[[], None], ...]


@contextlib.contextmanager
def open_language_bundle(
    source: str | Path | Bundle, *, backend: str = "auto", precision: str = "auto", threads: int | None = None
) -> Iterator[LanguageBundle]:
    """Engine and tokenizer of a bundle while the context lasts. Raises BundleError, SpecError, ModelError."""
    opened = _open(source, backend=backend, precision=precision, threads=threads)
    try:
        yield opened
    finally:
        for close in opened.closers:
            close()


def open_bundle_pipeline(
    source: str | Path | Bundle,
    *,
    backend: str = "auto",
    precision: str = "auto",
    threads: int | None = None,
    settings: LlmSettings | None = None,
    draft: str | Path | Bundle | None = None,
) -> LlmPipeline:
    """See ``LlmPipeline.from_bundle``."""
    with contextlib.ExitStack() as on_failure:
        owned: list[Callable[[], None]] = []

        def opened(given: str | Path | Bundle) -> LanguageBundle:
            found = _open(given, backend=backend, precision=precision, threads=threads)
            owned.extend(found.closers)
            for close in reversed(found.closers):
                on_failure.callback(close)
            return found

        found = opened(source)
        small = None if draft is None else opened(draft).engine
        pipeline = LlmPipeline(found.engine, text=found.text, settings=settings, draft=small, owned=owned)
        on_failure.pop_all()
    return pipeline


def _open(source: str | Path | Bundle, *, backend: str, precision: str, threads: int | None) -> LanguageBundle:
    from edgeds.bundle import open_bundle
    from edgeds.engines import open_engine

    with contextlib.ExitStack() as on_failure:
        closers: list[Callable[[], None]] = []
        bundle = open_bundle(Path(source)) if isinstance(source, str | Path) else source
        if bundle is not source:
            on_failure.callback(bundle.close)
            closers.append(bundle.close)
        if bundle.manifest.task != TASK:
            raise SpecError(f"{bundle.source}: task {bundle.manifest.task!r}; this needs a bundle of task {TASK!r}")
        if not any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in bundle.manifest.files):
            raise BundleError(f"{bundle.source}: holds no tokenizer; it needs {TOKENIZER_FOLDER}/tokenizer.json")
        engine = open_engine(bundle, backend=backend, precision=precision, threads=threads)  # type: ignore[arg-type]
        on_failure.callback(engine.close)
        closers.insert(0, engine.close)
        text = open_text(bundle.root / TOKENIZER_FOLDER)
        on_failure.pop_all()
    return LanguageBundle(engine=engine, text=text, closers=tuple(closers))
