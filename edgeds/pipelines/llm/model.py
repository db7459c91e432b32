"""An engine with its KV cache: what generation and scoring have of a language model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from edgeds.engines.base import Engine
from edgeds.errors import ModelError
from edgeds.pipelines.llm.runner import ModelRunner
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.runtime.kv_evict import EvictionPolicy
from edgeds.runtime.kv_layout import KvLayout
from edgeds.runtime.kv_mapped import MappedStore, open_store
from edgeds.runtime.kv_pool import KvPool

log = logging.getLogger("edgeds.pipelines.llm")


class LlmModel:
    """A runner over a pool. ``vocab``, ``context`` (tokens) and ``ends`` (end tokens) are what the graph states;
    ``max_picks`` is how many logits of a sequence one run of a device engine may give.

    Raises ModelError for an engine that is no decoder of ``graph/decoder.py``.
    """

    def __init__(self, engine: Engine, settings: LlmSettings) -> None:
        metadata = engine.metadata
        self.layout = KvLayout.from_metadata(metadata)
        self.vocab = _number(metadata, "edgeds.vocab_size")
        self.context = _number(metadata, "edgeds.max_length")
        self.ends = tuple(_parsed(metadata, "edgeds.eos", []))
        _tell_limit(self.context, metadata)
        self.has_mass = any(spec.name == "attention_mass" for spec in engine.outputs)
        self.is_windowed = bool(metadata.get("edgeds.sliding_window"))
        self.max_picks = _most(engine, "logits_at", axis=1)
        pages = settings.pages(self.layout, context=self.context)
        pages = min(pages, _most(engine, "k_pages.0", axis=0) or pages)
        self.store = open_store(engine, self.layout, pages)
        self.pool = KvPool(
            self.layout,
            pages=pages,
            store=self.store,
            prefix_cache=settings.prefix_cache,
            watermark=settings.watermark if pages > 1 else 0.0,
        )
        self.runner = ModelRunner(engine, store=self.store)

    def close(self) -> None:
        """Give back what the cache holds of the engine's device; before the engine is closed."""
        if isinstance(self.store, MappedStore):
            self.store.close()


def _most(engine: Engine, name: str, *, axis: int) -> int | None:
    """The largest size that a device engine was built for; None for engines that take any."""
    profiles = getattr(engine, "profiles", None) or ()
    sizes = [profile[name].max[axis] for profile in profiles if name in profile]
    return max(sizes, default=None)


def _tell_limit(context: int, metadata: Mapping[str, str]) -> None:
    """Say which limit holds where the checkpoint documents several: a longer one would be believed otherwise."""
    limits = {name: value for name, value in _parsed(metadata, "edgeds.limits", {}).items() if value}
    if any(value != context for value in limits.values()):
        named = ", ".join(f"{name} {value}" for name, value in sorted(limits.items(), key=lambda item: item[1]))
        log.warning("texts may have %d tokens, the least of the model's limits: %s", context, named)


def _parsed(metadata: Mapping[str, str], key: str, default: Any) -> Any:
    """JSON of the kind of ``default``, which stands for what is not there."""
    try:
        value = json.loads(metadata.get(key) or json.dumps(default))
    except ValueError:
        value = None
    if not isinstance(value, type(default)):
        raise ModelError(f"the model's metadata has {key}={metadata.get(key)!r}: not a decoder that edgeds built")
    return value


def _number(metadata: Mapping[str, str], key: str) -> int:
    text = metadata.get(key, "")
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ModelError(f"the model's metadata has {key}={text!r}: not a decoder that edgeds built")
    return int(text)


def eviction_policy(budget: int) -> EvictionPolicy:
    """Seven eighths of the budget for the most recent tokens, the usual four sinks, the rest by attention.

    Measured with SmolLM2-135M (docs/llm.md): fewer recent tokens lose more, and so does giving up many at a time.
    """
    return EvictionPolicy(budget=budget, sinks=min(4, budget // 16), recent=budget * 7 // 8, slack=budget // 32)
