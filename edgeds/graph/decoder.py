"""Build the ONNX graph of a Llama-family decoder with a paged KV cache in plain operators, without torch.

Pages are read where they lie: one batched MatMul of the queries with every page of keys, one softmax over the joined
scores of all pages and the new tokens, one MatMul of each page's weights with its values, and a sum over pages. Only
scores, which are small, change their layout; keys and values never do. The same graph serves prefill in chunks, decode
and the verification of guesses. Inputs and outputs are described in docs/llm-graph.md.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Protocol

import numpy as np
from onnx import ModelProto, TensorProto

from edgeds.errors import SpecError
from edgeds.graph.checkpoint import open_checkpoint
from edgeds.graph.decoder_config import DecoderConfig, read_decoder_config
from edgeds.graph.gguf_file import GgufFile
from edgeds.graph.writer import GraphWriter

OPSET = 17
OPSETS = (17, 21)
KV_DTYPES = {"float32": np.float32, "float16": np.float16, "int8": np.int8}
MASKED_SCORE = -1e4
"""Added to scores that do not count: exp of it is zero, and float16 holds it."""
MAX_PAGE = 1024


class Weights(Protocol):
    """Where tensors come from, by their Hugging Face names: a Checkpoint or a GgufFile."""

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray: ...


def build_decoder(
    source: str | Path, *, page: int = 64, kv: str = "float32", attention_mass: bool = False, opset: int = OPSET
) -> ModelProto:
    """The decoder in ``source`` (a checkpoint folder or a .gguf file) as ONNX with float32 weights.

    ``page`` tokens lie in a page of the KV cache, kept as ``kv`` (float32, float16, or int8 with a scale per token and
    head). ``attention_mass`` adds the output that eviction needs. Raises ModelError for checkpoints that are damaged or
    of another kind, SpecError for arguments out of range.
    """
    if isinstance(page, bool) or not isinstance(page, int) or not 1 <= page <= MAX_PAGE:
        raise SpecError(f"page: expected 1 to {MAX_PAGE} tokens, got {page!r}")
    if kv not in KV_DTYPES:
        raise SpecError(f"kv {kv!r}: choose one of {', '.join(KV_DTYPES)}")
    if isinstance(opset, bool) or not isinstance(opset, int) or not OPSETS[0] <= opset <= OPSETS[1]:
        raise SpecError(f"opset {opset!r}: decoders are built for opset {OPSETS[0]} to {OPSETS[1]}")
    path = Path(source)
    if path.suffix.lower() == ".gguf":
        with GgufFile(path) as file:
            config = read_decoder_config(file.config, path)
            return _Decoder(file, config, page=page, kv=kv, mass=attention_mass, opset=opset).build()
    with open_checkpoint(path) as checkpoint:
        config = read_decoder_config(checkpoint.config, path / "config.json")
        return _Decoder(checkpoint, config, page=page, kv=kv, mass=attention_mass, opset=opset).build()


class _Decoder:
    def __init__(self, weights: Weights, config: DecoderConfig, *, page: int, kv: str, mass: bool, opset: int) -> None:
        self._weights, self._config, self._page, self._kv, self._mass = weights, config, page, kv, mass
        self._graph = GraphWriter(opset=opset)
        self._masses: list[str] = []

    def build(self) -> ModelProto:
        graph, config = self._graph, self._config
        ids = graph.input("input_ids", ("batch", "step"))
        positions = graph.input("positions", ("batch", "step"))
        past = graph.input("past_length", ("batch",))
        self._table = graph.input("block_table", ("batch", "blocks"))
        picks = graph.input("logits_at", ("batch", "picks"))
        graph.prefix = "embed"
        table = self._tensor("model.embed_tokens.weight", (config.vocab, config.hidden))
        embedding = graph.weight("model.embed_tokens.weight", table)
        hidden = graph.op("Gather", embedding, ids)
        self._prepare(positions, past)
        for layer in range(config.layers):
            hidden = self._layer(hidden, layer)
        self._head(hidden, picks, table)
        if self._mass:
            self._write_mass(positions)
        return graph.model(name=config.family, metadata=self._metadata())

    def _number(self, value: float) -> str:
        return self._graph.const(value, np.float32)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self._weights.tensor(name, shape)

    def _prepare(self, positions: str, past: str) -> None:
        """Cosines and sines of the step, and which scores count: [batch, 1, 1, step, cached + step]."""
        graph, config = self._graph, self._config
        graph.prefix = "positions"
        places = graph.op("Unsqueeze", graph.op("Cast", positions, to=TensorProto.FLOAT), graph.const([1, 3]))
        frequencies = np.asarray(config.rope.frequencies, np.float32).reshape(1, 1, 1, -1)
        angles = graph.op("Mul", places, graph.weight("rope.frequencies", frequencies))
        factor = config.rope.attention_factor
        self._cos, self._sin = graph.op("Cos", angles), graph.op("Sin", angles)
        if factor != 1.0:
            self._cos, self._sin = (graph.op("Mul", value, self._number(factor)) for value in (self._cos, self._sin))
        graph.prefix = "mask"
        blocks = graph.op("Gather", graph.op("Shape", self._table), graph.const(1))
        slots = graph.op("Range", graph.const(0), graph.op("Mul", blocks, graph.const(self._page)), graph.const(1))
        slots = graph.op("Unsqueeze", slots, graph.const([0, 1]))  # [1, 1, cached]
        seen = graph.op("Less", slots, graph.op("Unsqueeze", past, graph.const([1, 2])))  # [batch, 1, cached]
        rows = graph.op("Unsqueeze", positions, graph.const([2]))  # [batch, step, 1]
        if config.sliding_window is not None:
            near = graph.op("Less", graph.op("Sub", rows, slots), graph.const(config.sliding_window))
            seen = graph.op("And", seen, near)
        step = graph.op("Gather", graph.op("Shape", positions), graph.const(1))
        order = graph.op("Range", graph.const(0), step, graph.const(1))
        ahead = graph.op(
            "Sub", graph.op("Unsqueeze", order, graph.const([1])), graph.op("Unsqueeze", order, graph.const([0]))
        )
        causal = graph.op("Not", graph.op("Less", ahead, graph.const(0)))  # [step, step]
        if config.sliding_window is not None:
            causal = graph.op("And", causal, graph.op("Less", ahead, graph.const(config.sliding_window)))
        self._past_bias = self._bias(seen, rows)
        self._new_bias = graph.op("Unsqueeze", self._bias(causal, None), graph.const([0, 1, 2]))

    def _bias(self, allowed: str, rows: str | None) -> str:
        """0 where scores count, else ``MASKED_SCORE``; with ``rows`` also [batch, 1, 1, step or 1, cached]."""
        graph = self._graph
        counted = graph.op("Cast", allowed, to=TensorProto.FLOAT)
        bias = graph.op("Mul", graph.op("Sub", self._number(1.0), counted), self._number(MASKED_SCORE))
        return bias if rows is None else graph.op("Unsqueeze", bias, graph.const([1, 2]))

    def _norm(self, tensor: str, name: str, width: int) -> str:
        """x / sqrt(mean(x^2) + epsilon) * weight, in the form ONNX Runtime and TensorRT recognise."""
        graph = self._graph
        square = graph.op("Pow", tensor, self._number(2.0))
        mean = graph.reduce("ReduceMean", square, [-1], keepdims=1)
        root = graph.op("Sqrt", graph.op("Add", mean, self._number(self._config.epsilon)))
        return graph.op("Mul", graph.op("Div", tensor, root), graph.weight(name, self._tensor(name, (width,))))

    def _linear(self, tensor: str, name: str, sizes: tuple[int, int], *, bias: bool = False, scale: float = 1.0) -> str:
        graph = self._graph
        weight = self._tensor(f"{name}.weight", (sizes[1], sizes[0])).T * np.float32(scale)
        result = graph.ops("MatMul", tensor, graph.weight(f"{name}.weight", weight), outputs=1, name=name)[0]
        if bias:
            shift = self._tensor(f"{name}.bias", (sizes[1],)) * np.float32(scale)
            result = graph.op("Add", result, graph.weight(f"{name}.bias", shift))
        return result

    def _split(self, tensor: str, heads: int) -> str:
        graph = self._graph
        shaped = graph.op("Reshape", tensor, graph.const([0, 0, heads, self._config.head_dim]))
        return graph.op("Transpose", shaped, perm=[0, 2, 1, 3])

    def _rotate(self, tensor: str) -> str:
        graph = self._graph
        first, second = graph.ops("Split", tensor, graph.const([self._config.head_dim // 2] * 2), outputs=2, axis=-1)
        left = graph.op("Sub", graph.op("Mul", first, self._cos), graph.op("Mul", second, self._sin))
        right = graph.op("Add", graph.op("Mul", second, self._cos), graph.op("Mul", first, self._sin))
        return graph.op("Concat", left, right, axis=-1)

    def _layer(self, hidden: str, layer: int) -> str:
        graph, config = self._graph, self._config
        base = f"model.layers.{layer}"
        graph.prefix = f"layer.{layer}/attention"
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        normed = self._norm(hidden, f"{base}.input_layernorm.weight", config.hidden)
        # The scale of the scores goes into the query, unless a norm behind the projection would undo it.
        scale = 1.0 / math.sqrt(config.head_dim)
        folded = 1.0 if config.qk_norm else scale
        bias = config.qkv_bias
        query = self._linear(normed, f"{base}.self_attn.q_proj", (config.hidden, wide), bias=bias, scale=folded)
        key = self._linear(normed, f"{base}.self_attn.k_proj", (config.hidden, narrow), bias=bias)
        value = self._linear(normed, f"{base}.self_attn.v_proj", (config.hidden, narrow), bias=bias)
        query, key, value = (
            self._split(tensor, heads)
            for tensor, heads in ((query, config.heads), (key, config.kv_heads), (value, config.kv_heads))
        )
        if config.qk_norm:
            query = self._norm(query, f"{base}.self_attn.q_norm.weight", config.head_dim)
            query = graph.op("Mul", query, self._number(scale))
            key = self._norm(key, f"{base}.self_attn.k_norm.weight", config.head_dim)
        query, key = self._rotate(query), self._rotate(key)
        for name, tensor in ((f"k_new.{layer}", key), (f"v_new.{layer}", value)):
            graph.rename(tensor, name)
            graph.output(name, ("batch", config.kv_heads, "step", config.head_dim))
        mixed = self._attend(query, f"k_new.{layer}", f"v_new.{layer}", layer)
        attended = self._linear(mixed, f"{base}.self_attn.o_proj", (wide, config.hidden), bias=config.out_bias)
        hidden = graph.op("Add", hidden, attended)
        graph.prefix = f"layer.{layer}/mlp"
        normed = self._norm(hidden, f"{base}.post_attention_layernorm.weight", config.hidden)
        sizes, bias = (config.hidden, config.inner), config.mlp_bias
        gate = self._linear(normed, f"{base}.mlp.gate_proj", sizes, bias=bias)
        gate = graph.op("Mul", gate, graph.op("Sigmoid", gate))
        inner = graph.op("Mul", gate, self._linear(normed, f"{base}.mlp.up_proj", sizes, bias=bias))
        return graph.op("Add", hidden, self._linear(inner, f"{base}.mlp.down_proj", sizes[::-1], bias=bias))

    def _pages(self, kind: str, layer: int) -> tuple[str, str | None]:
        """The sequence's pages [batch, blocks, kv_heads, ...] as floats, and their scales where they are int8."""
        graph, config, page = self._graph, self._config, self._page
        inner = (config.head_dim, page) if kind == "k" else (page, config.head_dim)
        name = graph.input(f"{kind}_pages.{layer}", ("pages", config.kv_heads, *inner), KV_DTYPES[self._kv])
        pages = graph.op("Gather", name, self._table, axis=0)
        if self._kv == "float32":
            return pages, None
        pages = graph.op("Cast", pages, to=TensorProto.FLOAT)
        if self._kv == "float16":
            return pages, None
        scale = graph.input(f"{kind}_scale.{layer}", ("pages", config.kv_heads, page), np.float16)
        scale = graph.op("Cast", graph.op("Gather", scale, self._table, axis=0), to=TensorProto.FLOAT)
        return pages, graph.op("Unsqueeze", scale, graph.const([3]))  # [batch, blocks, kv_heads, 1, page]

    def _attend(self, query: str, key: str, value: str, layer: int) -> str:
        """Attention of [batch, heads, step, dim] over pages and new tokens; [batch, step, heads * dim]."""
        graph, config, page = self._graph, self._config, self._page
        kv, group, dim = config.kv_heads, config.group, config.head_dim
        rows = graph.op("Reshape", query, graph.const([0, kv, -1, dim]))  # group and step side by side
        keys, key_scale = self._pages("k", layer)
        scores = graph.op("MatMul", graph.op("Unsqueeze", rows, graph.const([1])), keys)
        if key_scale is not None:
            scores = graph.op("Mul", scores, key_scale)
        scores = graph.op("Transpose", scores, perm=[0, 2, 3, 1, 4])  # [batch, kv, rows, blocks, page]
        step = graph.op("Slice", graph.op("Shape", query), graph.const([2]), graph.const([3]))
        shape = graph.op("Concat", graph.const([0, kv, group]), step, graph.const([-1]), axis=0)
        cached = graph.op("Add", graph.op("Reshape", scores, shape), self._past_bias)
        own = graph.op("MatMul", rows, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
        shape = graph.op("Concat", graph.const([0, kv, group, -1]), step, axis=0)
        own = graph.op("Add", graph.op("Reshape", own, shape), self._new_bias)
        weights = graph.op("Softmax", graph.op("Concat", cached, own, axis=4), axis=-1)
        split = graph.op(
            "Concat", graph.op("Slice", graph.op("Shape", cached), graph.const([4]), graph.const([5])), step, axis=0
        )
        past_weights, new_weights = graph.ops("Split", weights, split, outputs=2, axis=4)
        if self._mass:
            self._masses.append(graph.reduce("ReduceMean", past_weights, [1, 2], keepdims=0))  # [batch, step, cached]
        flat = graph.op("Reshape", new_weights, graph.op("Concat", graph.const([0, kv, -1]), step, axis=0))
        blocks = graph.op("Slice", graph.op("Shape", self._table), graph.const([1]), graph.const([2]))
        shape = graph.op("Concat", graph.const([0, kv, -1]), blocks, graph.const([page]), axis=0)
        past_weights = graph.op("Transpose", graph.op("Reshape", past_weights, shape), perm=[0, 3, 1, 2, 4])
        values, value_scale = self._pages("v", layer)
        if value_scale is not None:
            past_weights = graph.op("Mul", past_weights, value_scale)
        mixed = graph.op("ReduceSum", graph.op("MatMul", past_weights, values), graph.const([1]), keepdims=0)
        mixed = graph.op("Add", mixed, graph.op("MatMul", flat, value))  # [batch, kv, rows, dim]
        shape = graph.op("Concat", graph.const([0, config.heads]), step, graph.const([dim]), axis=0)
        mixed = graph.op("Transpose", graph.op("Reshape", mixed, shape), perm=[0, 2, 1, 3])
        return graph.op("Reshape", mixed, graph.const([0, 0, config.heads * dim]))

    def _head(self, hidden: str, picks: str, table: np.ndarray) -> None:
        graph, config = self._graph, self._config
        graph.prefix = "head"
        chosen = graph.op("GatherND", hidden, graph.op("Unsqueeze", picks, graph.const([2])), batch_dims=1)
        normed = self._norm(chosen, "model.norm.weight", config.hidden)
        weight = table if config.tied else self._tensor("lm_head.weight", (config.vocab, config.hidden))
        kernel = graph.weight("lm_head.weight", weight.T)
        graph.rename(graph.ops("MatMul", normed, kernel, outputs=1, name="lm_head")[0], "logits")
        graph.output("logits", ("batch", "picks", config.vocab))

    def _write_mass(self, positions: str) -> None:
        """Attention every cached token got, summed over the step's real queries, as a mean over layers and heads."""
        graph, page = self._graph, self._page
        graph.prefix = "mass"
        total = graph.op("Div", graph.op("Sum", *self._masses), self._number(float(len(self._masses))))
        # Padding repeats the last position, so a query is real where the position went up.
        step = graph.op("Slice", graph.op("Shape", positions), graph.const([1]), graph.const([2]))
        first = graph.op("Slice", positions, graph.const([0]), graph.const([1]), graph.const([1]))
        before = graph.op(
            "Slice", positions, graph.const([0]), graph.op("Sub", step, graph.const([1])), graph.const([1])
        )
        shifted = graph.op("Concat", graph.op("Sub", first, graph.const(1)), before, axis=1)
        real = graph.op("Cast", graph.op("Greater", positions, shifted), to=TensorProto.FLOAT)
        summed = graph.op(
            "ReduceSum",
            graph.op("Mul", total, graph.op("Unsqueeze", real, graph.const([2]))),
            graph.const([1]),
            keepdims=0,
        )
        blocks = graph.op("Slice", graph.op("Shape", self._table), graph.const([1]), graph.const([2]))
        shape = graph.op("Concat", graph.const([0]), blocks, graph.const([page]), axis=0)
        graph.rename(graph.op("Reshape", summed, shape), "attention_mass")
        graph.output("attention_mass", ("batch", "blocks", page))

    def _metadata(self) -> dict[str, str]:
        config = self._config
        return {
            "edgeds.task": "generate",
            "edgeds.page": str(self._page),
            "edgeds.layers": str(config.layers),
            "edgeds.num_heads": str(config.heads),
            "edgeds.kv_heads": str(config.kv_heads),
            "edgeds.head_dim": str(config.head_dim),
            "edgeds.kv_dtype": self._kv,
            "edgeds.vocab_size": str(config.vocab),
            "edgeds.max_length": str(config.max_length),
            "edgeds.limits": json.dumps(dict(config.limits)),
            "edgeds.sliding_window": str(config.sliding_window or ""),
            "edgeds.eos": json.dumps(list(config.eos)),
            "edgeds.bos": "" if config.bos is None else str(config.bos),
        }
