"""Pooling, normalisation and length limit as sentence-transformers writes them beside a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.errors import ModelError
from edgeds.files import read_json

POOLINGS = ("mean", "cls", "max")
_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, kw_only=True)
class SentenceModules:
    """What follows the encoder. ``pooling`` is None when nothing beside the model says so; then so is ``normalize``."""

    pooling: str | None = None
    normalize: bool = False


def read_modules(folder: Path, *, pooling: str | None = None) -> SentenceModules:
    """Read ``modules.json`` and the pooling's ``config.json``; ``pooling`` is used in place of what that file says.

    Raises ModelError for a module (Dense, ...) or a pooling that the graph would lack: leaving it out would give other
    embeddings than the model was trained for.
    """
    listed = _read(folder / "modules.json")
    if listed is not None and not isinstance(listed, list):
        raise ModelError(f"{folder / 'modules.json'}: expected a list of modules, got {type(listed).__name__}")
    place, normalize = "1_Pooling", False
    for item in listed or []:
        kind = str(item.get("type", "")).rsplit(".", 1)[-1] if isinstance(item, dict) else str(item)
        if kind not in _MODULES:
            raise ModelError(
                f"{folder / 'modules.json'}: module {kind!r} is not built here, only {', '.join(_MODULES)}; "
                "with head 'hidden' the encoder alone is"
            )
        normalize = normalize or kind == "Normalize"
        if kind == "Pooling" and isinstance(item.get("path"), str) and item["path"]:
            place = item["path"]
    if Path(place).is_absolute() or ".." in Path(place).parts:
        raise ModelError(f"{folder / 'modules.json'}: {place!r} is not a path inside the model's folder")
    chosen = pooling or _read_pooling(folder / place / "config.json")
    return SentenceModules(pooling=chosen, normalize=normalize)


def read_length_limit(folder: Path) -> int | None:
    """``max_seq_length`` of ``sentence_bert_config.json`` in tokens; None where nothing says so."""
    path = folder / "sentence_bert_config.json"
    found = _read(path)
    value = found.get("max_seq_length") if isinstance(found, dict) else None
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{path}: max_seq_length {value!r} is not a whole number above 0")
    return value


def _read(path: Path) -> Any:
    return read_json(path) if path.is_file() else None


def _read_pooling(path: Path) -> str | None:
    found = _read(path)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected an object, got {type(found).__name__}")
    chosen = [key for key, value in found.items() if key.startswith("pooling_mode_") and value is True]
    chosen = [_FLAGS.get(key, key) for key in chosen]
    if not chosen and isinstance(found.get("pooling_mode"), str):
        chosen = [str(found["pooling_mode"])]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise ModelError(
            f"{path}: pooling {' and '.join(chosen) or 'none'}; built here is one of {', '.join(POOLINGS)}, "
            "choose one with pooling="
        )
    return chosen[0]
