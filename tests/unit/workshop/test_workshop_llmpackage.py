"""Language-model bundles: what is in them, that they generate, and that nothing is left after a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmmodels import SIZES, write_llm
from toyllm import VOCAB

from edgeds.boards.cost_file import parse_cost, read_cost
from edgeds.boards.decoder import find_decoder, predict_llm
from edgeds.boards.targets import resolve_target
from edgeds.bundle import open_bundle, verify_bundle
from edgeds.engines import open_engine
from edgeds.engines.golden_check import check_golden
from edgeds.engines.variant import choose_variant
from edgeds.errors import CalibrationError, EdgedsError, ModelError, SpecError
from edgeds.graph.decoder import build_decoder
from edgeds.graph.session import open_session
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.workshop.llmcalib import read_windows
from edgeds.workshop.llmcost import count_decode_step
from edgeds.workshop.llmpackage import create_llm_bundle

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llm(tmp_path_factory.mktemp("llm") / "model")


def create(checkpoint: Path, out: Path, **options: Any) -> Path:
    return create_llm_bundle(checkpoint, out=out, **{"weights": "int8", "quiet": True, **options})


@pytest.fixture(scope="module")
def bundles(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        weights: create(checkpoint, folder / weights, weights=weights, target="orin-nano-8gb@15W", license="MIT")
        for weights in ("float", "int8", "int4")
    }


class AsWritten:
    """An engine that rounds nothing but what the graph rounds, as TensorRT does."""

    def __init__(self, path: Path) -> None:
        self._session = open_session(path, optimize=False)
        with open_engine(path) as engine:
            self.inputs, self.outputs = engine.inputs, engine.outputs

    def infer(self, feeds: dict[str, Any]) -> dict[str, Any]:
        names = [spec.name for spec in self.outputs]
        return dict(zip(names, self._session.run(names, feeds), strict=True))


VARIANTS = {
    "float": {"float", "float16"},
    "int8": {"int8", "int8_fp16", "cpu_int8"},
    "int4": {"int4", "int4_fp16", "cpu_int4"},
}


@pytest.mark.parametrize("weights", sorted(VARIANTS))
def test_bundle_holds_the_forms_of_each_engine(bundles: dict[str, Path], weights: str) -> None:
    assert verify_bundle(bundles[weights]) == []
    with open_bundle(bundles[weights]) as bundle:
        manifest = bundle.manifest
        assert (manifest.task, manifest.precision, manifest.license) == ("generate", weights, "MIT")
        assert set(manifest.models) == VARIANTS[weights]
        assert {"tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "cost.json", "golden.npz"} <= set(
            manifest.files
        )
        assert manifest.head is not None
        assert (manifest.head["vocab_size"], manifest.head["max_length"]) == (VOCAB, 128)
        assert (manifest.head["compensated_on_tokens"] > 0) == (weights == "int4")
        assert manifest.target == {"name": "orin-nano-8gb", "mode": "15W"}
        assert manifest.predicted is not None
        assert manifest.predicted["label"] == "predicted"
        assert manifest.predicted["tokens_per_s"] > 0
        for typing, suffix in (("strong", "_fp16"), ("weak", "" if weights == "int8" else "_fp16")):
            expected = {"float": "float16" if typing == "strong" else "float"}.get(weights, weights + suffix)
            precision = {"float": "float16"}.get(weights, weights)
            assert choose_variant(manifest, precision="auto", typing=typing)[:2] == (expected, precision)


@pytest.mark.parametrize("weights", sorted(VARIANTS))
def test_bundle_generates_and_its_golden_samples_fit_the_device_form(bundles: dict[str, Path], weights: str) -> None:
    with LlmPipeline.from_bundle(bundles[weights], backend="onnxruntime", threads=1) as llm:
        found = llm.generate("hello there", max_tokens=12, temperature=0)
    assert 1 <= len(found.tokens) <= 12
    with open_bundle(bundles[weights]) as bundle:
        engine = AsWritten(bundle.path(bundle.manifest.models[weights]))
        result = check_golden(engine, bundle.golden(), precision=weights)  # type: ignore[arg-type]
    assert result.ok
    assert result.samples == 1
    assert {output.reference for output in result.outputs} == {weights}


def test_int8_and_float_mostly_agree(bundles: dict[str, Path]) -> None:
    said = {}
    for weights in ("float", "int8"):
        with LlmPipeline.from_bundle(bundles[weights], backend="onnxruntime", threads=1) as llm:
            said[weights] = [llm.generate([3, n], max_tokens=1, temperature=0).tokens[0] for n in range(20)]
    assert sum(a == b for a, b in zip(said["float"], said["int8"], strict=True)) >= 16


@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_cache_and_pages_are_those_asked_for(checkpoint: Path, tmp_path: Path, kv: str) -> None:
    path = create(checkpoint, tmp_path / "b", kv=kv, page=16, eviction=True)
    with open_bundle(path) as bundle:
        names = {spec.name: spec for spec in bundle.manifest.inputs}
        assert names["k_pages.0"].dtype == kv
        assert names["k_pages.0"].shape[-1] == 16
        assert "attention_mass" in {spec.name for spec in bundle.manifest.outputs}
    with LlmPipeline.from_bundle(path, backend="onnxruntime", threads=1) as llm:
        assert llm.generate("abc", max_tokens=4, temperature=0).tokens


def test_costs_are_those_of_a_decode_step(checkpoint: Path, bundles: dict[str, Path]) -> None:
    model = build_decoder(checkpoint, page=16)
    work = parse_cost(count_decode_step(model), where="cost")
    facts = find_decoder(work)
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim, facts.context) == (2, 4, 2, 16, 512)
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    linear = 2 * (2 * hidden * hidden + 2 * hidden * 32 + 3 * hidden * inner) * 2 + 2 * hidden * VOCAB
    attention = 2 * 2 * (2 * hidden * 512)
    assert sum(layer.flops for layer in work.layers if layer.op == "MatMul") == linear + attention
    with open_bundle(bundles["int4"]) as bundle:
        stored = read_cost(bundle.path("cost.json"))
    target = resolve_target("orin-nano-8gb@15W")
    assert target.mode is not None
    found = predict_llm(stored, board=target.board, mode=target.mode, precision="int4", prompt=64)
    assert found.tokens_per_s > 0
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2


def test_calibration_text_comes_from_files_folders_or_edgeds(checkpoint: Path, tmp_path: Path) -> None:
    from edgeds.pipelines.llm.text import open_text

    text = open_text(checkpoint)
    assert sum(map(len, read_windows(None, text=text))) > 1000
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.txt").write_text("abc " * 100)
    (tmp_path / "a" / "2.md").write_text("xyz " * 100)
    (tmp_path / "a" / "3.bin").write_bytes(b"\xff")
    windows = read_windows(tmp_path / "a", text=text, samples=2, window=300)
    assert [len(window) for window in windows] == [300, 300]
    joined = text.decode([token for window in windows for token in window])
    assert "abc" in joined
    assert "xyz" in joined
    assert len(read_windows(tmp_path / "a", text=text, samples=1, window=300)) == 1
    bad = tmp_path / "bad.txt"
    for content, words in ((b"", "no text"), (b"\xff\xfe", "UTF-8")):
        bad.write_bytes(content)
        with pytest.raises(CalibrationError, match=words):
            read_windows(bad, text=text)
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_windows(tmp_path / "missing.txt", text=text)
    with pytest.raises(SpecError, match="at least 1"):
        read_windows(bad, text=text, samples=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "int2"}, "--weights 'int2'"),
        ({"kv": "int4"}, "--kv 'int4'"),
        ({"calib": "x.txt"}, "--calib is for --weights int4"),
        ({"page": 0}, "page"),
        ({"target": "no-such-board"}, "no-such-board"),
        ({"max_batch": 0}, "--max-batch 0"),
    ],
)
def test_wrong_arguments_leave_nothing(checkpoint: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        create(checkpoint, tmp_path / "b", **options)
    assert list(tmp_path.iterdir()) == []


def test_damaged_sources_are_named_and_leave_nothing(tmp_path: Path) -> None:
    source = write_llm(tmp_path / "model")
    out = tmp_path / "b"

    def refused(words: str, error: type[EdgedsError] = ModelError) -> None:
        with pytest.raises(error, match=words):
            create(source, out)
        assert not out.exists()

    text = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").unlink()
    refused("tokenizer.json")
    (source / "tokenizer.json").write_text(text)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    refused("mamba")
    (source / "config.json").write_text(json.dumps(config))
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused("safetensors")
    with pytest.raises(ModelError, match=r"x\.gguf"):
        create(tmp_path / "x.gguf", out)
    (tmp_path / "y.gguf").write_bytes(b"GGUF" + b"\0" * 20)
    with pytest.raises(ModelError, match=r"y\.gguf"):
        create(tmp_path / "y.gguf", out)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    source = write_llm(tmp_path / "model", vocab_size=500)
    with pytest.raises(ModelError, match="500 logits"):
        create(source, tmp_path / "b")


def test_an_older_bundle_is_replaced_only_when_asked(checkpoint: Path, tmp_path: Path) -> None:
    path = create(checkpoint, tmp_path / "b")
    before = (path / "bundle.json").read_bytes()
    with pytest.raises(SpecError, match="exists and is not an empty"):
        create(checkpoint, path)
    assert (path / "bundle.json").read_bytes() == before
    create(checkpoint, path, weights="float", replace=True)
    with open_bundle(path) as bundle:
        assert bundle.manifest.precision == "float"


def test_a_board_without_a_mode_is_named_but_not_predicted(checkpoint: Path, tmp_path: Path) -> None:
    with open_bundle(create(checkpoint, tmp_path / "b", target="orin-nano-8gb")) as bundle:
        assert bundle.manifest.target is not None
        assert bundle.manifest.target["name"] == "orin-nano-8gb"


def test_float16_form_is_close(bundles: dict[str, Path]) -> None:
    with open_bundle(bundles["int4"]) as bundle:
        golden = bundle.golden()
        feeds = {name.rpartition("/")[2]: golden[name] for name in golden if name.startswith("input/0/")}
        found = AsWritten(bundle.path(bundle.manifest.models["int4_fp16"])).infer(feeds)["logits"]
    np.testing.assert_allclose(found, golden["int4/0/logits"], atol=0.01 * np.abs(found).max())
