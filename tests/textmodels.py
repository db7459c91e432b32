"""Tiny text models whose answers are known: every token has a row in a table, and its context adds their mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    *("john", "smith", "paris", "acme", "corp", "works", "at", "in", "the", "good", "bad", "movie", "very", "run"),
    *("##ning", "##s", "is", "where", "who", "?", ".", ",", "!", "a", "b", "c", "d", "e", "é", "日", "本", "🙂"),
)
VOCAB = (*SPECIAL, *WORDS)
ID = {token: number for number, token in enumerate(VOCAB)}
HIDDEN = 8
LABELS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-ORG", 4: "I-ORG", 5: "B-LOC", 6: "I-LOC"}
TAGS = {"john": 1, "smith": 2, "acme": 3, "corp": 4, "paris": 5}


def write_tokenizer(folder: Path, *, words: Sequence[str] = VOCAB) -> Path:
    """``vocab.txt`` and its config; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, "strip_accents": False}))
    return folder


def table(columns: int = HIDDEN, *, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(VOCAB), columns)).astype(np.float32)


def token_logits() -> np.ndarray:
    """[vocab, labels]: each name its own label, everything else O."""
    logits = np.zeros((len(VOCAB), len(LABELS)), np.float32)
    logits[:, 0] = 4.0
    for word, label in TAGS.items():
        logits[ID[word]] = 0
        logits[ID[word], label] = 6.0
    return logits


def class_logits() -> np.ndarray:
    """[vocab, 2]: 'bad' votes for 0, 'good' for 1."""
    logits = np.zeros((len(VOCAB), 2), np.float32)
    logits[ID["bad"], 0] = logits[ID["good"], 1] = 9.0
    return logits


def states_of(ids: Sequence[int]) -> np.ndarray:
    """What the graph gives for one unpadded row of type 0: [tokens, hidden]."""
    rows = table()[list(ids)]
    return rows + rows.mean(axis=0)


def write_text_model(
    path: Path,
    task: str,
    *,
    types: bool = True,
    dtype: str = "int64",
    length: int | str = "length",
    linear: bool = False,
    metadata: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    extra_input: str | None = None,
) -> Path:
    """``task``: embed (pooled, unit length), hidden (``last_hidden_state``), classify, tag, answer.

    ``linear`` puts a MatMul into the embedding, for what has to be quantized; ``outputs`` renames.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = {
        "T": table(),
        "S": table(seed=5)[:2] * 0.1,
        "one": np.array([1], np.int64),
        "two": np.array([2], np.int64),
    }
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.INT64),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "two"], ["mask3"]),
        helper.make_node("ReduceSum", ["mask3", "one"], ["count"], keepdims=1),
    ]

    def mean(source: str, name: str) -> None:
        nodes.append(helper.make_node("Mul", [source, "mask3"], [f"{name}_masked"]))
        nodes.append(helper.make_node("ReduceSum", [f"{name}_masked", "one"], [f"{name}_sum"], keepdims=1))
        nodes.append(helper.make_node("Div", [f"{name}_sum", "count"], [name]))

    def gather(name: str, values: np.ndarray, output: str, *, axis: int = 0) -> None:
        weights[name] = values
        nodes.append(helper.make_node("Gather", [name, "ids"], [output], axis=axis))

    shapes: dict[str, list[int | str]] = {}
    if task in ("embed", "hidden"):
        nodes.append(helper.make_node("Gather", ["T", "ids"], ["words"]))
        mean("words", "context")
        nodes.append(helper.make_node("Add", ["words", "context"], ["mixed"]))
        last = "mixed"
        if types:
            nodes += [
                helper.make_node("Cast", ["token_type_ids"], ["types"], to=TensorProto.INT64),
                helper.make_node("Gather", ["S", "types"], ["kinds"]),
                helper.make_node("Add", ["mixed", "kinds"], ["typed"]),
            ]
            last = "typed"
        if linear:
            weights["W"] = np.linalg.qr(table(HIDDEN, seed=9)[:HIDDEN])[0].astype(np.float32)
            nodes.append(helper.make_node("MatMul", [last, "W"], ["projected"], name="projection"))
            last = "projected"
        if task == "hidden":
            nodes.append(helper.make_node("Identity", [last], ["last_hidden_state"]))
            shapes["last_hidden_state"] = ["batch", length, HIDDEN]
        else:
            mean(last, "pooled")
            nodes += [
                helper.make_node("Squeeze", ["pooled", "one"], ["flat"]),
                helper.make_node("LpNormalization", ["flat"], ["embedding"], axis=-1, p=2),
            ]
            shapes["embedding"] = ["batch", HIDDEN]
    elif task == "classify":
        gather("C", class_logits(), "votes")
        nodes.append(helper.make_node("Mul", ["votes", "mask3"], ["counted"]))
        nodes.append(helper.make_node("ReduceSum", ["counted", "one"], ["logits"], keepdims=0))
        shapes["logits"] = ["batch", 2]
    elif task == "tag":
        gather("L", token_logits(), "logits")
        shapes["logits"] = ["batch", length, len(LABELS)]
    else:
        for side, word in (("start", "paris"), ("end", "paris")):
            values = np.full(len(VOCAB), -2, np.float32)
            values[ID[word]], values[ID["[CLS]"]] = 5.0, 1.0
            gather(f"{side}_values", values, f"{side}_logits")
            shapes[f"{side}_logits"] = ["batch", length]
    for old, new in (outputs or {}).items():
        nodes.append(helper.make_node("Identity", [old], [new]))
        shapes[new] = shapes.pop(old)
    names = [
        "input_ids",
        "attention_mask",
        *(["token_type_ids"] if types else []),
        *([extra_input] if extra_input else []),
    ]
    kind = {"int64": TensorProto.INT64, "int32": TensorProto.INT32, "float32": TensorProto.FLOAT}
    graph = helper.make_graph(
        nodes,
        "text",
        [
            helper.make_tensor_value_info(
                name, kind["int64" if name == "input_ids" and dtype == "float32" else dtype], ["batch", length]
            )
            for name in names
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    facts = {"edgeds.vocab_size": str(len(VOCAB)), "edgeds.max_length": "16"}
    if task == "tag":
        facts["edgeds.id2label"] = json.dumps(LABELS)
    if task == "classify":
        facts["edgeds.id2label"] = json.dumps({0: "negative", 1: "positive"})
    helper.set_model_props(model, {**facts, **(metadata or {})})
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path
