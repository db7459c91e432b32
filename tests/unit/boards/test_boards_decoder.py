"""Language models: what the costs imply, decoding against the context, prefill, the cache's bytes, and refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgeds
from edgeds.boards import resolve_target
from edgeds.boards.cost_file import DecoderFacts, LayerCost, ModelWork, read_cost
from edgeds.boards.decoder import LlmPrediction, decode_work, find_decoder, predict_llm, prefill_work
from edgeds.errors import SpecError

COSTS = Path(edgeds.__file__).parent.parent / "benchmarks" / "predictor" / "costs"
VOCABULARY, INNER = 50_000, 2048


def product(name: str, *, flops: int, read: int, written: int, params: int = 0, batch: int = 1) -> LayerCost:
    return LayerCost(
        node=name, op="MatMul", flops=flops * batch, params=params, bytes_read=4 * (read * batch + params),
        bytes_written=4 * written * batch, int8_eligible=True, precision="float32",
    )  # fmt: skip


def decoder(
    *, layers: int = 3, heads: int = 8, kv: int = 2, size: int = 64, context: int = 256, batch: int = 1
) -> ModelWork:
    """One decode step, counted the way an exporter would."""
    hidden, made = heads * size, []
    for _ in range(layers):
        qkv = (heads + 2 * kv) * size
        made += [
            product("qkv", flops=2 * hidden * qkv, read=hidden, written=qkv, params=hidden * qkv, batch=batch),
            product(
                "scores", flops=2 * hidden * context, read=hidden + kv * size * context, written=heads * context,
                batch=batch,
            ),
            product(
                "values", flops=2 * hidden * context, read=heads * context + kv * size * context, written=hidden,
                batch=batch,
            ),
            product("up", flops=2 * hidden * INNER, read=hidden, written=INNER, params=hidden * INNER, batch=batch),
            product("down", flops=2 * hidden * INNER, read=INNER, written=hidden, params=hidden * INNER, batch=batch),
        ]  # fmt: skip
    params = hidden * VOCABULARY
    made.append(product("head", flops=2 * params, read=hidden, written=VOCABULARY, params=params, batch=batch))
    return ModelWork(inputs={"input_ids": (batch, 1)}, layers=tuple(made))


def on(
    work: ModelWork | None = None, *, prompt: int = 128, precision: str = "fp16", **options: object
) -> LlmPrediction:
    found = resolve_target("agx-orin-64gb@MAXN")
    assert found.mode is not None
    return predict_llm(
        work or decoder(),
        board=found.board,
        mode=found.mode,
        precision=precision,
        prompt=prompt,
        **options,  # type: ignore[arg-type]
    )


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(1, 4), kv=st.integers(1, 4), shared=st.integers(1, 8), size=st.sampled_from([64, 96, 128]),
    context=st.integers(1, 4096), batch=st.integers(1, 3),
)  # fmt: skip
def test_facts_follow_from_the_attention_products(
    layers: int, kv: int, shared: int, size: int, context: int, batch: int
) -> None:
    work = decoder(layers=layers, heads=kv * shared, kv=kv, size=size, context=context, batch=batch)
    wanted = DecoderFacts(layers=layers, heads=kv * shared, kv_heads=kv, head_dim=size, context=context)
    assert find_decoder(work) == wanted


def test_costs_scaled_to_a_context_are_those_counted_there() -> None:
    work = decoder(context=256)
    assert decode_work(work, find_decoder(work), context=3000).layers == decoder(context=3000).layers


def test_prefill_scales_with_tokens_and_its_attention_with_their_square() -> None:
    work = decoder()
    facts = find_decoder(work)
    one, many = (prefill_work(work, facts, tokens=tokens).layers for tokens in (1, 100))
    assert [layer.node for layer in one] == ["qkv", "scores", "up", "down"] * 3 + ["head"]
    assert many[0].flops == 100 * one[0].flops
    assert many[0].params == one[0].params
    assert many[1].flops == 10_000 * one[1].flops
    assert many[-1] == one[-1]  # logits of the last token only


def test_cache_is_two_times_layers_heads_size_bytes_context_and_batch() -> None:
    found = on(prompt=512, context=2048, batch=4)
    assert found.kv_bytes_per_token == 2 * 3 * 2 * 64 * 2
    assert found.kv_cache_mib == pytest.approx(found.kv_bytes_per_token * 2048 * 4 / 2**20)
    assert found.decode.memory.kv_cache_mib == found.kv_cache_mib
    assert found.decode.memory_mib > found.kv_cache_mib
    halved = on(prompt=512, context=2048, batch=4, kv_precision="int8")
    assert halved.kv_cache_mib == found.kv_cache_mib / 2
    assert halved.tokens_per_s > found.tokens_per_s


def test_longer_contexts_and_prompts_are_slower_and_batches_give_more_tokens() -> None:
    rates = [on(context=context).tokens_per_s for context in (128, 2048, 32_768)]
    assert rates == sorted(rates, reverse=True)
    firsts = [on(prompt=prompt).ttft_ms for prompt in (16, 512, 4096)]
    assert firsts == sorted(firsts)
    one, eight = on(), on(batch=8)
    assert one.tokens_per_s < eight.tokens_per_s < 8 * one.tokens_per_s
    assert on(precision="int4").tokens_per_s > on(precision="int8").tokens_per_s > one.tokens_per_s
    assert one.ttft_low_ms < one.ttft_ms < one.ttft_high_ms
    assert one.tokens_per_s_low < one.tokens_per_s < one.tokens_per_s_high
    assert any("prefill_band_high" in note for note in one.prefill.notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt": 0}, "prompt of 0 tokens"),
        ({"prompt": 1 << 30}, "expected 1 to"),
        ({"prompt": 512, "context": 100}, "does not hold the prompt of 512"),
        ({"kv_precision": "fp8"}, "KV cache in 'fp8'"),
    ],
)
def test_impossible_numbers_of_tokens_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        on(**options)  # type: ignore[arg-type]


def test_costs_of_other_networks_are_refused() -> None:
    rows = decoder().layers
    with pytest.raises(SpecError, match="no decoder's"):
        on(replace(decoder(), layers=(rows[0],)))
    with pytest.raises(SpecError, match="key 'decoder'"):
        on(replace(decoder(), layers=(rows[1], rows[1])))
    facts = DecoderFacts(layers=5, heads=8, kv_heads=2, head_dim=64, context=256)
    with pytest.raises(SpecError, match="5 layers are stated, but the costs hold 3"):
        on(replace(decoder(), decoder=facts))


@pytest.mark.skipif(not COSTS.is_dir(), reason="the costs come with the repository, not with the wheel")
def test_published_decode_rates_of_llama_are_met_within_a_fifth() -> None:
    work = read_cost(COSTS / "llama-3.2-1b.json")
    assert find_decoder(work) == DecoderFacts(layers=16, heads=32, kv_heads=8, head_dim=64, context=256)
    for precision, prompt, published in (("fp16", 128, 61.73), ("int8", 1024, 90.74), ("int4", 4096, 115.74)):
        rate = on(work, precision=precision, prompt=prompt, context=prompt + 64).tokens_per_s
        assert rate == pytest.approx(published, rel=0.2)
