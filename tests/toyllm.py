"""A language model made of arithmetic, behind the contract of the decoder graph.

What it says depends on every token that lies in the pages it is given, in order, with its position, so a page that is
lost, shared wrongly or stale shows.
"""

from __future__ import annotations

import zlib

import numpy as np

from edgeds.errors import DeviceError
from edgeds.runtime.kv_layout import KvLayout
from edgeds.specs import TensorSpec

VOCAB = 40


def next_logits(tokens, positions=None):
    """What the toy says after these tokens; float32 [VOCAB]."""
    places = range(len(tokens)) if positions is None else positions
    text = ",".join(f"{int(t)}@{int(p)}" for t, p in zip(tokens, places, strict=True))
    return np.random.default_rng(zlib.crc32(text.encode())).normal(0, 2, VOCAB).astype(np.float32)


def greedy(prompt, count):
    """The tokens that undisturbed greedy generation gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(tokens).argmax()))
    return tokens[len(prompt) :]


class ToyEngine:
    """One layer, one head of two channels: a key is (token, position)."""

    def __init__(self, *, page=4, mass=False, say=next_logits):
        self.layout = KvLayout(layers=1, kv_heads=1, head_dim=2, page=page)
        self.say, self.mass = say, mass
        self.runs, self.fail, self.rows = 0, None, []
        names = ("input_ids", "positions", "past_length", "block_table", "logits_at", "k_pages.0", "v_pages.0")
        self.inputs = tuple(TensorSpec(name=name, dtype="int64", shape=(None,)) for name in names)
        self.metadata = metadata(page=page)
        self.outputs = (TensorSpec(name="attention_mass", dtype="float32", shape=(None,)),) if mass else ()

    def infer(self, feeds):
        self.runs += 1
        self.rows.append(feeds["input_ids"].shape)
        if self.fail is not None:
            raise DeviceError(self.fail)
        ids, places = feeds["input_ids"], feeds["positions"]
        batch = len(ids)
        picks = feeds["logits_at"]
        logits = np.zeros((batch, picks.shape[1], VOCAB), np.float32)
        for row in range(batch):
            length = int(feeds["past_length"][row])
            pages = feeds["k_pages.0"][feeds["block_table"][row]][:, 0]
            cached = pages.transpose(0, 2, 1).reshape(-1, 2)[:length]
            values = feeds["v_pages.0"][feeds["block_table"][row]][:, 0].reshape(-1, 2)[:length]
            np.testing.assert_array_equal(cached, values, "keys and values of a token must lie at the same place")
            assert (np.diff(cached[:, 1]) > 0).all(), "cached tokens out of order"
            for index, pick in enumerate(picks[row]):
                tokens = [*cached[:, 0], *ids[row, : pick + 1]]
                at = [*cached[:, 1], *places[row, : pick + 1]]
                logits[row, index] = self.say(tokens, at)
        new = np.stack([ids, places], axis=-1).astype(np.float32)[:, None]
        found = {"logits": logits, "k_new.0": new, "v_new.0": new.copy()}
        if self.mass:
            blocks = feeds["block_table"].shape[1]
            found["attention_mass"] = np.ones((batch, blocks, self.layout.page), np.float32)
        return found


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.Ġ"
END, SYSTEM = 38, 39
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }}.{% endfor %}{% if add_generation_prompt %}a {% endif %}"
)


def write_tokenizer(folder, *, template=TEMPLATE, end=True):
    """A byte-level tokenizer of 40 tokens: letters, digits, a dot, a space, an end token and one more."""
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocab = {letter: index for index, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<sys>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>" if end else None, "chat_template": template, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def metadata(context=200, page=4):
    found = {"edgeds.page": page, "edgeds.layers": 1, "edgeds.kv_heads": 1, "edgeds.head_dim": 2}
    found |= {"edgeds.vocab_size": VOCAB, "edgeds.max_length": context, "edgeds.kv_dtype": "float32"}
    return {"edgeds.eos": f"[{END}]", **{key: str(value) for key, value in found.items()}}


def silent(tokens, positions=None):
    """``next_logits`` without end tokens, so that lengths are known."""
    logits = next_logits(tokens, positions)
    logits[[END, SYSTEM]] = -10.0
    return logits
