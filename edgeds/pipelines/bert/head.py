"""What a text model computes and from which outputs: stated by a bundle, its own metadata, or the output names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edgeds.errors import SpecError
from edgeds.specs import TensorSpec

TEXT_TASKS = ("embed", "classify", "tag", "answer")
POOLINGS = ("mean", "cls", "max")
MAX_LENGTH = 512
"""For models that state no limit: the position table of nearly every BERT."""

_EMBEDDINGS = ("embedding", "sentence_embedding", "embeddings", "text_embeds", "pooler_output")
_HIDDEN = ("last_hidden_state", "token_embeddings", "hidden_states")


@dataclass(frozen=True, kw_only=True)
class TextHead:
    """The manifest's ``head`` of a text bundle.

    ``outputs``: the model's outputs in use (``answer``: start, then end). ``pooling`` and ``normalize`` are what is
    left to do after the graph (None and False when it does both). ``multi_label``: labels are independent (sigmoid);
    ``regression``: logits are the values. ``max_length`` in tokens, special ones included. ``vocab_size``: rows of the
    embedding table. ``lengths``: the padded lengths to serve, ascending (empty: chosen from ``max_length``).
    """

    task: str
    outputs: tuple[str, ...]
    pooling: str | None = None
    normalize: bool = False
    id2label: dict[int, str] = field(default_factory=dict)
    multi_label: bool = False
    regression: bool = False
    max_length: int = MAX_LENGTH
    vocab_size: int | None = None
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.task not in TEXT_TASKS:
            raise SpecError(f"task {self.task!r}: the text tasks are {', '.join(TEXT_TASKS)}")
        if len(self.outputs) != (2 if self.task == "answer" else 1):
            raise SpecError(f"outputs {self.outputs}: {self.task} uses {'two' if self.task == 'answer' else 'one'}")
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise SpecError(f"pooling {self.pooling!r}: expected one of {', '.join(POOLINGS)}")
        if self.max_length < 3:
            raise SpecError(f"max_length {self.max_length}: a text needs room for at least 3 tokens")
        if any(length < 1 for length in self.lengths) or list(self.lengths) != sorted(set(self.lengths)):
            raise SpecError(f"lengths {self.lengths}: expected different lengths in ascending order")

    @property
    def is_per_token(self) -> bool:
        """Whether the outputs in use have one row per token."""
        return self.task in ("tag", "answer") or self.pooling is not None

    def label(self, index: int) -> str:
        return self.id2label.get(index, f"LABEL_{index}")


def choose_head(
    outputs: Sequence[TensorSpec],
    *,
    metadata: Mapping[str, str] | None = None,
    task: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    id2label: Mapping[int, str] | None = None,
    max_length: int | None = None,
) -> TextHead:
    """The head of a model by its outputs; what is given here wins over the model's metadata.

    A model that gives token states only (``last_hidden_state``) embeds with ``pooling`` (default mean) and, unless
    ``normalize`` is False, unit length. Raises SpecError when the outputs do not fit the task, naming them.
    """
    known = metadata or {}
    chosen = task or known.get("edgeds.task") or _guess_task(outputs)
    if chosen not in TEXT_TASKS:
        raise SpecError(f"task {chosen!r}: the text tasks are {', '.join(TEXT_TASKS)}")
    head = TextHead(
        task=chosen,
        outputs=("",) * (2 if chosen == "answer" else 1),
        id2label=dict(id2label) if id2label is not None else _labels(known.get("edgeds.id2label")),
        multi_label=known.get("edgeds.problem_type") == "multi_label_classification",
        regression=known.get("edgeds.problem_type") == "regression",
        max_length=max_length or _number(known, "edgeds.max_length") or MAX_LENGTH,
        vocab_size=_number(known, "edgeds.vocab_size"),
    )
    if chosen == "embed":
        return _embed_head(head, outputs, pooling=pooling, normalize=normalize)
    if chosen == "answer":
        pair = tuple(_find(outputs, (f"{side}_logits",), rank=2, task="answer").name for side in ("start", "end"))
        return replace(head, outputs=pair)
    spec = _find(outputs, ("logits",), rank=2 if chosen == "classify" else 3, task=chosen)
    labels = spec.shape[-1]
    if head.id2label and isinstance(labels, int) and set(head.id2label) != set(range(labels)):
        raise SpecError(f"output {spec} has {labels} labels, but {len(head.id2label)} names are given for them")
    return replace(head, outputs=(spec.name,))


def _embed_head(
    head: TextHead, outputs: Sequence[TensorSpec], *, pooling: str | None, normalize: bool | None
) -> TextHead:
    pooled = [spec for spec in outputs if len(spec.shape) == 2 and (spec.name in _EMBEDDINGS or len(outputs) == 1)]
    if pooled and pooling is None:
        return replace(head, outputs=(pooled[0].name,), normalize=bool(normalize))
    hidden = _find(outputs, _HIDDEN, rank=3, task="embed")
    return replace(head, outputs=(hidden.name,), pooling=pooling or "mean", normalize=normalize is not False)


def _guess_task(outputs: Sequence[TensorSpec]) -> str:
    names = {spec.name for spec in outputs}
    if {"start_logits", "end_logits"} <= names:
        return "answer"
    for spec in outputs:
        if spec.name == "logits":
            return "classify" if len(spec.shape) == 2 else "tag"
    return "embed"


def _find(outputs: Sequence[TensorSpec], names: Sequence[str], *, rank: int, task: str) -> TensorSpec:
    """The output with one of ``names``, else the only one of that rank."""
    for name in names:
        for spec in outputs:
            if spec.name == name and len(spec.shape) == rank:
                return spec
    fitting = [spec for spec in outputs if len(spec.shape) == rank and spec.dtype.startswith("float")]
    if task != "answer" and len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(map(str, outputs)) or "none"
    raise SpecError(f"task {task!r} needs an output {names[0]!r} with {rank} dimensions; the model gives {shown}")


def _labels(text: str | None) -> dict[int, str]:
    if not text:
        return {}
    try:
        data: Any = json.loads(text)
        return {int(key): str(value) for key, value in data.items()}
    except (ValueError, AttributeError) as error:
        raise SpecError(f"the model's edgeds.id2label is no JSON object of numbers to names: {error}") from error


def _number(metadata: Mapping[str, str], key: str) -> int | None:
    text = metadata.get(key)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise SpecError(f"the model's {key} is {text!r}; expected a whole number above 0")
    return int(text)
