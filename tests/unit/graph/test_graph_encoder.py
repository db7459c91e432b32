"""The encoder builder (issue 6 part 1): parity with a reference written from the papers, and with transformers."""

import json
import math

import numpy as np
import onnx
import pytest
from checkpoints import CONFIGS, HEADED, write_encoder, write_safetensors

from edgeds.errors import ModelError, SpecError
from edgeds.graph.checkpoint import open_checkpoint
from edgeds.graph.encoder import build_encoder
from edgeds.graph.io import input_specs, output_specs
from edgeds.graph.session import open_session


def reference(config, tensors, ids, mask, types):
    """Hidden states in numpy, float64; attention by loops over heads, so that it shares nothing with the graph."""
    distil = config["model_type"] == "distilbert"
    get = {name.split(".", 1)[1] if name.split(".")[0] in CONFIGS else name: v for name, v in tensors.items()}
    get = {name: value.astype(np.float64) for name, value in get.items()}
    heads = config.get("n_heads") or config["num_attention_heads"]
    layers = config.get("n_layers") or config["num_hidden_layers"]
    eps = config.get("layer_norm_eps", 1e-12)

    def norm(x, name):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(var + eps) * get[f"{name}.weight"] + get[f"{name}.bias"]

    def linear(x, name):
        return x @ get[f"{name}.weight"].T + get[f"{name}.bias"]

    def act(x):
        kind = config.get("activation") or config["hidden_act"]
        if kind == "relu":
            return np.maximum(x, 0)
        if kind == "gelu_new":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    offset = config["pad_token_id"] + 1 if config["model_type"] == "roberta" else 0
    places = np.arange(ids.shape[1]) + offset
    x = get["embeddings.word_embeddings.weight"][ids] + get["embeddings.position_embeddings.weight"][places]
    if not distil:
        x = x + get["embeddings.token_type_embeddings.weight"][types if config["type_vocab_size"] > 1 else types * 0]
    x = norm(x, "embeddings.LayerNorm")
    for i in range(layers):
        base = f"transformer.layer.{i}" if distil else f"encoder.layer.{i}"
        names = ("q_lin", "k_lin", "v_lin") if distil else ("self.query", "self.key", "self.value")
        q, k, v = (linear(x, f"{base}.attention.{name}") for name in names)
        out = np.zeros_like(x)
        size = x.shape[-1] // heads
        for row in range(len(x)):
            seen = mask[row].astype(bool)
            for h in range(heads):
                cut = slice(h * size, (h + 1) * size)
                scores = q[row][:, cut] @ k[row][seen][:, cut].T / math.sqrt(size)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                out[row][:, cut] = weights / weights.sum(-1, keepdims=True) @ v[row][seen][:, cut]
        out = linear(out, f"{base}.attention.out_lin" if distil else f"{base}.attention.output.dense")
        x = norm(x + out, f"{base}.sa_layer_norm" if distil else f"{base}.attention.output.LayerNorm")
        up, down = ("ffn.lin1", "ffn.lin2") if distil else ("intermediate.dense", "output.dense")
        inner = linear(act(linear(x, f"{base}.{up}")), f"{base}.{down}")
        x = norm(x + inner, f"{base}.output_layer_norm" if distil else f"{base}.output.LayerNorm")
    return x


def batch(config, seed=0, lengths=(9, 4, 1)):
    rng = np.random.default_rng(seed)
    ids = np.full((len(lengths), max(lengths)), config["pad_token_id"], np.int64)
    mask = np.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = rng.integers(2, config["vocab_size"], length)
        mask[row, :length] = 1
    types = np.zeros_like(ids)
    if config.get("type_vocab_size", 0) > 1:
        types[:, 3:] = mask[:, 3:]
    return ids, mask, types


def run(model, ids, mask, types):
    session = open_session(model, threads=1)
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    wanted = {item.name for item in session.get_inputs()}
    return session.run(None, {name: value for name, value in feeds.items() if name in wanted})


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_hidden_states_are_those_of_the_reference(tmp_path, family, activation):
    key = "activation" if family == "distilbert" else "hidden_act"
    config, tensors = write_encoder(tmp_path / "m", family, **{key: activation})
    model = build_encoder(tmp_path / "m", head="hidden")
    onnx.checker.check_model(model, full_check=True)
    ids, mask, types = batch(config)
    [found] = run(model, ids, mask, types)
    expected = reference(config, tensors, ids, mask, types)
    real = mask.astype(bool)
    np.testing.assert_allclose(found[real], expected[real], atol=1e-4)


