"""Perplexity of a language model on a text, computed as generation computes it: chunks of tokens over the KV pool."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeds.engines.base import Array
from edgeds.errors import InputError, SpecError
from edgeds.files import read_regular
from edgeds.pipelines.llm.model import LlmModel, eviction_policy
from edgeds.pipelines.llm.opening import open_language_bundle
from edgeds.pipelines.llm.runner import Chunk
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.progress import track
from edgeds.runtime.kv_evict import TokenScores, evict_tokens

if TYPE_CHECKING:
    from edgeds.bundle import Bundle

WINDOW = 512
CHUNK = 128
MAX_TEXT_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """``value`` is exp of the mean negative log likelihood (nats) over ``tokens`` predicted ones.

    Each of ``windows`` starts with nothing before it, so its first token is not predicted.
    """

    value: float
    nll: float
    tokens: int
    windows: int
    window_tokens: int
    seconds: float


def measure_perplexity(
    model: LlmModel,
    tokens: Sequence[int],
    *,
    window: int = WINDOW,
    chunk: int = CHUNK,
    kv_budget: int | None = None,
    quiet: bool = False,
) -> Perplexity:
    """Score ``tokens`` in windows, ``chunk`` tokens a run; with ``kv_budget`` what lies beyond it is evicted.

    Raises SpecError for sizes that do not fit, InputError for fewer than two tokens.
    """
    for name, value in (("window", window), ("chunk", chunk)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{name}: expected a whole number from 1, got {value!r}")
    if not 2 <= window <= model.context:
        raise SpecError(f"window: expected 2 to {model.context} tokens (the model's context), got {window}")
    if kv_budget is not None and not model.has_mass:
        raise SpecError("kv_budget: needs a bundle that was created with eviction")
    chunk = min(chunk, model.max_picks or chunk)
    parts = [tokens[at : at + window] for at in range(0, len(tokens), window)]
    parts = [part for part in parts if len(part) > 1]
    if not parts:
        raise InputError("perplexity needs a text of at least two tokens")
    started = time.perf_counter()
    total = 0.0
    for part in track(parts, what="scoring", total=len(parts), unit="window", quiet=quiet):
        total += _score(model, part, chunk=chunk, kv_budget=kv_budget)
    count = sum(len(part) - 1 for part in parts)
    nll = total / count
    return Perplexity(
        value=math.exp(min(nll, 700.0)),
        nll=nll,
        tokens=count,
        windows=len(parts),
        window_tokens=window,
        seconds=time.perf_counter() - started,
    )


def _score(model: LlmModel, tokens: Sequence[int], *, chunk: int, kv_budget: int | None) -> float:
    """Sum of negative log likelihoods of all tokens but the first."""
    model.pool.drop_cache()  # logits are wanted for every token, also those of a known prefix
    sequence = model.pool.open(tokens)
    policy, scores = None if kv_budget is None else eviction_policy(kv_budget), TokenScores()
    total = 0.0
    try:
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            model.pool.reserve(sequence, len(part))
            before = sequence.length
            result = model.runner.run([Chunk(kv=sequence, tokens=part, picks=range(len(part)))])
            result.keep([len(part)])
            model.pool.commit(sequence, part)
            total += _nll(result.logits(0), tokens[start + 1 : start + 1 + len(part)])
            mass = result.attention_mass(0)
            if policy is not None and mass is not None:
                scores.add(mass, length=before)
                evict_tokens(model.pool, sequence, scores=scores, policy=policy)
    finally:
        model.pool.close(sequence)
    return total


def _nll(logits: Array, following: Sequence[int]) -> float:
    """``logits`` [n, vocab] before each of ``following``; the last window's last row predicts nothing."""
    rows = logits[: len(following)].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    chosen = rows[np.arange(len(following)), np.asarray(following, np.int64)]
    return float((np.log(np.exp(rows).sum(axis=1)) - chosen).sum())


def evaluate_language_model(
    source: str | Path | Bundle,
    data: Path,
    *,
    limit: int | None = None,
    window: int = WINDOW,
    chunk: int = CHUNK,
    kv_budget: int | None = None,
    backend: str = "auto",
    precision: str = "auto",
    threads: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Perplexity of a bundle on the first ``limit`` tokens of a text file, as a report.

    Raises what ``measure_perplexity`` and opening a bundle raise, and InputError for a file that is no text.
    """
    if limit is not None and (isinstance(limit, bool) or limit < 2):
        raise SpecError(f"limit {limit!r}: expected at least two tokens")
    written = _read(data)
    with open_language_bundle(source, backend=backend, precision=precision, threads=threads) as opened:
        tokens = opened.text.encode(written)[:limit]
        held = window if kv_budget is None else min(window, kv_budget + chunk)
        model = LlmModel(opened.engine, LlmSettings(kv_tokens=2 * held, prefix_cache=False))
        opened.text.check_vocab(model.vocab)
        window = min(window, model.context)
        try:
            found = measure_perplexity(model, tokens, window=window, chunk=chunk, kv_budget=kv_budget, quiet=quiet)
        finally:
            model.close()
        return {
            "metric": "perplexity",
            "value": found.value,
            "perplexity": found.value,
            "nll": found.nll,
            "samples": found.tokens,
            "windows": found.windows,
            "window_tokens": found.window_tokens,
            "kv_dtype": model.layout.dtype,
            "kv_budget": kv_budget,
            "seconds": found.seconds,
            "data": str(data),
            "precision": opened.engine.precision,
            "backend": opened.engine.backend,
            "fallback_reason": opened.engine.fallback_reason,
        }


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise InputError(f"{path}: larger than {MAX_TEXT_BYTES >> 20} MiB; measure a part of it")
        return read_regular(path).decode()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8 text") from error
