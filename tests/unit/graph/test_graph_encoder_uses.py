"""What the encoder's graph is for: float16 (B64), INT8 placement (B65), fused kernels, STS-B (issue 6, "to reach")."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from checkpoints import HEADED, encoder_tensors, write_encoder, write_safetensors
from test_graph_encoder import batch, run

from edgeds.compress.placement import Selection, plan_placement
from edgeds.compress.tail import find_detector_tail
from edgeds.errors import ModelError, SpecError
from edgeds.graph.cost import count_cost
from edgeds.graph.encoder import build_encoder
from edgeds.graph.precision import convert_float16
from edgeds.graph.session import runtime_errors, session_options
from edgeds.graph.view import GraphView


def props(model):
    return {item.key: item.value for item in model.metadata_props}


def rewrite(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("family", "head"), sorted(HEADED))
def test_heads_agree_with_transformers(tmp_path, family, head):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, _ = write_encoder(tmp_path / "m", family, head=head)
    if head == "answer":  # start and end
        rewrite(tmp_path / "m", id2label={"0": "start", "1": "end"}, label2id={"start": 0, "end": 1})
    theirs = getattr(transformers, HEADED[family, head]).from_pretrained(tmp_path / "m").eval()
    ids, mask, types = batch(config)
    feeds = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    if family == "bert":
        feeds["token_type_ids"] = torch.tensor(types)
    with torch.no_grad():
        given = theirs(**feeds)
    expected = [given.start_logits, given.end_logits] if head == "answer" else [given.logits]
    real = mask.astype(bool) if head != "classify" else slice(None)
    for found, wanted in zip(run(build_encoder(tmp_path / "m"), ids, mask, types), expected, strict=True):
        np.testing.assert_allclose(found[real], wanted.numpy()[real], atol=1e-4)


@pytest.mark.parametrize("name", ["Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert"])
@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForMaskedLM"])
def test_what_transformers_saves_is_built(tmp_path, name, head):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "max_position_embeddings": 24, "pad_token_id": 1}
    if name == "DistilBert":
        sizes |= {"dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": 40}
    else:
        sizes |= {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40}
    torch.manual_seed(3)
    theirs = getattr(transformers, name + head)(getattr(transformers, name + "Config")(**sizes)).eval()
    theirs.save_pretrained(tmp_path / "m")
    ids, mask, types = batch({"pad_token_id": 1, "vocab_size": 60})
    with torch.no_grad():
        given = theirs(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), output_hidden_states=True)
    classify = head == "ForSequenceClassification"
    model = build_encoder(tmp_path / "m", head=None if classify else "hidden")
    [found] = run(model, ids, mask, types)
    expected, real = (given.logits, slice(None)) if classify else (given.hidden_states[-1], mask.astype(bool))
    np.testing.assert_allclose(found[real], expected.numpy()[real], atol=1e-4)
    assert props(model)["edgeds.task"] == ("classify" if classify else "hidden")


@pytest.mark.parametrize("model_type", ["xlm-roberta", "camembert"])
def test_cousins_of_roberta_are_built_alike(tmp_path, model_type):
    config, _ = write_encoder(tmp_path / "m", "roberta")
    ids, mask, types = batch(config)
    [expected] = run(build_encoder(tmp_path / "m"), ids, mask, types)
    rewrite(tmp_path / "m", model_type=model_type)
    np.testing.assert_array_equal(run(build_encoder(tmp_path / "m"), ids, mask, types)[0], expected)
    rewrite(tmp_path / "m", pad_token_id=None)
    assert props(build_encoder(tmp_path / "m"))["edgeds.max_length"] == "18", "transformers' default is 1"


def test_norms_called_gamma_and_beta_are_read(tmp_path):
    """bert-base-uncased comes with the names of its TensorFlow original."""
    config, tensors = write_encoder(tmp_path / "m")
    ids, mask, types = batch(config)
    [expected] = run(build_encoder(tmp_path / "m"), ids, mask, types)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    write_safetensors(tmp_path / "m" / "model.safetensors", old)
    np.testing.assert_array_equal(run(build_encoder(tmp_path / "m"), ids, mask, types)[0], expected)


def test_a_masked_language_model_is_an_encoder_under_a_prefix(tmp_path):
    config, tensors = write_encoder(tmp_path / "m")
    ids, mask, types = batch(config)
    [expected] = run(build_encoder(tmp_path / "m"), ids, mask, types)
    stored = {f"bert.{name}": value for name, value in tensors.items()} | {"cls.bias": np.zeros(3, np.float32)}
    write_safetensors(tmp_path / "m" / "model.safetensors", stored)
    rewrite(tmp_path / "m", architectures=["BertForMaskedLM"])
    np.testing.assert_array_equal(run(build_encoder(tmp_path / "m"), ids, mask, types)[0], expected)


@pytest.mark.parametrize("opset", [17, 18, 19, 21])
@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_each_opset_gives_a_valid_graph_with_equal_numbers(tmp_path, opset, pooling):
    config, _ = write_encoder(tmp_path / "m", normalize=True)
    ids, mask, types = batch(config)
    model = build_encoder(tmp_path / "m", opset=opset, pooling=pooling)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == opset
    [expected] = run(build_encoder(tmp_path / "m", pooling=pooling), ids, mask, types)
    np.testing.assert_allclose(run(model, ids, mask, types)[0], expected, atol=1e-6)


@pytest.mark.parametrize("opset", [16, 22, 0, True, "17"])
def test_other_opsets_are_refused(tmp_path, opset):
    write_encoder(tmp_path / "m")
    with pytest.raises(SpecError, match="opset"):
        build_encoder(tmp_path / "m", opset=opset)


def test_float16_keeps_norms_and_loses_no_more_than_rounding(tmp_path):
    """B64: no normalisation, mask or constant of the graph leaves float16, and a row of padding stays finite."""
    config, _ = write_encoder(tmp_path / "m", normalize=True)
    model = build_encoder(tmp_path / "m")
    report = convert_float16(model)
    kept = {item.node for item in report.kept}
    norms = {node.name for node in model.graph.node if node.op_type == "LayerNormalization"}
    assert norms <= kept
    ids, mask, types = batch(config)
    [exact] = run(model, ids, mask, types)
    [half] = run(report.model, ids, mask, types)
    np.testing.assert_allclose(half, exact, atol=5e-3)
    assert np.isfinite(run(report.model, ids, mask * 0, types)[0]).all()


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_every_product_can_be_quantized(tmp_path, family):
    """B65: all MatMuls, those of attention among them, and nothing of an encoder passes for a detector's tail."""
    write_encoder(tmp_path / "m", family)
    view = GraphView(build_encoder(tmp_path / "m"))
    plan = plan_placement(view, find_detector_tail(view), Selection())
    products = {node.name for node in view.nodes if node.op_type == "MatMul"}
    assert len(products) == 2 * 8, "query, key, value, scores, mix, out, up, down"
    assert {item.node for item in plan.nodes} == products
    assert not plan.float_nodes
    assert sum(item.weight is not None and item.weight.axis == 1 for item in plan.nodes) == 2 * 6


