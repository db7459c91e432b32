"""Feeds for a decoder graph with nothing in its cache: for calibration, proofs and costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from edgeds.graph.io import input_specs


def prefill_feeds(
    model: ModelProto, tokens: Sequence[Sequence[int]], *, picks: Sequence[int] | None = None
) -> dict[str, NDArray[np.generic]]:
    """One run over ``tokens`` [batch][step] from an empty cache of one page, with logits after the places ``picks``
    (default: the last)."""
    ids = np.asarray(tokens, np.int64)
    batch, step = ids.shape
    places = list(picks) if picks is not None else [step - 1]
    feeds: dict[str, NDArray[np.generic]] = {
        "input_ids": ids,
        "positions": np.tile(np.arange(step, dtype=np.int64), (batch, 1)),
        "past_length": np.zeros(batch, np.int64),
        "block_table": np.zeros((batch, 1), np.int64),
        "logits_at": np.tile(np.asarray(places, np.int64), (batch, 1)),
    }
    for spec in input_specs(model):
        if spec.name not in feeds:
            shape = (1, *(size for size in spec.shape[1:] if isinstance(size, int)))
            feeds[spec.name] = np.zeros(shape, spec.np_dtype)
    return feeds
