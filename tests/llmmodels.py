"""Small language models of random weights as checkpoints with a tokenizer, for bundles that really run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decoders import write_decoder
from toyllm import END, VOCAB, write_tokenizer

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def write_llm(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A checkpoint whose widths are multiples of 64, with the tokenizer of ``toyllm`` beside it."""
    write_decoder(folder, kind, **{"vocab_size": VOCAB, "eos_token_id": END, **SIZES, **changes})
    return write_tokenizer(folder)