def test_onnxruntime_fuses_gelu_and_the_norms(tmp_path):
    import onnxruntime

    write_encoder(tmp_path / "m")
    options = session_options(threads=1)
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    model = build_encoder(tmp_path / "m")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node)
    assert kinds["Erf"] == 0, "each exact GELU is one kernel"
    assert kinds["SkipLayerNormalization"] + kinds["LayerNormalization"] == 2 * 2 + 1


def test_cost_knows_the_encoder(tmp_path):
    write_encoder(tmp_path / "m")
    inputs = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (2, 8))
    cost = count_cost(build_encoder(tmp_path / "m"), inputs)
    linear = 2 * 2 * 8 * (4 * 24 * 24 + 2 * 24 * 40)
    attention = 2 * 2 * (2 * 8 * 8 * 24)
    assert sum(layer.flops for layer in cost.layers if layer.op == "MatMul") == 2 * (linear + attention)


def test_a_text_beyond_the_table_is_no_answer(tmp_path):
    """The limit is metadata; a caller that ignores it gets an error, never positions that wrap."""
    config, _ = write_encoder(tmp_path / "m")
    model = build_encoder(tmp_path / "m")
    assert props(model)["edgeds.max_length"] == "20"
    ids, mask, types = batch(config, lengths=(20,))
    assert np.isfinite(run(model, ids, mask, types)[0]).all()
    ids, mask, types = batch(config, lengths=(21,))
    with pytest.raises(runtime_errors()):
        run(model, ids, mask, types)


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path):
    _, tensors = write_encoder(tmp_path / "m")
    name = "encoder.layer.1.output.dense.bias"
    for bad in (np.nan, np.inf):
        tensors[name][3] = bad
        write_safetensors(tmp_path / "m" / "model.safetensors", tensors)
        with pytest.raises(ModelError, match=r"layer\.1\.output\.dense\.bias' holds NaN or infinity"):
            build_encoder(tmp_path / "m")
    tensors[name] = np.zeros(24, np.int64)
    write_safetensors(tmp_path / "m" / "model.safetensors", tensors)
    with pytest.raises(ModelError, match="int64, not a float type"):
        build_encoder(tmp_path / "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1}, "says 1 layers"),
        ({"max_position_embeddings": 30}, r"is \[20, 24\], but config.json makes it \[30, 24\]"),
        ({"architectures": ["BertForMultipleChoice"]}, "BertForMultipleChoice"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps"),
        ({"type_vocab_size": -1}, "type_vocab_size"),
        ({"vocab_size": 49}, r"makes it \[49, 24\]"),
        ({"model_type": "roberta"}, "no 'embeddings.word|makes it"),
        ({"model_type": "roberta", "pad_token_id": 40}, "leaves no position"),
    ],
)
def test_configs_that_do_not_fit_are_refused(tmp_path, changes, message):
    write_encoder(tmp_path / "m")
    if changes == {"model_type": "roberta"}:
        changes = {**changes, "max_position_embeddings": 19}
    rewrite(tmp_path / "m", **changes)
    with pytest.raises(ModelError, match=message):
        build_encoder(tmp_path / "m")