@pytest.mark.parametrize(("family", "head"), sorted(HEADED))
def test_heads_give_their_outputs(tmp_path, family, head):
    config, tensors = write_encoder(tmp_path / "m", family, head=head)
    model = build_encoder(tmp_path / "m")
    ids, mask, types = batch(config)
    found = run(model, ids, mask, types)
    hidden = reference(config, tensors, ids, mask, types)

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T.astype(np.float64) + tensors[f"{name}.bias"]

    if head == "answer":
        both = linear(hidden, "qa_outputs")
        real = mask.astype(bool)
        for index in (0, 1):
            np.testing.assert_allclose(found[index][real], both[..., index][real], atol=1e-4)
        return
    if head == "tag":
        real = mask.astype(bool)
        np.testing.assert_allclose(found[0][real], linear(hidden, "classifier")[real], atol=1e-4)
        return
    first = hidden[:, 0]
    if family == "bert":
        expected = linear(np.tanh(linear(first, "bert.pooler.dense")), "classifier")
    elif family == "roberta":
        expected = linear(np.tanh(linear(first, "classifier.dense")), "classifier.out_proj")
    else:
        expected = linear(np.maximum(linear(first, "pre_classifier"), 0), "classifier")
    np.testing.assert_allclose(found[0], expected, atol=1e-4)
    assert json.loads({i.key: i.value for i in model.metadata_props}["edgeds.id2label"])["2"] == "yes"


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("normalize", [False, True])
def test_pooling_and_normalisation_are_in_the_graph(tmp_path, pooling, normalize):
    config, tensors = write_encoder(tmp_path / "m")
    model = build_encoder(tmp_path / "m", pooling=pooling, normalize=normalize)
    ids, mask, types = batch(config)
    [found] = run(model, ids, mask, types)
    hidden = reference(config, tensors, ids, mask, types)
    rows = [hidden[row][mask[row].astype(bool)] for row in range(len(ids))]
    expected = np.stack([{"mean": r.mean(0), "cls": r[0], "max": r.max(0)}[pooling] for r in rows])
    if normalize:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_pooling_is_read_from_the_files_beside_the_model(tmp_path):
    write_encoder(tmp_path / "m", pooling="cls_token", normalize=True)
    found = {item.key: item.value for item in build_encoder(tmp_path / "m").metadata_props}
    assert found["edgeds.pooling"] == "cls"
    assert found["edgeds.normalized"] == "true"
    assert found["edgeds.task"] == "embed"


def test_padding_changes_nothing_and_a_row_of_padding_is_finite(tmp_path):
    config, _ = write_encoder(tmp_path / "m")
    model = build_encoder(tmp_path / "m")
    ids, mask, types = batch(config, lengths=(5, 9))
    [both] = run(model, ids, mask, types)
    [alone] = run(model, ids[:1, :5], mask[:1, :5], types[:1, :5])
    np.testing.assert_allclose(both[0], alone[0], atol=1e-5)
    [empty] = run(model, ids, mask * 0, types)
    assert np.isfinite(empty).all()


