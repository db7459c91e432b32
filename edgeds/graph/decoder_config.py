"""What kind of decoder a checkpoint holds: sizes, rotary embedding, attention variants, limits of length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.errors import ModelError
from edgeds.files import read_json

ARCHITECTURES = {
    "llama": "Llama, SmolLM2, TinyLlama, DeepSeek-R1-Distill-Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen",
    "qwen3": "Qwen3",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: ``frequencies`` float64 [rotated / 2] in radians per token; cosines and sines are
    multiplied by ``attention_factor`` (1 but for yarn)."""

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and choices of a decoder. ``max_length`` is the least of all documented limits, which ``limits`` lists."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    epsilon: float
    rope: Rope
    max_length: int
    limits: Mapping[str, int]
    sliding_window: int | None
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    eos: tuple[int, ...]
    bos: int | None

    @property
    def group(self) -> int:
        """Query heads per key and value head."""
        return self.heads // self.kv_heads


def read_decoder_config(config: Mapping[str, Any], where: Path) -> DecoderConfig:
    """The decoder that a Hugging Face ``config`` describes; ``where`` is its file, for messages and for
    generation_config.json beside it. Raises ModelError for what is not built here."""
    family = str(config.get("model_type", ""))
    if family not in ARCHITECTURES:
        known = "; ".join(f"{key} ({names})" for key, names in ARCHITECTURES.items())
        raise ModelError(f"{where}: model_type {family or 'missing'!r} is not built here; supported are {known}")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {config['hidden_act']!r} is not supported, only silu")
    hidden, heads = _size(config, where, "hidden_size"), _size(config, where, "num_attention_heads")
    kv_heads = _size(config, where, "num_key_value_heads", default=heads)
    head_dim = _size(config, where, "head_dim", default=hidden // heads)
    if heads % kv_heads or (hidden % heads and not config.get("head_dim")):
        raise ModelError(f"{where}: {heads} heads do not share hidden size {hidden} and {kv_heads} key heads evenly")
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    limits = {"max_position_embeddings": _size(config, where, "max_position_embeddings")}
    window = _window(config, family)
    return DecoderConfig(
        family=family,
        layers=_size(config, where, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=_size(config, where, "intermediate_size"),
        vocab=_size(config, where, "vocab_size"),
        epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, head_dim, where),
        max_length=min(limits.values()),
        limits=limits,
        sliding_window=window,
        qkv_bias=bool(config.get("attention_bias", family == "qwen2")),
        out_bias=bool(config.get("attention_bias", False)) and family == "llama",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
        eos=_end_tokens(config, where),
        bos=config.get("bos_token_id") if isinstance(config.get("bos_token_id"), int) else None,
    )


def rope_frequencies(dim: int, theta: float) -> np.ndarray:
    """theta^(-2i/dim), the plain rotary embedding (Su et al. 2021, arXiv:2104.09864)."""
    return np.asarray(1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim))


def _size(config: Mapping[str, Any], where: Path, key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ModelError(f"{where}: {key} is {value!r}, expected a whole number above 0")
    return value


def _window(config: Mapping[str, Any], family: str) -> int | None:
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", family == "mistral")
    return window if isinstance(window, int) and window > 0 and used else None


def _rope(config: Mapping[str, Any], head_dim: int, where: Path) -> Rope:
    # transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling.
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"{where}: rope_scaling is {scaling!r}, expected an object")
    theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    plain = rope_frequencies(head_dim, theta)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if float(config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor is not supported")
    try:
        if kind == "default":
            return Rope(frequencies=tuple(plain))
        if kind == "linear":
            return Rope(frequencies=tuple(plain / float(scaling["factor"])))
        if kind == "llama3":
            return Rope(frequencies=tuple(_llama3(plain, scaling)))
        if kind == "yarn":
            longest = int(scaling.get("original_max_position_embeddings") or config["max_position_embeddings"])
            return _yarn(plain, scaling, dim=head_dim, theta=theta, longest=longest)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{where}: rope_scaling of type {kind!r} lacks or garbles {error}") from error
    raise ModelError(f"{where}: rope_scaling of type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")


def _llama3(plain: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Long wavelengths are stretched, short ones kept, those between interpolated (Llama 3.1)."""
    factor, longest = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = longest * plain / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - share) * plain / factor + share * plain


def _yarn(plain: np.ndarray, scaling: Mapping[str, Any], *, dim: int, theta: float, longest: int) -> Rope:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolation by parts, and a temperature on the scores."""
    factor = float(scaling["factor"])
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)

    def pair(rotations: float) -> float:
        return dim * math.log(longest / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    given = scaling.get("attention_factor")
    attention = float(given) if given is not None else (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return Rope(frequencies=tuple(plain / factor * ramp + plain * (1 - ramp)), attention_factor=attention)


def _end_tokens(config: Mapping[str, Any], where: Path) -> tuple[int, ...]:
    found = config.get("eos_token_id")
    path = where.parent / "generation_config.json"
    if path.is_file():
        beside = read_json(path)
        found = beside.get("eos_token_id", found) if isinstance(beside, dict) else found
    tokens = found if isinstance(found, list) else [found]
    return tuple(int(token) for token in tokens if isinstance(token, int) and not isinstance(token, bool))
