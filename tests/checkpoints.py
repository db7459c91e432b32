"""Random Hugging Face checkpoints as files, written without torch, for the tests of the graph builders."""

from __future__ import annotations

import json

import numpy as np


def write_safetensors(path, tensors):
    """``tensors``: name -> float32 or int64 array, or (``BF16``, float32 array) for a rounded one."""
    header, blobs, at = {}, [], 0
    for name, value in tensors.items():
        if isinstance(value, tuple):
            kind, array = value
            data = (array.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            array = value
            kind = {"f": {2: "F16", 4: "F32", 8: "F64"}, "i": {8: "I64", 4: "I32"}}[array.dtype.kind][array.itemsize]
            data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
        blobs.append(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "vocab_size": 50,
    "max_position_embeddings": 20,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
ROBERTA = {**BERT, "model_type": "roberta", "architectures": ["RobertaModel"], "type_vocab_size": 1}
ROBERTA |= {"pad_token_id": 1, "layer_norm_eps": 1e-5}
DISTIL = {
    "model_type": "distilbert",
    "architectures": ["DistilBertModel"],
    "dim": 24,
    "n_heads": 3,
    "n_layers": 2,
    "hidden_dim": 40,
    "vocab_size": 50,
    "max_position_embeddings": 20,
    "activation": "gelu",
    "pad_token_id": 0,
}
CONFIGS = {"bert": BERT, "roberta": ROBERTA, "distilbert": DISTIL}
HEADED = {
    ("bert", "classify"): "BertForSequenceClassification",
    ("bert", "tag"): "BertForTokenClassification",
    ("bert", "answer"): "BertForQuestionAnswering",
    ("roberta", "classify"): "RobertaForSequenceClassification",
    ("roberta", "tag"): "RobertaForTokenClassification",
    ("distilbert", "classify"): "DistilBertForSequenceClassification",
    ("distilbert", "answer"): "DistilBertForQuestionAnswering",
}


def encoder_tensors(config, *, head="embed", labels=3, seed=0):
    """Random weights under the names of the family."""
    rng = np.random.default_rng(seed)
    distil = config["model_type"] == "distilbert"
    hidden = config.get("dim") or config["hidden_size"]
    inner = config.get("hidden_dim") or config["intermediate_size"]
    layers = config.get("n_layers") or config["num_hidden_layers"]
    prefix = "" if head == "embed" else f"{config['model_type']}."
    made = {}

    def add(name, *shape, scale=0.3, around=0.0):
        made[name] = (around + rng.normal(0, scale, shape)).astype(np.float32)

    def linear(name, source, target):
        add(f"{name}.weight", target, source)
        add(f"{name}.bias", target)

    def norm(name):
        add(f"{name}.weight", hidden, around=1.0)
        add(f"{name}.bias", hidden)

    add(f"{prefix}embeddings.word_embeddings.weight", config["vocab_size"], hidden)
    add(f"{prefix}embeddings.position_embeddings.weight", config["max_position_embeddings"], hidden)
    if not distil:
        add(f"{prefix}embeddings.token_type_embeddings.weight", config["type_vocab_size"], hidden)
    norm(f"{prefix}embeddings.LayerNorm")
    for i in range(layers):
        base = f"{prefix}transformer.layer.{i}" if distil else f"{prefix}encoder.layer.{i}"
        if distil:
            for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
                linear(f"{base}.attention.{name}", hidden, hidden)
            norm(f"{base}.sa_layer_norm")
            linear(f"{base}.ffn.lin1", hidden, inner)
            linear(f"{base}.ffn.lin2", inner, hidden)
            norm(f"{base}.output_layer_norm")
            continue
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{base}.attention.{name}", hidden, hidden)
        norm(f"{base}.attention.output.LayerNorm")
        linear(f"{base}.intermediate.dense", hidden, inner)
        linear(f"{base}.output.dense", inner, hidden)
        norm(f"{base}.output.LayerNorm")
    family = config["model_type"]
    if head == "classify":
        if family == "bert":
            linear("bert.pooler.dense", hidden, hidden)
        if family == "distilbert":
            linear("pre_classifier", hidden, hidden)
        if family == "roberta":
            linear("classifier.dense", hidden, hidden)
        linear("classifier.out_proj" if family == "roberta" else "classifier", hidden, labels)
    elif head == "tag":
        linear("classifier", hidden, labels)
    elif head == "answer":
        linear("qa_outputs", hidden, 2)
    return made


def write_encoder(folder, family="bert", *, head="embed", seed=0, pooling=None, normalize=False, **changes):
    """A checkpoint folder; returns (config, tensors)."""
    config = {**CONFIGS[family], **changes}
    if head != "embed":
        config |= {"architectures": [HEADED[family, head]], "id2label": {"0": "no", "1": "maybe", "2": "yes"}}
        config["label2id"] = {name: int(key) for key, name in config["id2label"].items()}
    tensors = encoder_tensors(config, head=head, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    if normalize:
        modules = [{"idx": 2, "type": "sentence_transformers.models.Normalize"}]
        (folder / "modules.json").write_text(json.dumps(modules))
    return config, tensors
