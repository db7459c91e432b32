"""Token states to one vector per text, where the graph does not do it itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeds.engines.base import Array

FloatArray = NDArray[np.float32]
_TINY = 1e-12
"""Lengths below it are not divided by, as in torch.nn.functional.normalize."""


def pool_states(states: Array, lengths: Sequence[int], *, pooling: str) -> FloatArray:
    """[rows, length, hidden] to float32 [rows, hidden] over each row's first ``lengths`` tokens."""
    states = states.astype(np.float32, copy=False)
    if pooling == "cls":
        return states[:, 0].copy()
    mask = (np.arange(states.shape[1]) < np.asarray(lengths)[:, None])[:, :, None]
    if pooling == "max":
        return np.where(mask, states, -np.inf).max(axis=1).astype(np.float32)
    total = np.where(mask, states, 0).sum(axis=1, dtype=np.float32)
    return (total / np.maximum(np.asarray(lengths, np.float32), 1)[:, None]).astype(np.float32)


def unit_rows(vectors: Array) -> FloatArray:
    """Rows scaled to length 1; a zero row stays zero."""
    values = np.asarray(vectors, np.float32)
    norms = np.sqrt(np.einsum("...i,...i->...", values, values))[..., None]
    return (values / np.maximum(norms, _TINY)).astype(np.float32)


def join_windows(vectors: Sequence[Array], tokens: Sequence[int], *, normalize: bool) -> FloatArray:
    """One vector for a text in several windows: their mean, weighted by tokens."""
    if len(vectors) == 1:
        return np.asarray(vectors[0], np.float32)
    mean = np.average(np.stack(vectors).astype(np.float64), axis=0, weights=tokens).astype(np.float32)
    return unit_rows(mean) if normalize else mean
