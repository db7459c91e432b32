"""The arrays of the KV pool: what is written is what the graph reads, in every type, for padded batches too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from edgeds.errors import InputError, ModelError, OutOfMemory, SpecError
from edgeds.runtime import kv_store
from edgeds.runtime.kv_layout import KvLayout, PageStore, Slots, join_slots, make_slots
from edgeds.runtime.kv_store import KvStore, quantize_rows

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=8, page=4)
METADATA = {
    "edgeds.layers": "3",
    "edgeds.kv_heads": "2",
    "edgeds.head_dim": "8",
    "edgeds.page": "4",
    "edgeds.kv_dtype": "int8",
}


def with_dtype(dtype: str) -> KvLayout:
    return KvLayout(layers=3, kv_heads=2, head_dim=8, page=4, dtype=dtype)


def random_step(batch: int, step: int, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    new = rng.standard_normal((2, 3, batch, 2, step, 8), np.float32)
    return list(new[0]), list(new[1])


def scalar_store(layout: KvLayout, slots: Slots, new: list[np.ndarray]) -> np.ndarray:
    """What should be read back, one number at a time: float32 [layers, kv_heads, tokens, head_dim]."""
    out = np.zeros((layout.layers, layout.kv_heads, len(slots), layout.head_dim), np.float32)
    for layer, head, token in np.ndindex(out.shape[:3]):
        row = [float(x) for x in new[layer][slots.rows[token], head, slots.steps[token]]]
        if layout.dtype == "int8":
            scale = float(np.float16(np.float32(max(abs(x) for x in row)) / np.float32(127)))
            row = [max(-127, min(127, round(x / scale))) * scale if scale else 0.0 for x in row]
        out[layer, head, token] = np.array(row, layout.dtype if layout.dtype != "int8" else np.float32)
    return out


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("group_bytes", [1, kv_store.GROUP_BYTES])
def test_a_padded_batch_is_stored_as_one_number_at_a_time_would(
    dtype: str, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "GROUP_BYTES", group_bytes)
    layout = with_dtype(dtype)
    store = KvStore(layout, 9)
    parts = [
        make_slots([7, 2], np.arange(1, 7), page=4, row=0),
        make_slots([5], np.arange(3, 4), page=4, row=2),
        make_slots([0, 8], np.arange(2, 5), page=4, row=1),
    ]
    slots = join_slots(parts)
    keys, values = random_step(batch=3, step=6)
    store.write(slots, keys, values)
    read_keys, read_values = store.read(slots)
    np.testing.assert_array_equal(read_keys, scalar_store(layout, slots, keys))
    np.testing.assert_array_equal(read_values, scalar_store(layout, slots, values))
    untouched = make_slots([1, 3, 4, 6], np.arange(16), page=4)
    assert not any(part.any() for part in store.read(untouched))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_attention_over_pages_equals_attention_over_the_plain_cache(dtype: str) -> None:
    """What the graph does with ``feeds`` and a block table, against one contiguous array."""
    layout = with_dtype(dtype)
    store = KvStore(layout, 6)
    keys, values = random_step(batch=1, step=10)
    table = np.array([4, 1, 3])
    store.write(make_slots(table.tolist(), np.arange(10), page=4), [k[0] for k in keys], [v[0] for v in values])
    feeds = store.feeds()
    query = np.random.default_rng(5).standard_normal((2, 1, 8)).astype(np.float32)
    for layer in range(3):
        k_pages = feeds[f"k_pages.{layer}"][table].astype(np.float32)
        v_pages = feeds[f"v_pages.{layer}"][table].astype(np.float32)
        if dtype == "int8":
            k_pages *= feeds[f"k_scale.{layer}"][table].astype(np.float32)[:, :, None, :]
            v_pages *= feeds[f"v_scale.{layer}"][table].astype(np.float32)[..., None]
        scores = np.concatenate([query @ page for page in k_pages], axis=-1)[..., :10]
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        paged = sum(weights[..., 4 * i : 4 * i + 4] @ v_pages[i][:, : min(4, 10 - 4 * i)] for i in range(3))
        plain_scores = query @ keys[layer][0].transpose(0, 2, 1)
        plain = np.exp(plain_scores) / np.exp(plain_scores).sum(-1, keepdims=True) @ values[layer][0]
        np.testing.assert_allclose(paged, plain, atol={"float32": 1e-5, "float16": 5e-3, "int8": 5e-2}[dtype])


def test_feeds_are_the_graph_inputs_and_never_copies() -> None:
    """``KvStore`` fulfils ``PageStore``: shapes and types of the contract, contiguous, seen by the next run."""
    store: PageStore = KvStore(with_dtype("int8"), 5)
    feeds = store.feeds()
    assert set(feeds) == {
        f"{kind}.{layer}" for kind in ("k_pages", "v_pages", "k_scale", "v_scale") for layer in range(3)
    }
    assert (feeds["k_pages.0"].shape, feeds["k_pages.0"].dtype) == ((5, 2, 8, 4), np.int8)
    assert (feeds["v_pages.2"].shape, feeds["v_pages.2"].dtype) == ((5, 2, 4, 8), np.int8)
    assert (feeds["k_scale.1"].shape, feeds["k_scale.1"].dtype) == ((5, 2, 4), np.float16)
    assert all(array.flags.c_contiguous for array in feeds.values())
    keys, values = random_step(batch=1, step=1)
    store.write(make_slots([3], np.arange(1), page=4), keys, values)
    assert feeds["k_pages.2"][3].any()
    assert np.shares_memory(feeds["v_pages.1"], store.feeds()["v_pages.1"])


@settings(max_examples=60)
@given(rows=npst.arrays(np.float32, (2, 3, 8), elements=st.floats(-1e4, 1e4, width=32)))
def test_int8_errs_by_half_a_step(rows: np.ndarray) -> None:
    numbers, scales = quantize_rows(rows)
    assert (numbers.dtype, scales.dtype, scales.shape) == (np.int8, np.float16, (2, 3))
    assert numbers.min() >= -127
    scale = scales.astype(np.float32)[..., None]
    lost = np.abs(numbers * scale - rows)
    amax = np.abs(rows).max(-1, keepdims=True)
    # Half a step, the clipped end of a scale that float16 rounded down (2^-11 of 127 steps), and what is below float16.
    assert np.all(lost <= np.maximum(0.5 * scale, amax * 2**-11) * 1.001 + 127 * 2**-25)


def test_int8_rounds_half_to_even_and_keeps_rows_of_zeros() -> None:
    rows = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, 0, -127], [0] * 8, [1e-30] * 8], np.float32)
    numbers, scales = quantize_rows(rows)
    assert numbers[0].tolist() == [127, 0, 2, 2, 0, -2, 0, -127]
    assert not numbers[1:].any()
    assert scales.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pages_are_copied_and_tokens_moved_with_their_scales(dtype: str) -> None:
    store = KvStore(with_dtype(dtype), 4)
    keys, values = random_step(batch=1, step=8)
    eight = make_slots([2, 0], np.arange(8), page=4)
    store.write(eight, keys, values)
    before_keys, before_values = store.read(eight)
    store.copy_page(2, 3)
    np.testing.assert_array_equal(store.read(make_slots([3], np.arange(4), page=4))[0], before_keys[:, :, :4])
    kept = np.array([0, 2, 3, 5, 7])
    store.move(make_slots([2, 0], kept, page=4), make_slots([2, 0], np.arange(5), page=4))  # onto itself
    after_keys, after_values = store.read(make_slots([2, 0], np.arange(5), page=4))
    np.testing.assert_array_equal(after_keys, before_keys[:, :, kept])
    np.testing.assert_array_equal(after_values, before_values[:, :, kept])
    with pytest.raises(SpecError, match="5 tokens do not fit into 8 places"):
        store.move(make_slots([2, 0], kept, page=4), eight)


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [("float32", np.nan, "NaN or infinity"), ("int8", np.inf, "NaN or infinity"), ("float16", 7e4, "7e\\+04")],
)
def test_numbers_that_would_poison_a_page_are_refused_before_anything_is_written(
    dtype: str, value: float, said: str
) -> None:
    """A masked slot weighs 0, and 0 x NaN is NaN: the next sequence on that page would be lost too."""
    store = KvStore(with_dtype(dtype), 2)
    keys, values = random_step(batch=1, step=2)
    values[1][0, 1, 1, 3] = value
    with pytest.raises(InputError, match=rf"v_new\.1 holds {said}.*{dtype} KV cache"):
        store.write(make_slots([1], np.arange(2), page=4), keys, values)
    assert not any(array.any() for array in store.feeds().values())
    store.write(make_slots([1], np.arange(1), page=4), keys, values)  # what lies in the padding does not matter


def test_arrays_of_another_model_are_refused_by_name() -> None:
    store = KvStore(LAYOUT, 2)
    slots = make_slots([1], np.arange(2), page=4)
    keys, values = random_step(batch=1, step=2)
    with pytest.raises(SpecError, match="k_new: 2 layers, the cache has 3"):
        store.write(slots, keys[:2], values)
    with pytest.raises(SpecError, match=r"v_new\.1: shape \[1, 2, 1, 8\]"):
        store.write(slots, keys, [values[0], values[1][:, :, :1], values[2]])
    with pytest.raises(SpecError, match=r"k_new\.0: shape \[1, 2, 2, 8\], expected \[batch from 2"):
        store.write(make_slots([1], np.arange(2), page=4, row=1), keys, values)
    with pytest.raises(SpecError, match=r"k_new\.0: int64, expected float32"):
        store.write(slots, [array.astype(np.int64) for array in keys], values)
    with pytest.raises(SpecError, match="no slots to join"):
        join_slots([])
    store.write(make_slots([], np.arange(0), page=4), keys, values)
    assert not store.feeds()["k_pages.0"].any()


def test_a_cache_that_does_not_fit_is_refused_with_what_would() -> None:
    layout = KvLayout(layers=32, kv_heads=8, head_dim=128, page=64)
    with pytest.raises(OutOfMemory, match=r"1000000 pages of 64 tokens needs .* MiB .* take at most \d+ pages .* int8"):
        KvStore(layout, 10**6)
    with pytest.raises(
        OutOfMemory, match=r"needs 64 MiB and 40 MiB are available: take at most 2 pages \(128 tokens\)"
    ):
        KvStore(layout, 4, memory_mib=40)
    with pytest.raises(OutOfMemory, match="which this system does not give"):
        KvStore(layout, 2**60, memory_mib=float("inf"))
    with pytest.raises(SpecError, match="pages must be a whole number from 1, got 0"):
        KvStore(layout, 0)


def test_int8_pages_take_half_of_float16() -> None:
    """KV memory: INT8 with its scales is at most 0.52 of float16 from heads of 64 numbers on."""
    for head_dim in (64, 128):
        sizes = {
            dtype: KvLayout(layers=30, kv_heads=3, head_dim=head_dim, page=64, dtype=dtype).page_bytes
            for dtype in ("float32", "float16", "int8")
        }
        assert sizes["int8"] <= 0.52 * sizes["float16"]
        assert sizes["float32"] == 2 * sizes["float16"]
    store = KvStore(with_dtype("int8"), 7)
    assert store.nbytes == 7 * store.layout.page_bytes


def test_the_layout_is_read_from_the_models_metadata() -> None:
    assert KvLayout.from_metadata(METADATA) == with_dtype("int8")
    for key, value in (("edgeds.page", "0"), ("edgeds.layers", "x"), ("edgeds.kv_dtype", "fp8"), ("edgeds.page", "٤")):
        with pytest.raises(ModelError, match=key):
            KvLayout.from_metadata(METADATA | {key: value})
    with pytest.raises(ModelError, match=r"edgeds\.layers=''"):
        KvLayout.from_metadata({})
    with pytest.raises(SpecError, match="head_dim must be a whole number from 1, got True"):
        KvLayout(layers=1, kv_heads=1, head_dim=True)
    with pytest.raises(SpecError, match="dtype 'fp8' is none of float32, float16, int8"):
        KvLayout(layers=1, kv_heads=1, head_dim=1, dtype="fp8")
