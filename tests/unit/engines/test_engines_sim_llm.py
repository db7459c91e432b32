"""A language model on the simulated device (issue 7 part 3): its cache lies where the engine reads it in place."""

import numpy as np
import pytest
from llmmodels import write_llm

pytest.importorskip("onnxruntime")
pytest.importorskip("tokenizers")

from simdevice.simtrt import make_tensorrt, write_plan

from edgeds.bundle import open_bundle
from edgeds.engines.bundle_dims import bundle_dims
from edgeds.engines.cuda import open_cuda
from edgeds.engines.profiles import plan_profiles
from edgeds.engines.tensorrt import TensorRTEngine
from edgeds.engines.trt_choice import model_facts
from edgeds.errors import OutOfMemory, SpecError
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.pipelines.llm.text import open_text
from edgeds.runtime.kv_layout import KvLayout
from edgeds.runtime.kv_mapped import MappedStore
from edgeds.workshop.llmpackage import create_llm_bundle

PROMPTS = ["hello there", "another prompt, longer than the first one", "hello there again"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm")
    source = write_llm(folder / "model")
    return {
        kv: create_llm_bundle(source, out=folder / kv, weights="float", kv=kv, page=16, quiet=True)
        for kv in ("float32", "int8")
    }


def open_engine(simcuda, cuda, bundle, folder):
    """The bundle's model as a simulated engine, with the profiles that ``edgeds build`` would plan."""
    manifest = bundle.manifest
    dims = bundle_dims(manifest, max_batch=4)
    planned = plan_profiles(manifest.inputs, (), max_batch=4, dims=dims)
    profiles = [{name: (one.min, one.opt, one.max) for name, one in profile.items()} for profile in planned]
    plan = write_plan(folder / "m.plan", bundle.path(manifest.models["float"]), profiles=profiles)
    trt = make_tensorrt(simcuda)
    specs = (*manifest.inputs, *manifest.outputs)
    return trt, TensorRTEngine(plan, trt=trt, cuda=cuda, specs=specs, metadata=model_facts(manifest))


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_generation_agrees_with_the_cpu_and_the_cache_is_never_fed(simcuda, tmp_path, bundles, kv):
    simcuda.set(integrated=1)
    with LlmPipeline.from_bundle(bundles[kv], backend="cpu", threads=1) as llm:
        want = [one.tokens for one in llm.generate_all(PROMPTS, max_tokens=24, ignore_eos=True)]
    with open_bundle(bundles[kv]) as bundle, open_cuda(driver="ctypes", library=str(simcuda.path)) as cuda:
        before = cuda.open_count
        trt, engine = open_engine(simcuda, cuda, bundle, tmp_path)
        with engine:
            text = open_text(bundle.root / "tokenizer")
            with LlmPipeline(engine, text=text, settings=LlmSettings(kv_tokens=256)) as llm:
                assert isinstance(llm._model.store, MappedStore)
                assert not any(spec.name.startswith(("k_pages", "v_pages")) for spec in engine.inputs)
                got = [one.tokens for one in llm.generate_all(PROMPTS, max_tokens=24, ignore_eos=True)]
                assert llm.stats()["kv"].hit_tokens >= 0
            assert any(spec.name == "k_pages.0" for spec in engine.inputs), "closing gives the inputs back"
        assert cuda.open_count == before
    assert got == want
    assert trt.sim.violations == []


def test_a_store_that_does_not_fit_leaves_nothing_bound(simcuda, tmp_path, bundles):
    simcuda.set(integrated=1)
    with open_bundle(bundles["float32"]) as bundle, open_cuda(driver="ctypes", library=str(simcuda.path)) as cuda:
        _, engine = open_engine(simcuda, cuda, bundle, tmp_path)
        with engine:
            layout = KvLayout.from_metadata(engine.metadata)
            before, names = cuda.open_count, [spec.name for spec in engine.inputs]
            with pytest.raises(SpecError, match="outside what the engine allows"):
                MappedStore(engine, layout, 10_000)
            with pytest.raises(OutOfMemory):
                MappedStore(engine, layout, 1 << 40)
            assert cuda.open_count == before
            assert [spec.name for spec in engine.inputs] == names
            store = MappedStore(engine, layout, 8)
            assert not any(np.any(array) for array in store._arrays.values()), "pages start as zeros"
            store.close()
            store.close()
            assert cuda.open_count == before


def test_bind_takes_mapped_memory_at_an_offset_and_refuses_what_it_cannot_see(simcuda, tmp_path, bundles):
    simcuda.set(integrated=1)
    with open_bundle(bundles["float32"]) as bundle, open_cuda(driver="ctypes", library=str(simcuda.path)) as cuda:
        _, engine = open_engine(simcuda, cuda, bundle, tmp_path)
        with engine:
            layout = KvLayout.from_metadata(engine.metadata)
            shape = (2, layout.kv_heads, layout.head_dim, layout.page)
            nbytes = int(np.prod(shape)) * 4
            plain = cuda.host_buffer(nbytes)
            with pytest.raises(SpecError, match="not mapped"):
                engine.bind("k_pages.0", plain, shape=shape)
            mapped = cuda.host_buffer(nbytes, mapped=True)
            for offset in (-256, 100, nbytes):
                with pytest.raises(SpecError, match="multiple of 256"):
                    engine.bind("k_pages.0", mapped, shape=shape, offset=offset)
            with pytest.raises(SpecError, match="needs"):
                engine.bind("k_pages.0", mapped, shape=shape, offset=256)
            plain.close()
            mapped.close()
