"""Ranges of the dimensions that neither a batch nor a resolution gives: text lengths, and those of a KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeds.bundle import Manifest
from edgeds.engines.profiles import DimRange
from edgeds.errors import BundleError

MAX_LENGTH_PROFILES = 4
"""A profile costs build time and memory; lengths between two of them take the kernels of the longer."""
PREFILL_STEP, USUAL_PREFILL = 512, 128
GUESS_STEP = 16
"""Tokens of a step that decodes: one, and guesses to check."""
USUAL_CONTEXT = 1024

Dims = Mapping[str, Sequence[DimRange]]


def bundle_dims(manifest: Manifest, *, max_batch: int) -> Dims:
    """For ``plan_profiles``: of a text bundle its padded lengths, of a language model a profile for prompts and one for
    decoding; nothing for others. Raises BundleError for a head that does not say what it must."""
    head = manifest.head or {}
    if manifest.task == "generate":
        return _decoder_dims(head, max_batch=max_batch)
    lengths = head.get("lengths")
    if not isinstance(lengths, list | tuple) or not lengths:
        return {}
    key = next((_key(spec.name, spec.shape) for spec in manifest.inputs if len(spec.shape) == 2), None)
    return {} if key is None else {key: _length_ranges([int(length) for length in lengths])}


def _key(name: str, shape: Sequence[Any]) -> str | None:
    dim = shape[1]
    return None if isinstance(dim, int) else dim or f"{name}[1]"


def _length_ranges(lengths: Sequence[int]) -> list[DimRange]:
    """Neighbouring lengths share a profile, tuned for the longest of them."""
    ordered = sorted(set(lengths))
    count = min(MAX_LENGTH_PROFILES, len(ordered))
    ends = [ordered[(index + 1) * len(ordered) // count - 1] for index in range(count)]
    return [DimRange(min=low + 1, opt=high, max=high) for low, high in zip([0, *ends], ends, strict=False)]


def _decoder_dims(head: Mapping[str, Any], *, max_batch: int) -> Dims:
    try:
        page, context = int(head["page"]), int(head["max_length"])
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"the bundle's head does not say {error}; create the bundle again") from error
    blocks = max(1, -(-context // page))
    pages = blocks * max_batch
    prefill = min(PREFILL_STEP, context)
    steps = [DimRange(min=1, opt=1, max=min(GUESS_STEP, context))]
    if prefill > steps[0].max:
        steps.append(DimRange(min=1, opt=min(USUAL_PREFILL, prefill), max=prefill))
    return {
        "step": steps,
        "picks": [DimRange(min=1, opt=1, max=min(GUESS_STEP, context))],
        "blocks": [DimRange(min=1, opt=max(1, min(blocks, USUAL_CONTEXT // page)), max=blocks)],
        "pages": [DimRange(min=1, opt=pages, max=pages)],
    }
