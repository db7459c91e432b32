"""Real TensorRT-RTX parses and builds the decoders of issue 7: float32, float16, INT8 and INT4 weights, every cache.

Needs the TensorRT-RTX wheels (no GPU); built for SM86, of Orin's generation, with the profiles of ``edgeds build``.
"""

import pytest
from llmmodels import write_llm
from test_graph_precision_rtx import build_plan, rtx  # noqa: F401

from edgeds.bundle import open_bundle
from edgeds.engines.bundle_dims import bundle_dims
from edgeds.engines.profiles import plan_profiles
from edgeds.workshop.llmpackage import create_llm_bundle

pytestmark = [pytest.mark.tensorrt, pytest.mark.slow]
pytest.importorskip("tokenizers")

SIZES = {"hidden_size": 128, "intermediate_size": 256}


def build_variants(rtx, tmp_path, **options):  # noqa: F811
    """Build every form of a bundle that is meant for TensorRT, with its decode profile; the forms."""
    source = write_llm(tmp_path / "model", options.pop("kind", "llama"), **SIZES)
    built = []
    with open_bundle(create_llm_bundle(source, out=tmp_path / "b", quiet=True, page=16, **options)) as bundle:
        manifest = bundle.manifest
        dims = bundle_dims(manifest, max_batch=4)
        profile = plan_profiles(manifest.inputs, (), max_batch=4, dims=dims)[0]
        shapes = {name: (one.min, one.opt, one.max) for name, one in profile.items()}
        for variant, name in manifest.models.items():
            if not variant.startswith("cpu_"):
                build_plan(rtx, bundle.path(name), shapes)
                built.append(variant)
    return built


@pytest.mark.parametrize("weights", ["float", "int8", "int4"])
def test_every_form_of_the_weights_builds(rtx, tmp_path, weights):  # noqa: F811
    built = build_variants(rtx, tmp_path, weights=weights)
    assert len(built) == 2


@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_every_cache_builds_with_eviction(rtx, tmp_path, kv):  # noqa: F811
    assert build_variants(rtx, tmp_path, weights="int8", kv=kv, eviction=True)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "yarn"])
def test_other_decoders_build(rtx, tmp_path, kind):  # noqa: F811
    assert build_variants(rtx, tmp_path, weights="float", kind=kind)