def test_inputs_and_outputs_are_declared(tmp_path):
    write_encoder(tmp_path / "m")
    model = build_encoder(tmp_path / "m")
    assert [(s.name, s.shape, s.dtype) for s in input_specs(model)] == [
        (name, ("batch", "length"), "int64") for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    assert [(s.name, s.shape) for s in output_specs(model)] == [("embedding", ("batch", 24))]
    write_encoder(tmp_path / "r", "roberta")
    assert [s.name for s in input_specs(build_encoder(tmp_path / "r"))] == ["input_ids", "attention_mask"]


def test_longest_text_is_what_the_position_table_holds(tmp_path):
    write_encoder(tmp_path / "r", "roberta")
    props = {item.key: item.value for item in build_encoder(tmp_path / "r").metadata_props}
    assert props["edgeds.max_length"] == "18", "RoBERTa's table starts at the row behind the padding's"
    (tmp_path / "r" / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    props = {item.key: item.value for item in build_encoder(tmp_path / "r").metadata_props}
    assert props["edgeds.max_length"] == "12"


def test_masks_and_weights_survive_float16(tmp_path):
    """No number beyond float16's range, so that a float16 engine has no infinity to subtract."""
    write_encoder(tmp_path / "m")
    for item in build_encoder(tmp_path / "m").graph.initializer:
        value = onnx.numpy_helper.to_array(item)
        if value.dtype.kind == "f":
            assert np.abs(value).max() < 65504


@pytest.mark.parametrize("kind", ["BF16", "F16", "F64"])
def test_weights_of_other_float_types_are_read(tmp_path, kind):
    _, tensors = write_encoder(tmp_path / "m")
    exact = {name: (value.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, value in tensors.items()}
    stored = {
        name: ("BF16", value) if kind == "BF16" else value.astype({"F16": np.float16, "F64": np.float64}[kind])
        for name, value in exact.items()
    }
    write_safetensors(tmp_path / "m" / "model.safetensors", stored)
    with open_checkpoint(tmp_path / "m") as checkpoint:
        name = "embeddings.word_embeddings.weight"
        found = checkpoint.tensor(name)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, exact[name], rtol=1e-3, atol=1e-6)


def test_shards_are_read_through_their_index(tmp_path):
    _, tensors = write_encoder(tmp_path / "m")
    whole = build_encoder(tmp_path / "m")
    names = list(tensors)
    (tmp_path / "m" / "model.safetensors").unlink()
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in parts.items():
        write_safetensors(tmp_path / "m" / file, {name: tensors[name] for name in chosen})
    index = {"weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert build_encoder(tmp_path / "m").SerializeToString() == whole.SerializeToString()
    (tmp_path / "m" / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors.*missing"):
        build_encoder(tmp_path / "m")
    index["weight_map"][names[0]] = "../secret.safetensors"
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not a file name"):
        build_encoder(tmp_path / "m")


def damage(kind, folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    if kind == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "header":
        path.write_bytes((2**60).to_bytes(8, "little") + data[8:])
    elif kind == "not json":
        path.write_bytes((4).to_bytes(8, "little") + b"\xff{{{" + data)
    elif kind == "pickle":
        path.rename(folder / "pytorch_model.bin")
    elif kind == "missing":
        path.unlink()
    elif kind == "config":
        (folder / "config.json").write_text("{")
    elif kind == "no config":
        (folder / "config.json").unlink()


@pytest.mark.parametrize("kind", ["cut", "empty", "header", "not json", "pickle", "missing", "config", "no config"])
def test_damaged_checkpoints_are_one_sentence(tmp_path, kind):
    write_encoder(tmp_path / "m")
    damage(kind, tmp_path / "m")
    with pytest.raises((ModelError, SpecError)) as error:
        build_encoder(tmp_path / "m")
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    if kind == "pickle":
        assert "safe_serialization" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deberta-v2"}, "deberta-v2.*supported are bert"),
        ({"model_type": None}, "supported are bert"),
        ({"hidden_size": 25}, "no multiple"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": 48}, r"is \[50, 24\], but config.json makes it \[50, 48\]"),
        ({"num_hidden_layers": 3}, r"no tensor 'encoder\.layer\.2"),
        ({"hidden_act": "swoosh"}, "swoosh"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "decoder"),
    ],
)
def test_what_is_not_built_is_named(tmp_path, changes, message):
    write_encoder(tmp_path / "m")
    config = {**json.loads((tmp_path / "m" / "config.json").read_text()), **changes}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        build_encoder(tmp_path / "m")


def test_heads_and_poolings_that_are_not_there_are_refused(tmp_path):
    write_encoder(tmp_path / "m")
    with pytest.raises(SpecError, match="no such head"):
        build_encoder(tmp_path / "m", head="classify")
    with pytest.raises(SpecError, match="choose one of"):
        build_encoder(tmp_path / "m", head="translate")
    with pytest.raises(SpecError, match="choose one of"):
        build_encoder(tmp_path / "m", pooling="median")


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_parity_with_transformers(tmp_path, family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, _ = write_encoder(tmp_path / "m", family)
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "m").eval()
    ids, mask, types = batch(config)
    feeds = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    if family == "bert":
        feeds["token_type_ids"] = torch.tensor(types)
    with torch.no_grad():
        expected = theirs(**feeds).last_hidden_state.numpy()
    [found] = run(build_encoder(tmp_path / "m", head="hidden"), ids, mask, types)
    real = mask.astype(bool)
    np.testing.assert_allclose(found[real], expected[real], atol=1e-4)


@pytest.mark.zoo
def test_minilm_gives_unit_vectors_that_know_what_is_alike():
    from edgeds.zoo import fetch_model

    folder = fetch_model("minilm-l6", quiet=True)
    folder = folder if folder.is_dir() else folder.parent
    model = build_encoder(folder)
    # "a man is playing a guitar", "a man plays the guitar", "the stock market fell", by its own vocabulary
    texts = [[101, 1037, 2158, 2003, 2652, 1037, 2858, 102], [101, 1037, 2158, 3248, 1996, 2858, 102]]
    texts.append([101, 1996, 4518, 3006, 3062, 102])
    ids = np.zeros((3, 8), np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    [found] = run(model, ids, mask, np.zeros_like(ids))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    assert found[0] @ found[1] > 0.8 > 0.3 > found[0] @ found[2]
