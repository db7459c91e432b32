"""What kind of encoder a checkpoint holds: sizes from config.json and where each family keeps its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeds.errors import ModelError, SpecError
from edgeds.graph.checkpoint import Checkpoint
from edgeds.graph.sentence_files import POOLINGS, SentenceModules, read_length_limit, read_modules

HEADS = ("embed", "classify", "tag", "answer", "hidden")
_ARCHITECTURES = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForQuestionAnswering": "answer",
    # Encoders without a head, or with one that only training uses.
    "Model": "embed",
    "ForMaskedLM": "embed",
    "ForPreTraining": "embed",
}
_ROBERTA = ("roberta", "xlm-roberta", "camembert")
FAMILIES = ("bert", "distilbert", *_ROBERTA)
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")


@dataclass(frozen=True, kw_only=True)
class EncoderNames:
    """Where the tensors of a family lie. ``{i}`` is the layer's number; each is completed by .weight and .bias."""

    words: str
    positions: str
    types: str | None
    norm: str
    query: str
    key: str
    value: str
    attention_out: str
    attention_norm: str
    up: str
    down: str
    out_norm: str


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes and choices of an encoder. ``position_offset``: rows of the position table before the first token's."""

    family: str
    prefix: str
    names: EncoderNames
    layers: int
    hidden: int
    heads: int
    inner: int
    vocab: int
    max_length: int
    position_rows: int
    position_offset: int
    types: int
    epsilon: float
    activation: str
    head: str
    pooling: str
    normalize: bool
    labels: dict[int, str] = field(default_factory=dict)
    problem_type: str = ""

    @property
    def head_size(self) -> int:
        """Channels per attention head."""
        return self.hidden // self.heads


_BERT = EncoderNames(
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    norm="embeddings.LayerNorm",
    query="encoder.layer.{i}.attention.self.query",
    key="encoder.layer.{i}.attention.self.key",
    value="encoder.layer.{i}.attention.self.value",
    attention_out="encoder.layer.{i}.attention.output.dense",
    attention_norm="encoder.layer.{i}.attention.output.LayerNorm",
    up="encoder.layer.{i}.intermediate.dense",
    down="encoder.layer.{i}.output.dense",
    out_norm="encoder.layer.{i}.output.LayerNorm",
)
_DISTIL = EncoderNames(
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types=None,
    norm="embeddings.LayerNorm",
    query="transformer.layer.{i}.attention.q_lin",
    key="transformer.layer.{i}.attention.k_lin",
    value="transformer.layer.{i}.attention.v_lin",
    attention_out="transformer.layer.{i}.attention.out_lin",
    attention_norm="transformer.layer.{i}.sa_layer_norm",
    up="transformer.layer.{i}.ffn.lin1",
    down="transformer.layer.{i}.ffn.lin2",
    out_norm="transformer.layer.{i}.output_layer_norm",
)


def read_config(
    checkpoint: Checkpoint, *, head: str | None, pooling: str | None, normalize: bool | None
) -> EncoderConfig:
    """The encoder in a checkpoint. Raises ModelError for a family or variant that is not built here, SpecError for
    arguments that do not fit it. What config.json leaves out is what transformers takes for it."""
    values = _Values(checkpoint.config, checkpoint.folder / "config.json")
    family = _check_family(values)
    distil = family == "distilbert"
    names = _DISTIL if distil else _BERT
    hidden = values.size("dim" if distil else "hidden_size", default=768)
    heads = values.size("n_heads" if distil else "num_attention_heads", default=12)
    if hidden % heads:
        raise ModelError(f"{values.where}: hidden size {hidden} is no multiple of {heads} attention heads")
    activation = str(values.get("activation" if distil else "hidden_act", "gelu"))
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"{values.where}: activation {activation!r} is not built here; known: {', '.join(ACTIVATIONS)}"
        )
    layers = values.size("n_layers" if distil else "num_hidden_layers", default=6 if distil else 12)
    prefix = _prefix(checkpoint, family)
    _check_layers(checkpoint, f"{prefix}{names.query}.weight", layers)
    offset = values.size("pad_token_id", default=1, least=0) + 1 if family in _ROBERTA else 0
    rows = values.size("max_position_embeddings", default=512)
    if rows <= offset:
        raise ModelError(f"{values.where}: max_position_embeddings {rows} leaves no position behind padding's {offset}")
    chosen = _choose_head(values, head)
    if pooling is not None:
        _one_of("pooling", pooling, POOLINGS)
    modules = read_modules(checkpoint.folder, pooling=pooling) if chosen == "embed" else SentenceModules()
    limit = read_length_limit(checkpoint.folder) if chosen == "embed" else None
    return EncoderConfig(
        family=family,
        prefix=prefix,
        names=names,
        layers=layers,
        hidden=hidden,
        heads=heads,
        inner=values.size("hidden_dim" if distil else "intermediate_size", default=3072),
        vocab=values.size("vocab_size", default=30522),
        max_length=min(rows - offset, limit or rows),
        position_rows=rows,
        position_offset=offset,
        types=0 if distil else values.size("type_vocab_size", default=2, least=0),
        epsilon=1e-12 if distil else values.number("layer_norm_eps", default=1e-12),
        activation=activation,
        head=chosen,
        pooling=modules.pooling or "mean",
        normalize=modules.normalize if normalize is None else normalize,
        labels=_labels(values) if chosen in ("classify", "tag") else {},
        problem_type=str(values.get("problem_type", "")),
    )


