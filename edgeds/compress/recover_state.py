"""Checkpoints of a recovery: weights, their running mean and the optimizer's moments in one safetensors file.

One file, written under a temporary name and renamed, so that a kill at any moment leaves the last whole one. No pickle:
a checkpoint is safe to open.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.compress.torch_lib import import_torch
from edgeds.errors import MissingDependency, ModelError
from edgeds.files import atomic_path
from edgeds.specs import from_json, to_json

SCHEMA = 1
_GROUPS = ("weights", "mean", "first", "second")


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """Where training stands. ``digest`` says which models, samples and options it belongs to."""

    schema: int = SCHEMA
    digest: str
    step: int
    elapsed_s: float
    loss_before: float
    losses: tuple[float, ...] = ()
    """Mean loss of every finished tenth of the steps seen so far; for the report."""


@dataclass(kw_only=True)
class TrainingState:
    """The tensors of a checkpoint by group, each a dict of parameter name -> tensor."""

    facts: TrainingFacts
    weights: dict[str, Any]
    mean: dict[str, Any]
    first: dict[str, Any]
    second: dict[str, Any]


def save_state(state: TrainingState, path: Path) -> None:
    """Write a checkpoint in place of the one before."""
    library = _safetensors()
    tensors = {
        f"{group}/{name}": tensor.detach().cpu().contiguous()
        for group in _GROUPS
        for name, tensor in getattr(state, group).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part:
        library.save_file(tensors, part, metadata={"facts": json.dumps(to_json(state.facts))})


def load_state(path: Path) -> TrainingState:
    """Read a checkpoint. Raises ModelError when it is damaged or of another version."""
    library = _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = from_json(TrainingFacts, json.loads((file.metadata() or {})["facts"]), where=str(path))
        tensors = library.load_file(path)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ModelError(f"{path}: not a checkpoint of edgeds recover ({error}); delete it to start again") from error
    if facts.schema != SCHEMA:
        raise ModelError(f"{path}: checkpoint of version {facts.schema}, this edgeds reads {SCHEMA}; delete it")
    groups: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    return TrainingState(facts=facts, **{group: groups[group] for group in _GROUPS})


def _safetensors() -> Any:
    import_torch()
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingDependency("safetensors", extra="train", purpose="checkpoints of training", cause=error) from error
    return safetensors.torch
