"""The real SmolLM2-135M (issue 7, "to reach"): the same logits, text and perplexity as transformers on its weights."""

import numpy as np
import pytest

from edgeds.engines.onnxruntime import OnnxRuntimeEngine
from edgeds.graph.decoder import build_decoder
from edgeds.graph.io import save_model
from edgeds.pipelines.llm.model import LlmModel
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.pipelines.llm.text import open_text
from edgeds.report.perplexity import measure_perplexity

pytestmark = [pytest.mark.zoo, pytest.mark.slow]

TEXT = (
    "The harbour was quiet before the first ferry arrived. Two engineers were soldering a sensor onto a small board, "
    "and rain was expected in the north, with gusts of up to 70 km/h near the coast. The committee postponed its vote "
    "because three of its eleven members had not yet read the report. "
)
QUESTIONS = ("What is the capital of France?", "Write a short poem about the sea.", "Why is the sky blue?")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    from edgeds.graph.gguf_file import GgufFile
    from edgeds.pipelines.llm.gguf_tokenizer import write_gguf_tokenizer
    from edgeds.zoo import fetch_model

    path, folder = fetch_model("smollm2-135m", quiet=True), tmp_path_factory.mktemp("smollm")
    with GgufFile(path) as file:
        write_gguf_tokenizer(file.metadata, out=folder / "tokenizer", source=path.name)
    save_model(build_decoder(path), folder / "model.onnx")
    with OnnxRuntimeEngine(folder / "model.onnx", threads=2) as engine:
        yield path, engine, open_text(folder / "tokenizer")


@pytest.fixture(scope="module")
def theirs(ours):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = ours[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return torch, model.eval()


def test_greedy_text_is_that_of_transformers(ours, theirs):
    _, engine, text = ours
    torch, model = theirs
    with LlmPipeline(engine, text=text, settings=LlmSettings(kv_tokens=512)) as llm:
        for question in QUESTIONS:
            prompt = llm.encode([{"role": "user", "content": question}])
            found = llm.generate(prompt, max_tokens=40, ignore_eos=True).tokens
            with torch.inference_mode():
                out = model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                    max_new_tokens=40,
                    min_new_tokens=40,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            assert list(found) == out[0, len(prompt) :].tolist(), question


def test_perplexity_is_that_of_transformers(ours, theirs):
    _, engine, text = ours
    torch, model = theirs
    tokens = text.encode(TEXT * 3)[:256]
    found = measure_perplexity(LlmModel(engine, LlmSettings(kv_tokens=512)), tokens, window=128, chunk=48, quiet=True)
    losses = []
    with torch.inference_mode():
        for start in range(0, len(tokens), 128):
            part = tokens[start : start + 128]
            logits = model(torch.tensor([part])).logits[0, :-1].double()
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="none"))
    expected = float(np.exp(torch.cat(losses).mean()))
    assert found.value == pytest.approx(expected, rel=1e-3)
