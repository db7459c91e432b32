"""From a bundle to a language-model pipeline: every mismatch is found before the first prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgeds.errors import BundleError, SpecError
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.pipelines.llm.text import open_text

if TYPE_CHECKING:
    from edgeds.bundle import Bundle

TASK = "generate"
TOKENIZER_FOLDER = "tokenizer"


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
    from edgeds.engines import open_engine

    with contextlib.ExitStack() as on_failure:
        owned: list[Callable[[], None]] = []

        def opened(given: str | Path | Bundle) -> Bundle:
            bundle = _open(given)
            if bundle is not given:
                on_failure.callback(bundle.close)
                owned.append(bundle.close)
            if bundle.manifest.task != TASK:
                raise SpecError(f"{bundle.source}: task {bundle.manifest.task!r}; this needs a bundle of task {TASK!r}")
            return bundle

        bundle = opened(source)
        engine = open_engine(bundle, backend=backend, precision=precision, threads=threads)  # type: ignore[arg-type]
        on_failure.callback(engine.close)
        owned.insert(0, engine.close)
        small = None
        if draft is not None:
            small = open_engine(opened(draft), backend=backend, precision=precision, threads=threads)  # type: ignore[arg-type]
            on_failure.callback(small.close)
            owned.insert(0, small.close)
        if not any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in bundle.manifest.files):
            raise BundleError(f"{bundle.source}: holds no tokenizer; it needs {TOKENIZER_FOLDER}/tokenizer.json")
        text = open_text(bundle.root / TOKENIZER_FOLDER)
        pipeline = LlmPipeline(engine, text=text, settings=settings, draft=small, owned=owned)
        on_failure.pop_all()
    return pipeline


def _open(source: str | Path | Bundle) -> Bundle:
    from edgeds.bundle import open_bundle

    return open_bundle(Path(source)) if isinstance(source, str | Path) else source