def test_a_head_that_is_not_built_can_be_left_out(tmp_path):
    write_encoder(tmp_path / "m")
    rewrite(tmp_path / "m", architectures=["BertForNextSentencePrediction"])
    assert props(build_encoder(tmp_path / "m", head="hidden"))["edgeds.task"] == "hidden"


def test_labels_must_match_the_classifier(tmp_path):
    write_encoder(tmp_path / "m", head="classify")
    rewrite(tmp_path / "m", id2label={"0": "no", "1": "yes"})
    with pytest.raises(ModelError, match=r"classifier\.weight' is \[3, 24\], but config.json makes it \[2, 24\]"):
        build_encoder(tmp_path / "m")
    rewrite(tmp_path / "m", id2label={"1": "no", "2": "yes", "3": "so"})
    with pytest.raises(ModelError, match="from 0 without a gap"):
        build_encoder(tmp_path / "m")
    rewrite(tmp_path / "m", id2label={"a": "no"})
    with pytest.raises(ModelError, match="no number"):
        build_encoder(tmp_path / "m")


def test_several_labels_at_once_are_marked_for_the_pipeline(tmp_path):
    write_encoder(tmp_path / "m", head="classify", problem_type="multi_label_classification")
    assert props(build_encoder(tmp_path / "m"))["edgeds.problem_type"] == "multi_label_classification"


def test_sentence_files_say_what_follows_or_are_refused(tmp_path):
    folder = tmp_path / "m"
    write_encoder(folder, pooling="mean_tokens")
    pooling, modules = folder / "1_Pooling" / "config.json", folder / "modules.json"
    pooling.write_text('{"pooling_mode": "max"}')
    assert props(build_encoder(folder))["edgeds.pooling"] == "max"
    pooling.write_text('{"pooling_mode_lasttoken": true}')
    with pytest.raises(ModelError, match="pooling_mode_lasttoken"):
        build_encoder(folder)
    assert props(build_encoder(folder, pooling="cls"))["edgeds.pooling"] == "cls"
    for text in ("[]", '{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}', "{}"):
        pooling.write_text(text)
        with pytest.raises(ModelError, match="1_Pooling"):
            build_encoder(folder)
    pooling.write_text('{"pooling_mode_cls_token": true}')
    for text, message in (
        ('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]', "'Dense' is not built"),
        ('{"a": 1}', "list of modules"),
        ('[{"type": "x.Pooling", "path": "../other"}]', "inside the model's folder"),
    ):
        modules.write_text(text)
        with pytest.raises(ModelError, match=message):
            build_encoder(folder)
    assert props(build_encoder(folder, head="hidden"))["edgeds.max_length"] == "20"
    modules.unlink()
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 0}')
    with pytest.raises(ModelError, match="max_seq_length"):
        build_encoder(folder)


def test_one_token_type_needs_no_input(tmp_path):
    """B96: the graph declares token_type_ids only where they change anything."""
    config, _ = write_encoder(tmp_path / "m", type_vocab_size=1)
    model = build_encoder(tmp_path / "m")
    assert [item.name for item in model.graph.input] == ["input_ids", "attention_mask"]
    ids, mask, _ = batch(config)
    assert np.isfinite(run(model, ids, mask, mask * 0)[0]).all()
    write_safetensors(tmp_path / "m" / "model.safetensors", encoder_tensors({**config, "type_vocab_size": 2}))
    with pytest.raises(ModelError, match="token_type_embeddings"):
        build_encoder(tmp_path / "m")


def ranks(values):
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


@pytest.mark.zoo
@pytest.mark.slow
def test_minilm_on_stsb():
    """82.0 +- 0.2 on the STS-B test set. EDGEDS_STSB: sts-test.csv of the STS benchmark (tab-separated)."""
    from edgeds.zoo import fetch_model

    path = Path(os.environ.get("EDGEDS_STSB", ""))
    if not path.is_file():
        pytest.skip("EDGEDS_STSB names no file")
    tokenizers = pytest.importorskip("tokenizers")
    folder = fetch_model("minilm-l6", quiet=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    model = build_encoder(folder)
    tokenizer.enable_truncation(int(props(model)["edgeds.max_length"]))
    texts = sorted({text for row in rows for text in row[5:7]}, key=len)
    vectors = {}
    for start in range(0, len(texts), 256):
        group = texts[start : start + 256]
        found = [tokenizer.encode(text).ids for text in group]
        ids = np.zeros((len(group), max(map(len, found))), np.int64)
        mask = np.zeros_like(ids)
        for row, item in enumerate(found):
            ids[row, : len(item)], mask[row, : len(item)] = item, 1
        vectors.update(zip(group, run(model, ids, mask, np.zeros_like(ids))[0], strict=True))
    alike = np.array([vectors[row[5]] @ vectors[row[6]] for row in rows])
    gold = np.array([float(row[4]) for row in rows])
    assert 100 * np.corrcoef(ranks(alike), ranks(gold))[0, 1] == pytest.approx(82.0, abs=0.2)
