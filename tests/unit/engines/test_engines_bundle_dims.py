"""Profiles of text and language-model bundles (issues 6 and 7): every served length and step is inside one."""

import pytest
from llmmodels import write_llm

from edgeds.bundle import Manifest
from edgeds.engines.bundle_dims import bundle_dims
from edgeds.engines.profiles import check_profiles, plan_profiles
from edgeds.errors import BundleError
from edgeds.graph.decoder import build_decoder
from edgeds.graph.io import input_specs
from edgeds.specs import TensorSpec


def manifest(inputs, *, task, head):
    return Manifest(
        task=task, models={"float": "m"}, inputs=tuple(inputs), outputs=(), precision="float", license="MIT", head=head
    )


def profiles_of(found, *, max_batch):
    dims = bundle_dims(found, max_batch=max_batch)
    planned = plan_profiles(found.inputs, (), max_batch=max_batch, dims=dims)
    check_profiles(planned, found.inputs)
    return planned


def admits(profile, name, shape):
    found = profile[name]
    return all(low <= size <= high for low, size, high in zip(found.min, shape, found.max, strict=True))


@pytest.mark.parametrize("names", [("batch", "length"), (None, None)])
def test_every_length_of_a_text_bundle_has_a_profile(names):
    inputs = [TensorSpec(name=name, dtype="int64", shape=names) for name in ("input_ids", "attention_mask")]
    lengths = [8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    if names[0] is None:
        inputs = inputs[:1]
    planned = profiles_of(manifest(inputs, task="embed", head={"lengths": lengths}), max_batch=64)
    assert len(planned) == 4
    for length in lengths:
        assert any(admits(profile, "input_ids", (7, length)) for profile in planned)
    assert max(profile["input_ids"].max[1] for profile in planned) == 256
    ends = [profile["input_ids"].opt[1] for profile in planned]
    assert ends == sorted(ends)
    assert set(ends) <= set(lengths)


def test_few_lengths_and_fixed_ones_need_no_more():
    inputs = [TensorSpec(name="input_ids", dtype="int64", shape=("batch", "length"))]
    assert len(profiles_of(manifest(inputs, task="embed", head={"lengths": [16]}), max_batch=2)) == 1
    fixed = [TensorSpec(name="input_ids", dtype="int64", shape=("batch", 16))]
    assert dict(bundle_dims(manifest(fixed, task="embed", head={"lengths": [16]}), max_batch=2)) == {}
    assert dict(bundle_dims(manifest(inputs, task="detect", head=None), max_batch=2)) == {}


def test_a_language_model_has_a_profile_for_prompts_and_one_for_decoding(tmp_path):
    inputs = input_specs(build_decoder(write_llm(tmp_path, max_position_embeddings=4096), page=64, kv="int8"))
    found = manifest(inputs, task="generate", head={"page": 64, "max_length": 4096})
    planned = profiles_of(found, max_batch=8)
    assert len(planned) == 2
    decode, prefill = planned
    assert decode["input_ids"].opt == (8, 1)
    assert admits(decode, "input_ids", (8, 9)), "guesses"
    assert admits(prefill, "input_ids", (1, 512))
    for profile in planned:
        assert profile["block_table"].max == (8, 64)
        assert profile["k_pages.0"].max[0] == 512
        assert profile["k_scale.0"].max[0] == 512
        assert admits(profile, "logits_at", (8, 9))


def test_a_short_context_is_one_profile_and_a_head_without_sizes_is_named(tmp_path):
    inputs = input_specs(build_decoder(write_llm(tmp_path), page=64))
    small = manifest(inputs, task="generate", head={"page": 64, "max_length": 16})
    assert len(profiles_of(small, max_batch=1)) == 1
    with pytest.raises(BundleError, match="'page'"):
        bundle_dims(manifest(inputs, task="generate", head={}), max_batch=1)
