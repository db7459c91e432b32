"""Build the ONNX graph of a BERT-family encoder from config.json and safetensors, without torch and transformers.

The graph keeps to what TensorRT fuses and what INT8 placement knows: one LayerNormalization operator per norm, MatMul
and Add per linear layer, attention as MatMul, Softmax, MatMul with 1/sqrt(head size) folded into the query weights, and
a mask that is a finite number added to the scores (infinities turn into NaN when rounded). Texts are padded at the
right; what padding gives is never read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from onnx import ModelProto

from edgeds.errors import ModelError, SpecError
from edgeds.graph.checkpoint import Checkpoint, open_checkpoint
from edgeds.graph.encoder_config import EncoderConfig, read_config
from edgeds.graph.shapes import infer_shapes
from edgeds.graph.writer import GraphWriter
from edgeds.progress import track

OPSET = 17
OPSETS = (17, 21)
"""First with LayerNormalization, last that the IR version of the file covers."""
MASKED_SCORE = -1e4
"""Added to the scores of padding: exp of it is zero in float32 and float16, and it fits both."""


def build_encoder(
    folder: str | Path,
    *,
    head: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    opset: int = OPSET,
) -> ModelProto:
    """The encoder in ``folder`` as ONNX.

    Inputs, int64 [batch, length], both open: ``input_ids``, ``attention_mask`` (1 text, 0 padding), ``token_type_ids``
    where the model has several types. Outputs, float32, by ``head`` (None: what the checkpoint is made for):

    - embed: ``embedding`` [batch, hidden], pooled over the text (``pooling``: mean, cls, max) and, with ``normalize``,
      of length 1; None for both is what sentence-transformers' files beside the model say.
    - classify: ``logits`` [batch, labels]; tag: ``logits`` [batch, length, labels].
    - answer: ``start_logits`` and ``end_logits`` [batch, length].
    - hidden: ``last_hidden_state`` [batch, length, hidden].

    Raises ModelError for checkpoints that are damaged or of another kind, SpecError for a head they lack and for an
    ``opset`` outside 17 to 21.
    """
    if isinstance(opset, bool) or not isinstance(opset, int) or not OPSETS[0] <= opset <= OPSETS[1]:
        raise SpecError(f"opset {opset!r}: encoders are built for opset {OPSETS[0]} to {OPSETS[1]}")
    with open_checkpoint(folder) as checkpoint:
        config = read_config(checkpoint, head=head, pooling=pooling, normalize=normalize)
        writer = _Encoder(checkpoint, config, opset=opset)
        return infer_shapes(writer.build())


class _Encoder:
    def __init__(self, checkpoint: Checkpoint, config: EncoderConfig, *, opset: int) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._graph = GraphWriter(opset=opset)

    def build(self) -> ModelProto:
        graph, config = self._graph, self._config
        dims = ("batch", "length")
        ids, mask = graph.input("input_ids", dims), graph.input("attention_mask", dims)
        types = graph.input("token_type_ids", dims) if config.types > 1 else None
        hidden = self._embed(ids, types)
        graph.prefix = "mask"
        floats = graph.op("Cast", mask, to=1)
        missing = graph.op("Sub", graph.const(1.0, np.float32), floats)
        bias = graph.op("Mul", missing, graph.const(MASKED_SCORE, np.float32))
        bias = graph.op("Unsqueeze", bias, graph.const([1, 2]))
        for index in track(range(config.layers), what="building the encoder", unit="layer"):
            hidden = self._layer(hidden, bias, index)
        graph.prefix = config.head
        {
            "embed": self._embedding,
            "classify": self._classify,
            "tag": self._tag,
            "answer": self._answer,
            "hidden": self._hidden,
        }[config.head](hidden, floats)
        return graph.model(name=config.family, metadata=_metadata(config))

    def _tensor(self, name: str, shape: tuple[int, ...], *, own: bool = False) -> np.ndarray:
        """Read float weights, under the family's prefix unless they are a head's ``own``; NaN would spread unseen."""
        full = name if own else f"{self._config.prefix}{name}"
        value = self._checkpoint.tensor(full, shape)
        if value.dtype.kind != "f":
            raise ModelError(f"{self._checkpoint.folder}: tensor '{full}' is {value.dtype}, not a float type")
        if not np.isfinite(value).all():
            raise ModelError(f"{self._checkpoint.folder}: tensor '{full}' holds NaN or infinity; download it again")
        return value

    def _embed(self, ids: str, types: str | None) -> str:
        graph, config, names = self._graph, self._config, self._config.names
        graph.prefix = "embeddings"
        words = self._tensor(f"{names.words}.weight", (config.vocab, config.hidden))
        table = self._tensor(f"{names.positions}.weight", (config.position_rows, config.hidden))
        table = table[config.position_offset :]
        if types is None and config.types and names.types is not None:
            # One type only: its row belongs to every token.
            table = table + self._tensor(f"{names.types}.weight", (config.types, config.hidden))[0]
        total = graph.op("Gather", graph.weight(f"{names.words}.weight", words), ids)
        length = graph.op("Slice", graph.op("Shape", ids), graph.const([1]), graph.const([2]))
        positions = graph.weight(f"{names.positions}.weight", table)
        total = graph.op("Add", total, graph.op("Slice", positions, graph.const([0]), length, graph.const([0])))
        if types is not None:
            rows_of = self._tensor(f"{names.types}.weight", (config.types, config.hidden))
            total = graph.op("Add", total, graph.op("Gather", graph.weight(f"{names.types}.weight", rows_of), types))
        return self._norm(total, names.norm)

    def _norm(self, tensor: str, name: str) -> str:
        graph, width = self._graph, (self._config.hidden,)
        # Checkpoints made from TensorFlow's, bert-base-uncased among them, call the two gamma and beta.
        old = f"{self._config.prefix}{name}.gamma" in self._checkpoint
        scale = graph.weight(f"{name}.weight", self._tensor(f"{name}.{'gamma' if old else 'weight'}", width))
        bias = graph.weight(f"{name}.bias", self._tensor(f"{name}.{'beta' if old else 'bias'}", width))
        return graph.op("LayerNormalization", tensor, scale, bias, axis=-1, epsilon=self._config.epsilon)

    def _linear(self, tensor: str, name: str, sizes: tuple[int, int], *, scale: float = 1.0, own: bool = False) -> str:
        """``sizes`` is (inputs, outputs); ``own``: the weights of a head, which have no family prefix."""
        graph = self._graph
        weight = self._tensor(f"{name}.weight", (sizes[1], sizes[0]), own=own)
        bias = self._tensor(f"{name}.bias", (sizes[1],), own=own)
        kernel = graph.weight(f"{name}.weight", weight.T * np.float32(scale))
        product = graph.op("MatMul", tensor, kernel)
        return graph.op("Add", product, graph.weight(f"{name}.bias", bias * np.float32(scale)))

    def _heads(self, tensor: str, order: tuple[int, ...]) -> str:
        graph, config = self._graph, self._config
        split = graph.op("Reshape", tensor, graph.const([0, 0, config.heads, config.head_size]))
        return graph.op("Transpose", split, perm=list(order))

    def _layer(self, hidden: str, bias: str, index: int) -> str:
        graph, config, names = self._graph, self._config, self._config.names
        wide = (config.hidden, config.hidden)
        graph.prefix = f"layer.{index}/attention"
        scale = 1.0 / math.sqrt(config.head_size)
        query = self._heads(self._linear(hidden, names.query.format(i=index), wide, scale=scale), (0, 2, 1, 3))
        key = self._heads(self._linear(hidden, names.key.format(i=index), wide), (0, 2, 3, 1))
        value = self._heads(self._linear(hidden, names.value.format(i=index), wide), (0, 2, 1, 3))
        scores = graph.op("Add", graph.op("MatMul", query, key), bias)
        mixed = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), value)
        joined = graph.op("Transpose", mixed, perm=[0, 2, 1, 3])
        joined = graph.op("Reshape", joined, graph.const([0, 0, config.hidden]))
        attended = self._linear(joined, names.attention_out.format(i=index), wide)
        hidden = self._norm(graph.op("Add", attended, hidden), names.attention_norm.format(i=index))
        graph.prefix = f"layer.{index}/ffn"
        inner = self._linear(hidden, names.up.format(i=index), (config.hidden, config.inner))
        inner = self._activation(inner, config.activation)
        outer = self._linear(inner, names.down.format(i=index), (config.inner, config.hidden))
        return self._norm(graph.op("Add", outer, hidden), names.out_norm.format(i=index))

    def _activation(self, x: str, kind: str) -> str:
        graph = self._graph
        if kind == "relu":
            return graph.op("Relu", x)
        if kind == "silu":
            return graph.op("Mul", x, graph.op("Sigmoid", x))

        def number(value: float) -> str:
            return graph.const(value, np.float32)

        if kind == "gelu":
            inside = graph.op("Erf", graph.op("Div", x, number(math.sqrt(2.0))))
        else:  # the approximation by tanh, Hendrycks and Gimpel 2016, section 2
            cube = graph.op("Mul", graph.op("Mul", x, x), x)
            sum_ = graph.op("Add", x, graph.op("Mul", cube, number(0.044715)))
            inside = graph.op("Tanh", graph.op("Mul", sum_, number(math.sqrt(2.0 / math.pi))))
        return graph.op("Mul", graph.op("Mul", x, graph.op("Add", inside, number(1.0))), number(0.5))

    def _first(self, hidden: str) -> str:
        graph = self._graph
        return graph.op("Gather", hidden, graph.const(0), axis=1)

    def _embedding(self, hidden: str, mask: str) -> None:
        graph, config = self._graph, self._config
        if config.pooling == "cls":
            pooled = self._first(hidden)
        else:
            column = graph.op("Unsqueeze", mask, graph.const([2]))
            if config.pooling == "mean":
                total = graph.op("ReduceSum", graph.op("Mul", hidden, column), graph.const([1]), keepdims=0)
                count = graph.op("ReduceSum", mask, graph.const([1]), keepdims=1)
                pooled = graph.op("Div", total, graph.op("Max", count, graph.const(1.0, np.float32)))
            else:
                absent = graph.op("Sub", graph.const(1.0, np.float32), column)
                moved = graph.op("Mul", absent, graph.const(MASKED_SCORE, np.float32))
                pooled = graph.reduce("ReduceMax", graph.op("Add", hidden, moved), [1], keepdims=0)
        if config.normalize:
            length = graph.reduce("ReduceL2", pooled, [-1], keepdims=1)
            pooled = graph.op("Div", pooled, graph.op("Max", length, graph.const(1e-6, np.float32)))
        graph.rename(pooled, "embedding")
        graph.output("embedding", ("batch", config.hidden))

    def _classify(self, hidden: str, _mask: str) -> None:
        graph, config = self._graph, self._config
        wide, labels = (config.hidden, config.hidden), len(config.labels)
        first = self._first(hidden)
        if config.family == "distilbert":
            first = graph.op("Relu", self._linear(first, "pre_classifier", wide, own=True))
            last = "classifier"
        elif config.family == "bert":
            first = graph.op("Tanh", self._linear(first, "pooler.dense", wide))
            last = "classifier"
        else:
            first = graph.op("Tanh", self._linear(first, "classifier.dense", wide, own=True))
            last = "classifier.out_proj"
        graph.rename(self._linear(first, last, (config.hidden, labels), own=True), "logits")
        graph.output("logits", ("batch", labels))

    def _tag(self, hidden: str, _mask: str) -> None:
        labels = len(self._config.labels)
        logits = self._linear(hidden, "classifier", (self._config.hidden, labels), own=True)
        self._graph.rename(logits, "logits")
        self._graph.output("logits", ("batch", "length", labels))

    def _answer(self, hidden: str, _mask: str) -> None:
        graph = self._graph
        both = self._linear(hidden, "qa_outputs", (self._config.hidden, 2), own=True)
        for index, name in enumerate(("start_logits", "end_logits")):
            graph.rename(graph.op("Gather", both, graph.const(index), axis=2), name)
            graph.output(name, ("batch", "length"))

    def _hidden(self, hidden: str, _mask: str) -> None:
        self._graph.rename(hidden, "last_hidden_state")
        self._graph.output("last_hidden_state", ("batch", "length", self._config.hidden))


def _metadata(config: EncoderConfig) -> dict[str, str]:
    found = {
        "edgeds.task": config.head,
        "edgeds.max_length": str(config.max_length),
        "edgeds.vocab_size": str(config.vocab),
        "edgeds.heads": str(config.heads),
    }
    if config.head == "embed":
        found |= {"edgeds.pooling": config.pooling, "edgeds.normalized": json.dumps(config.normalize)}
    if config.labels:
        found["edgeds.id2label"] = json.dumps({str(key): value for key, value in config.labels.items()})
        found["edgeds.problem_type"] = config.problem_type
    return found
