"""One run of a language model over parts of several sequences: feeds from pages, new keys and values back into them.

The graph's contract (``graph/decoder.py``) is written down in docs/llm-graph.md: token ids and positions padded at the
right end, a block table, how much of every sequence lies in its pages, and the places where logits are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edgeds.engines.base import Array, Engine
from edgeds.errors import DeviceError, ModelError
from edgeds.runtime.kv_layout import PageStore, join_slots
from edgeds.runtime.kv_sequence import KvSequence


class RunsModel(Protocol):
    """What the scheduler and drafters need of a runner."""

    def run(self, chunks: Sequence[Chunk]) -> StepResult: ...


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens of one sequence that follow what its pages hold; logits are wanted after each index in ``picks``."""

    kv: KvSequence
    tokens: Sequence[int]
    picks: Sequence[int]


class StepResult:
    """Logits of every chunk, and its keys and values until ``keep`` writes them into the pages."""

    def __init__(self, chunks: Sequence[Chunk], outputs: Mapping[str, Array], *, store: PageStore) -> None:
        self._chunks = chunks
        self._outputs = outputs
        self._store = store

    def logits(self, index: int) -> Array:
        """Float32 [picks, vocab] of one chunk."""
        logits: Array = self._outputs["logits"][index, : len(self._chunks[index].picks)]
        return logits

    def keep(self, counts: Sequence[int]) -> None:
        """Write the first ``counts[i]`` tokens of every chunk into its sequence's pages, which must be reserved."""
        parts = [
            chunk.kv.slots(count, row=row)
            for row, (chunk, count) in enumerate(zip(self._chunks, counts, strict=True))
            if count
        ]
        if parts:
            layers = range(self._store.layout.layers)
            keys, values = ([self._outputs[f"{kind}_new.{layer}"] for layer in layers] for kind in "kv")
            self._store.write(join_slots(parts), keys, values)

    def attention_mass(self, index: int) -> Array | None:
        """Float32 [blocks, page]: attention each token in the pages got; None when the graph does not tell."""
        mass = self._outputs.get("attention_mass")
        return None if mass is None else mass[index]


class ModelRunner:
    """Runs ``engine`` over ``store``. Not for several threads at once: the scheduler's thread owns it.

    Raises ModelError when the engine is no language model of this contract.
    """

    def __init__(self, engine: Engine, *, store: PageStore) -> None:
        names = {spec.name for spec in engine.inputs}
        missing = sorted({"input_ids", "positions", "past_length", "block_table", "logits_at"} - names)
        if missing:
            raise ModelError(
                f"the model has no input {missing[0]!r}: it was not made by `edgeds bundle create --task generate` "
                "(recipes.llm makes one from a checkpoint)"
            )
        self._engine = engine
        self._store = store
        # An engine that gives its own buffers away until the next run saves a copy of all keys and values.
        self._infer: Any = getattr(engine, "infer_borrowed", None) or engine.infer

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        """Run the chunks as one batch. Raises DeviceError when the model gives no finite logits or the engine fails."""
        feeds = {**_feeds_of(chunks), **self._store.feeds()}
        outputs = self._infer(feeds)
        if not np.isfinite(outputs["logits"]).all():
            raise DeviceError("the model gave logits that are not finite; its weights or its precision are broken")
        return StepResult(chunks, outputs, store=self._store)


def _feeds_of(chunks: Sequence[Chunk]) -> dict[str, Array]:
    step = max(len(chunk.tokens) for chunk in chunks)
    picks = max(len(chunk.picks) for chunk in chunks)
    tables = [chunk.kv.block_table for chunk in chunks]
    # A page that belongs to somebody else is masked by past_length; at least one keeps every shape non-empty.
    blocks = max(1, *(len(table) for table in tables))
    feeds: dict[str, Array] = {
        "input_ids": np.zeros((len(chunks), step), np.int64),
        "positions": np.zeros((len(chunks), step), np.int64),
        "past_length": np.array([chunk.kv.length for chunk in chunks], np.int64),
        "block_table": np.zeros((len(chunks), blocks), np.int64),
        "logits_at": np.zeros((len(chunks), picks), np.int64),
    }
    for row, (chunk, table) in enumerate(zip(chunks, tables, strict=True)):
        count = len(chunk.tokens)
        feeds["input_ids"][row, :count] = chunk.tokens
        feeds["positions"][row] = np.minimum(np.arange(step), count - 1) + chunk.kv.position
        feeds["block_table"][row, : len(table)] = table
        feeds["logits_at"][row, : len(chunk.picks)] = chunk.picks
    return feeds
