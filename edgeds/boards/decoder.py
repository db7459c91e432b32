"""Language models: from the costs of one decode step to decoding at any context, to prefill, and the cache.

The attention products of the step (two matrix products without weights per layer: queries x keys, scores x values) are
rewritten for the number of tokens and the context; all other layers act on each token alone. Prefill counts attention
as one fused causal kernel per layer that never stores the scores, and projects onto the vocabulary once per sequence,
as TensorRT-LLM does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgeds.boards.assumptions import assumed, explain
from edgeds.boards.coefficients import Table
from edgeds.boards.cost_file import DecoderFacts, LayerCost, ModelWork
from edgeds.boards.fusion import VOCABULARY
from edgeds.boards.predictor import Prediction, predict
from edgeds.boards.resize import element_bytes, scale_layer
from edgeds.boards.spec import BoardSpec, PowerMode
from edgeds.errors import SpecError

KV_BYTES = {"fp16": 2.0, "int8": 1.0}
"""Bytes per element of the cache; the scales of an INT8 cache (one per token and head) are not counted."""
MAX_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LlmPrediction:
    """Predicted figures of a language model. ``context_tokens`` are in the cache at the step that ``decode`` is about.

    ``ttft_ms``: prefill of the prompt, which gives the first token; all of it without tokenizer and sampling.
    ``tokens_per_s`` counts all sequences of the batch; ``kv_bytes_per_token`` one sequence.
    """

    prompt_tokens: int
    context_tokens: int
    batch: int
    kv_precision: str
    kv_bytes_per_token: float
    kv_cache_mib: float
    ttft_ms: float
    ttft_low_ms: float
    ttft_high_ms: float
    prefill_tokens_per_s: float
    tokens_per_s: float
    tokens_per_s_low: float
    tokens_per_s_high: float
    decode: Prediction
    prefill: Prediction


def predict_llm(
    work: ModelWork,
    *,
    board: BoardSpec,
    mode: PowerMode,
    precision: str,
    prompt: int,
    context: int | None = None,
    batch: int = 1,
    kv_precision: str = "fp16",
    sparsity: str | None = None,
    table: Table | None = None,
) -> LlmPrediction:
    """Predict prefill of ``prompt`` tokens and decoding with ``context`` tokens in the cache (None: the prompt's).

    ``work`` holds the costs of one decode step. Raises SpecError for costs that are no decoder's, for impossible
    numbers of tokens, and as ``predict`` does.
    """
    facts = find_decoder(work)
    context = prompt + 1 if context is None else context
    for name, value in (("prompt", prompt), ("context", context)):
        if not 1 <= value <= MAX_TOKENS:
            raise SpecError(f"{name} of {value} tokens: expected 1 to {MAX_TOKENS}")
    if context < prompt:
        raise SpecError(f"a context of {context} tokens does not hold the prompt of {prompt}")
    if kv_precision not in KV_BYTES:
        raise SpecError(f"KV cache in {kv_precision!r}: choose from {', '.join(KV_BYTES)}")
    per_token = kv_bytes_per_token(facts, kv_precision=kv_precision)
    cache = per_token * context * batch / (1 << 20)
    width = KV_BYTES[kv_precision] / (4.0 if precision.startswith("fp32") else 2.0)
    step = decode_work(work, facts, context=context, kv_width=width)
    first = prefill_work(work, facts, tokens=prompt)
    decode, prefill = (
        predict(
            one,
            board=board,
            mode=mode,
            precision=precision,
            batch=batch,
            table=table,
            sparsity=sparsity,
            kv_cache_mib=cache,
            kind=kind,
        )
        # Prefill is bound by compute like a network, which is what its coefficients were fitted on.
        for one, kind in ((step, "llm"), (first, "cnn"))
    )
    prefill = replace(
        prefill,
        latency_low_ms=prefill.latency_ms * assumed("prefill_band_low"),
        latency_high_ms=prefill.latency_ms * assumed("prefill_band_high"),
        notes=(*prefill.notes, explain("prefill_band_high")),
    )
    return LlmPrediction(
        prompt_tokens=prompt,
        context_tokens=context,
        batch=batch,
        kv_precision=kv_precision,
        kv_bytes_per_token=per_token,
        kv_cache_mib=cache,
        ttft_ms=prefill.latency_ms,
        ttft_low_ms=prefill.latency_low_ms,
        ttft_high_ms=prefill.latency_high_ms,
        prefill_tokens_per_s=prompt * batch / prefill.latency_ms * 1e3,
        tokens_per_s=batch / decode.latency_ms * 1e3,
        tokens_per_s_low=batch / decode.latency_high_ms * 1e3,
        tokens_per_s_high=batch / decode.latency_low_ms * 1e3,
        decode=decode,
        prefill=prefill,
    )


def kv_bytes_per_token(facts: DecoderFacts, *, kv_precision: str) -> float:
    """Keys and values of all layers for one token of one sequence."""
    return 2 * facts.layers * facts.kv_heads * facts.head_dim * KV_BYTES[kv_precision]


def find_decoder(work: ModelWork) -> DecoderFacts:
    """The facts that the costs state, else those that their attention products imply. Raises SpecError without."""
    pairs = _attention(work.layers)
    if not pairs:
        raise SpecError("these costs are no decoder's: they hold no attention products; prompts need a language model")
    facts = work.decoder or _infer(work, pairs)
    if facts is None:
        raise SpecError(
            "the attention products of these costs fit no decode step of one token; a prompt needs the costs of a "
            "language model's step, with its facts under the key 'decoder' where they cannot be told (docs/predict.md)"
        )
    if len(pairs) != facts.layers:
        raise SpecError(f"decoder: {facts.layers} layers are stated, but the costs hold {len(pairs)} attentions")
    return facts


def decode_work(work: ModelWork, facts: DecoderFacts, *, context: int, kv_width: float = 1.0) -> ModelWork:
    """One decode step with ``context`` tokens in the cache. ``kv_width``: bytes of a cached element over those of an
    activation."""
    layers = list(work.layers)
    queries, scores = facts.heads * facts.head_dim, facts.heads * context
    cached = round(facts.kv_heads * facts.head_dim * context * kv_width)
    flops = 2 * queries * context
    for first, second in _attention(work.layers):
        layers[first] = _sized(layers[first], flops=flops, read=queries + cached, written=scores, batch=work.batch)
        layers[second] = _sized(layers[second], flops=flops, read=scores + cached, written=queries, batch=work.batch)
        for index in range(first + 1, second):  # softmax and scaling of the scores, where the costs list them
            old = layers[index]
            layers[index] = scale_layer(old, context / facts.context)
    return replace(
        work, layers=tuple(layers), notes=(*work.notes, f"scaled from {facts.context} to {context} tokens in the cache")
    )


def prefill_work(work: ModelWork, facts: DecoderFacts, *, tokens: int) -> ModelWork:
    """All ``tokens`` of a prompt at once, into an empty cache."""
    pairs = dict(_attention(work.layers))
    inside = {index for first, second in pairs.items() for index in range(first + 1, second + 1)}
    queries = facts.heads * facts.head_dim * tokens
    keys_values = 2 * facts.kv_heads * facts.head_dim * tokens
    flops = 2 * queries * tokens  # two products of 2 x queries x tokens, halved by the causal mask
    layers = []
    products = [index for index, layer in enumerate(work.layers) if layer.op in ("MatMul", "Gemm")]
    last = products[-1] if products else -1
    for index, layer in enumerate(work.layers):
        if index in pairs:
            layers.append(_sized(layer, flops=flops, read=queries + keys_values, written=queries, batch=work.batch))
        elif index not in inside:
            once = index == last and _is_vocabulary(layer)
            layers.append(layer if once else scale_layer(layer, tokens))
    bare = [replace(layer, reads=None) for layer in layers]  # indices would point at layers that are gone
    return replace(work, layers=tuple(bare), notes=(*work.notes, f"prefill of {tokens} tokens, attention fused"))


def _attention(layers: Sequence[LayerCost]) -> list[tuple[int, int]]:
    """Indices of the two products of each attention."""
    found = [index for index, layer in enumerate(layers) if layer.op == "MatMul" and not layer.params and layer.flops]
    return list(zip(found[::2], found[1::2], strict=True)) if len(found) % 2 == 0 else []


def _infer(work: ModelWork, pairs: Sequence[tuple[int, int]]) -> DecoderFacts | None:
    """Solve the sizes of the first attention for heads, context, head size and KV heads; None where they are no whole
    numbers."""
    first, second = (work.layers[index] for index in pairs[0])
    (read, scores), (_, queries) = (_elements(layer, batch=work.batch) for layer in (first, second))
    half = first.flops / work.batch / 2
    heads = scores * queries / half
    context, head_dim = scores / heads, queries / heads
    kv_heads = (read - queries) / (head_dim * context) if head_dim * context else 0
    values = (heads, context, head_dim, kv_heads)
    if any(abs(value - round(value)) > 1e-6 or round(value) < 1 for value in values):
        return None
    return DecoderFacts(
        layers=len(pairs),
        heads=round(heads),
        kv_heads=round(kv_heads),
        head_dim=round(head_dim),
        context=round(context),
    )


def _elements(layer: LayerCost, *, batch: int) -> tuple[float, float]:
    size = element_bytes(layer.precision)
    read, written = layer.elements or (layer.bytes_read / size, layer.bytes_written / size)
    return read / batch, written / batch


def _is_vocabulary(layer: LayerCost) -> bool:
    _, written = _elements(layer, batch=1)
    return layer.op in ("MatMul", "Gemm") and layer.params > 0 and written >= VOCABULARY


def _sized(layer: LayerCost, *, flops: int, read: int, written: int, batch: int) -> LayerCost:
    size = element_bytes(layer.precision) * batch
    return replace(
        layer,
        flops=flops * batch,
        bytes_read=round(read * size),
        bytes_written=round(written * size),
        elements=None if layer.elements is None else (read * batch, written * batch),
    )
