"""What kind of encoder a checkpoint holds: sizes from config.json and where each family keeps its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeds.errors import ModelError, SpecError
from edgeds.files import read_json
from edgeds.graph.checkpoint import Checkpoint

HEADS = ("embed", "classify", "tag", "answer", "hidden")
POOLINGS = ("mean", "cls", "max")
_ARCHITECTURES = {
    "SequenceClassification": "classify",
    "TokenClassification": "tag",
    "QuestionAnswering": "answer",
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
    arguments that do not fit it."""
    config, where = checkpoint.config, checkpoint.folder / "config.json"
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise ModelError(
            f"{where}: model_type {family or 'missing'!r} is not built here; supported are {', '.join(FAMILIES)}. "
            "Export it to ONNX with its own tools and give that file"
        )
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(f"{where}: position_embedding_type {config['position_embedding_type']!r} is not supported")
    if config.get("is_decoder"):
        raise ModelError(f"{where}: is a decoder (is_decoder); only encoders are built here")
    distil = family == "distilbert"

    def size(*keys: str) -> int:
        for key in keys:
            value = config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        raise ModelError(f"{where}: {keys[0]} is missing or not a whole number above 0")

    hidden, heads = size("dim" if distil else "hidden_size"), size("n_heads" if distil else "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"{where}: hidden size {hidden} is no multiple of {heads} attention heads")
    activation = str(config.get("activation" if distil else "hidden_act", "gelu"))
    if activation not in ACTIVATIONS:
        raise ModelError(f"{where}: activation {activation!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    rows = size("max_position_embeddings")
    offset = int(config.get("pad_token_id") or 0) + 1 if family in _ROBERTA else 0
    chosen = _choose_head(config, head)
    pool, norm = _read_pooling(checkpoint.folder)
    return EncoderConfig(
        family=family,
        prefix=_prefix(checkpoint, family),
        names=_DISTIL if distil else _BERT,
        layers=size("n_layers" if distil else "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        inner=size("hidden_dim" if distil else "intermediate_size"),
        vocab=size("vocab_size"),
        max_length=min(rows - offset, _sentence_length(checkpoint.folder) or rows),
        position_offset=offset,
        types=0 if distil else int(config.get("type_vocab_size") or 0),
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
        activation=activation,
        head=chosen,
        pooling=_one_of("pooling", pooling or pool or "mean", POOLINGS),
        normalize=norm if normalize is None else normalize,
        labels=_labels(config, where) if chosen in ("classify", "tag") else {},
        problem_type=str(config.get("problem_type") or ""),
    )


def _one_of(label: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise SpecError(f"{label} {value!r}: choose one of {', '.join(known)}")
    return value


def _choose_head(config: dict[str, Any], head: str | None) -> str:
    names = config.get("architectures") or [""]
    own = next((task for suffix, task in _ARCHITECTURES.items() if str(names[0]).endswith(suffix)), "embed")
    if head is None:
        return own
    _one_of("head", head, HEADS)
    if head in ("classify", "tag", "answer") and head != own:
        raise SpecError(f"head {head!r}: the checkpoint is a {names[0] or 'bare encoder'} and has no such head")
    return head


def _prefix(checkpoint: Checkpoint, family: str) -> str:
    """Models with a head keep the encoder under its family's name, bare ones do not."""
    word = "roberta" if family in _ROBERTA else family
    for prefix in ("", f"{word}.", "bert."):
        if f"{prefix}embeddings.word_embeddings.weight" in checkpoint:
            return prefix
    raise ModelError(f"{checkpoint.folder}: the weights hold no embeddings.word_embeddings; are they of this model?")


def _read_pooling(folder: Path) -> tuple[str | None, bool]:
    """Pooling and normalisation as sentence-transformers writes them."""
    modules = folder / "modules.json"
    listed = read_json(modules) if modules.is_file() else []
    kinds = [str(item.get("type", "")) for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    normalize = any(kind.endswith("Normalize") for kind in kinds)
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return None, normalize
    found = read_json(path)
    flags = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
    chosen = [name for flag, name in flags.items() if isinstance(found, dict) and found.get(flag)]
    others = [key for key, value in found.items() if key.startswith("pooling_mode_") and value and key not in flags]
    if len(chosen) != 1 or others:
        raise ModelError(
            f"{path}: pooling {', '.join([*chosen, *others]) or 'none'}; supported is one of mean, cls, max"
        )
    return chosen[0], normalize


def _sentence_length(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    found = read_json(path) if path.is_file() else {}
    value = found.get("max_seq_length") if isinstance(found, dict) else None
    return value if isinstance(value, int) and value > 0 else None


def _labels(config: dict[str, Any], where: Path) -> dict[int, str]:
    given = config.get("id2label")
    if not isinstance(given, dict) or not given:
        count = config.get("num_labels") or 2
        return {index: f"LABEL_{index}" for index in range(int(count))}
    try:
        labels = {int(key): str(value) for key, value in given.items()}
    except ValueError as error:
        raise ModelError(f"{where}: id2label has a key that is no number: {json.dumps(given)[:80]}") from error
    if sorted(labels) != list(range(len(labels))):
        raise ModelError(f"{where}: id2label must number its labels from 0")
    return labels
