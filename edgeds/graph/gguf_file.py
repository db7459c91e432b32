"""Read llama.cpp's GGUF files as if they were Hugging Face checkpoints: config, tensor names, order of rows.

Quantized tensors are dequantized by the ``gguf`` package. llama.cpp stores the query and key rows of llama models in
the order of its own rotary embedding (pairs side by side); they are put back to halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.errors import MissingDependency, ModelError

_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


class GgufFile:
    """``config`` in Hugging Face's words; ``metadata`` is the file's own, with the tokenizer. Like a Checkpoint."""

    def __init__(self, path: str | Path) -> None:
        gguf = _import_gguf()
        self.folder = Path(path)
        if not self.folder.is_file():
            raise ModelError(f"{path}: no such file")
        try:
            self._reader = gguf.GGUFReader(str(path))
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in self._reader.fields.items()}
        except (ValueError, KeyError, IndexError, OSError, OverflowError, TypeError, MemoryError) as error:
            raise ModelError(f"{path}: not a GGUF file, or cut off ({_short(error)}); download it again") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.config = self._config()

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names as the file has them."""
        return tuple(self._tensors)

    def __contains__(self, name: str) -> bool:
        return _gguf_name(name) in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape by the Hugging Face name."""
        return tuple(int(size) for size in reversed(self._found(name).shape))

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Float32 values by the Hugging Face name. Raises ModelError when missing, damaged or of another shape."""
        gguf = _import_gguf()
        found = self._found(name)
        try:
            array = np.asarray(gguf.quants.dequantize(found.data, found.tensor_type), np.float32)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise ModelError(
                f"{self.folder}: tensor '{found.name}' of type {found.tensor_type.name} cannot be read "
                f"({_short(error)})"
            ) from error
        array = array.reshape(self.shape(name))
        if shape is not None and array.shape != shape:
            raise ModelError(
                f"{self.folder}: tensor '{found.name}' is {list(array.shape)}, expected {list(shape)} by the metadata"
            )
        if (
            self.config["model_type"] == "llama"
            and ".self_attn." in name
            and name.split(".")[-2] in ("q_proj", "k_proj")
        ):
            heads = self.config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            return _unpermuted(array, heads)
        return np.array(array)

    def close(self) -> None:
        """Let go of the mapped file."""
        self._tensors = {}

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _found(self, name: str) -> Any:
        key = _gguf_name(name)
        if key not in self._tensors:
            raise ModelError(f"{self.folder}: the file has no tensor '{key}'")
        return self._tensors[key]

    def _config(self) -> dict[str, Any]:
        meta = self.metadata
        family = str(meta.get("general.architecture", ""))
        if family not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise ModelError(
                f"{self.folder}: architecture {family or 'missing'!r} is not built here; supported: {known}"
            )

        def get(key: str, default: Any = None) -> Any:
            return meta.get(f"{family}.{key}", default)

        heads = get("attention.head_count")
        tokens = meta.get("tokenizer.ggml.tokens")
        config = {
            "model_type": _FAMILIES[family],
            "num_hidden_layers": get("block_count"),
            "hidden_size": get("embedding_length"),
            "intermediate_size": get("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": get("attention.key_length", get("rope.dimension_count")),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-6),
            "rope_theta": get("rope.freq_base", 10000.0),
            "max_position_embeddings": get("context_length"),
            "vocab_size": get("vocab_size", len(tokens) if tokens is not None else None),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "eos_token_id": _ends(meta),
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        }
        return {key: _plain(value) for key, value in config.items()} | _rope_scaling(get, self._tensors, self.folder)


def _ends(meta: Mapping[str, Any]) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return sorted({int(meta[key]) for key in keys if meta.get(key) is not None})


def _rope_scaling(get: Any, tensors: Mapping[str, Any], where: Path) -> dict[str, Any]:
    if "rope_freqs.weight" in tensors:
        raise ModelError(
            f"{where}: has its own rotary frequencies (rope_freqs.weight); use the safetensors checkpoint instead"
        )
    kind = get("rope.scaling.type", "none")
    if kind in ("none", ""):
        return {}
    scaling = {"rope_type": kind, "factor": get("rope.scaling.factor")}
    original = get("rope.scaling.original_context_length")
    return {"rope_scaling": scaling | ({"original_max_position_embeddings": original} if original else {})}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{_LAYER.get(rest, rest)}.{kind}"
    return f"{_TOP.get(stem, stem)}.{kind}"


def _unpermuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs (0, h, 1, h+1, ...) back to two halves."""
    rows = array.shape[0] // heads
    split = array.reshape(heads, rows // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(np.swapaxes(split, 1, 2).reshape(array.shape))


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingDependency("gguf", extra="gguf", purpose="reading GGUF files", cause=error) from error
    return gguf