@dataclass(frozen=True)
class _Values:
    """config.json with its place, for messages. A key that is null counts as left out."""

    config: dict[str, Any]
    where: Path

    def get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def size(self, key: str, *, default: int, least: int = 1) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"{self.where}: {key} {str(value)[:40]!r} is not a whole number of {least} or more")
        return value

    def number(self, key: str, *, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise ModelError(f"{self.where}: {key} {str(value)[:40]!r} is not a number from 0 to 1")
        return float(value)


def _check_family(values: _Values) -> str:
    family = str(values.get("model_type", ""))
    if family not in FAMILIES:
        raise ModelError(
            f"{values.where}: model_type {family or 'missing'!r} is not built here; supported are "
            f"{', '.join(FAMILIES)}. Export it to ONNX with its own tools and give that file"
        )
    kind = values.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelError(f"{values.where}: position_embedding_type {kind!r} is not supported")
    if values.get("is_decoder", False):
        raise ModelError(f"{values.where}: is a decoder (is_decoder); only encoders are built here")
    return family


def _check_layers(checkpoint: Checkpoint, query: str, layers: int) -> None:
    """More layers in the file than in config.json: one of the two is of another model."""
    beyond = query.format(i=layers)
    if beyond in checkpoint:
        raise ModelError(
            f"{checkpoint.folder / 'config.json'}: says {layers} layers, but the weights also hold '{beyond}'; "
            "take both files from one model"
        )


def _one_of(label: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise SpecError(f"{label} {value!r}: choose one of {', '.join(known)}")
    return value


def _choose_head(values: _Values, head: str | None) -> str:
    listed = values.get("architectures", [])
    name = str(listed[0]) if isinstance(listed, list) and listed else ""
    own = next((task for suffix, task in _ARCHITECTURES.items() if name.endswith(suffix)), None if name else "embed")
    if head is not None:
        _one_of("head", head, HEADS)
        if head in ("classify", "tag", "answer") and head != own:
            raise SpecError(f"head {head!r}: the checkpoint is a {name or 'bare encoder'} and has no such head")
        return head
    if own is None:
        raise ModelError(
            f"{values.where}: architecture {name!r} has a head that is not built here; choose head 'embed' or 'hidden' "
            "for the encoder without it"
        )
    return own


def _prefix(checkpoint: Checkpoint, family: str) -> str:
    """Models with a head keep the encoder under its family's name, bare ones do not."""
    word = "roberta" if family in _ROBERTA else family
    for prefix in ("", f"{word}."):
        if f"{prefix}embeddings.word_embeddings.weight" in checkpoint:
            return prefix
    raise ModelError(f"{checkpoint.folder}: the weights hold no 'embeddings.word_embeddings.weight'; is it a {family}?")


def _labels(values: _Values) -> dict[int, str]:
    given = values.get("id2label", {})
    if not isinstance(given, dict) or not given:
        return {index: f"LABEL_{index}" for index in range(values.size("num_labels", default=2))}
    try:
        labels = {int(key): str(value) for key, value in given.items()}
    except ValueError as error:
        raise ModelError(f"{values.where}: id2label has a key that is no number: {json.dumps(given)[:80]}") from error
    if sorted(labels) != list(range(len(labels))):
        raise ModelError(f"{values.where}: id2label must number its labels from 0 without a gap")
    return dict(sorted(labels.items()))
