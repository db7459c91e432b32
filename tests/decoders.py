"""Random decoders as checkpoints, a plain reference of what they compute, and a runner over pages of its own."""

from __future__ import annotations

import json

import numpy as np
from checkpoints import write_safetensors

from edgeds.graph.session import open_session

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
CONFIGS = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "biased": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "mistral": {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "linear": {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {
        **LLAMA,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "yarn": {
        **LLAMA,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
}


def decoder_tensors(config, seed=0):
    rng = np.random.default_rng(seed)
    made = {}

    def add(name, *shape, scale=0.25, around=0.0):
        made[name] = (around + rng.normal(0, scale, shape)).astype(np.float32)

    hidden, inner, kv = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    wide = dim * config["num_attention_heads"]
    qkv_bias = config.get("attention_bias", config["model_type"] == "qwen2")
    add("model.embed_tokens.weight", config["vocab_size"], hidden, scale=1.0)
    for i in range(config["num_hidden_layers"]):
        base = f"model.layers.{i}"
        sizes = {"q_proj": (wide, hidden), "k_proj": (kv * dim, hidden), "v_proj": (kv * dim, hidden)}
        for name, shape in {**sizes, "o_proj": (hidden, wide)}.items():
            add(f"{base}.self_attn.{name}.weight", *shape)
            if qkv_bias and (name != "o_proj" or config.get("attention_bias")):
                add(f"{base}.self_attn.{name}.bias", shape[0])
        if config["model_type"] == "qwen3":
            add(f"{base}.self_attn.q_norm.weight", dim, around=1.0)
            add(f"{base}.self_attn.k_norm.weight", dim, around=1.0)
        for name, shape in {
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }.items():
            add(f"{base}.mlp.{name}.weight", *shape)
            if config.get("mlp_bias"):
                add(f"{base}.mlp.{name}.bias", shape[0])
        add(f"{base}.input_layernorm.weight", hidden, around=1.0)
        add(f"{base}.post_attention_layernorm.weight", hidden, around=1.0)
    add("model.norm.weight", hidden, around=1.0)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", config["vocab_size"], hidden)
    return made


def write_decoder(folder, kind="llama", *, seed=0, **changes):
    """A checkpoint folder; returns (config, tensors)."""
    config = {**CONFIGS[kind], **changes}
    tensors = decoder_tensors(config, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return config, tensors


def reference_logits(config, tensors, tokens, frequencies, *, factor=1.0):
    """Logits [tokens, vocab] of one sequence in float64, one attention matrix per head, nothing cached."""
    get = {name: value.astype(np.float64) for name, value in tensors.items()}
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    window = config.get("sliding_window")

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * get[f"{name}.weight"]

    def linear(x, name):
        return x @ get[f"{name}.weight"].T + get.get(f"{name}.bias", 0.0)

    def rotate(x):  # as complex numbers: another way to write the same turn
        angles = np.arange(len(x))[:, None] * frequencies
        turned = (x[:, : dim // 2] + 1j * x[:, dim // 2 :]) * np.exp(1j * angles) * factor
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = get["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        base = f"model.layers.{i}"
        n = norm(x, f"{base}.input_layernorm")
        q, k, v = (linear(n, f"{base}.self_attn.{name}_proj") for name in "qkv")
        out = np.zeros_like(q)
        for h in range(heads):
            g = h // (heads // kv)
            mine, theirs = q[:, h * dim : (h + 1) * dim], k[:, g * dim : (g + 1) * dim]
            if config["model_type"] == "qwen3":
                mine, theirs = norm(mine, f"{base}.self_attn.q_norm"), norm(theirs, f"{base}.self_attn.k_norm")
            scores = rotate(mine) @ rotate(theirs).T / np.sqrt(dim)
            ahead = np.arange(len(x))[:, None] - np.arange(len(x))[None]
            allowed = (ahead >= 0) & (ahead < window if window else True)
            weights = np.exp(np.where(allowed, scores, -np.inf) - scores.max())
            weights /= weights.sum(-1, keepdims=True)
            out[:, h * dim : (h + 1) * dim] = weights @ v[:, g * dim : (g + 1) * dim]
        x = x + linear(out, f"{base}.self_attn.o_proj")
        n = norm(x, f"{base}.post_attention_layernorm")
        gate = linear(n, f"{base}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(n, f"{base}.mlp.up_proj"), f"{base}.mlp.down_proj")
    x = norm(x, "model.norm")
    return x @ get["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


class PagedRun:
    """Feeds a decoder graph from pages in an order of its own; one row per sequence."""

    def __init__(self, model, *, rows, pages=64, seed=0):
        props = {item.key: item.value for item in model.metadata_props}
        self.page, self.layers = int(props["edgeds.page"]), int(props["edgeds.layers"])
        kv, dim, self.kind = int(props["edgeds.kv_heads"]), int(props["edgeds.head_dim"]), props["edgeds.kv_dtype"]
        self.session = open_session(model, threads=1)
        self.free = list(np.random.default_rng(seed).permutation(pages))
        self.tables, self.lengths = [[] for _ in range(rows)], [0] * rows
        rng = np.random.default_rng(seed + 1)

        def junk(*shape):
            # What lies in unused slots must not matter.
            return (rng.normal(0, 5, shape)).astype(self.kind)

        self.store = {}
        for layer in range(self.layers):
            self.store[f"k_pages.{layer}"] = junk(pages, kv, dim, self.page)
            self.store[f"v_pages.{layer}"] = junk(pages, kv, self.page, dim)
            if self.kind == "int8":
                for name in ("k_scale", "v_scale"):
                    self.store[f"{name}.{layer}"] = np.ones((pages, kv, self.page), np.float16)

    def step(self, chunks, *, picks=None, keep=None):
        """``chunks``: tokens per row (possibly none). Returns the outputs, per row logits of the picks."""
        width = max(1, *(len(chunk) for chunk in chunks))
        rows = len(chunks)
        ids, places = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.int64)
        for row, chunk in enumerate(chunks):
            ids[row, : len(chunk)] = chunk
            places[row] = self.lengths[row] + np.minimum(np.arange(width), max(len(chunk) - 1, 0))
        blocks = max(1, *(len(table) for table in self.tables))
        table = np.zeros((rows, blocks), np.int64)
        for row, pages in enumerate(self.tables):
            table[row, : len(pages)] = pages
        at = np.array(picks if picks is not None else [[max(len(chunk) - 1, 0)] for chunk in chunks], np.int64)
        feeds = {"input_ids": ids, "positions": places, "past_length": np.array(self.lengths, np.int64)}
        feeds |= {"block_table": table, "logits_at": at, **self.store}
        names = [item.name for item in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(None, feeds), strict=True))
        for row, chunk in enumerate(chunks):
            for index in range(len(chunk) if keep is None else keep[row]):
                self._write(row, index, outputs)
        return outputs

    def _write(self, row, index, outputs):
        if self.lengths[row] % self.page == 0:
            self.tables[row].append(self.free.pop())
        page, slot = self.tables[row][-1], self.lengths[row] % self.page
        for layer in range(self.layers):
            for kind in "kv":
                value = outputs[f"{kind}_new.{layer}"][row, :, index]
                if self.kind == "int8":
                    scale = (np.abs(value).max(-1) / 127).astype(np.float16)
                    self.store[f"{kind}_scale.{layer}"][page, :, slot] = scale
                    value = np.rint(value / scale.astype(np.float32)[:, None])
                target = self.store[f"{kind}_pages.{layer}"]
                if kind == "k":
                    target[page, :, :, slot] = value
                else:
                    target[page, :, slot] = value
        self.lengths[row] += 1
