"""The tokenizer that a GGUF file carries in its metadata, as the files every other model has.

GGUF keeps the vocabulary but only the name of the rules that split text before it. The rules of the supported
architectures are written out here; an unknown name is refused, since the wrong rules give wrong tokens silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from edgeds.errors import ModelError
from edgeds.files import atomic_path, write_json
from edgeds.pipelines.llm.text import GENERATION_CONFIG, TOKENIZER_CONFIG
from edgeds.pipelines.tokenizer_file import TOKENIZER_NAME, import_tokenizers

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Numbers of tokenizer.ggml.token_type in the GGUF specification.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# Words with one leading mark, digits, runs of signs, line ends, blanks: the split that Qwen2 and Llama 3 publish. They
# differ in how many digits make one piece.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SINGLE_DIGIT_RULES = ("smollm", "starcoder", "refact")
_QWEN_RULES = ("qwen2", "deepseek-r1-qwen")
_LLAMA3_RULES = ("llama-bpe", "llama3", "llama-v3")
_GPT2_RULES = ("gpt-2", "gpt2")
_RULES = (*_SINGLE_DIGIT_RULES, *_QWEN_RULES, *_LLAMA3_RULES, *_GPT2_RULES)


def write_gguf_tokenizer(metadata: Mapping[str, Any], *, out: Path, source: str) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json`` into the folder ``out``.

    Args:
        metadata: the file's key-value pairs, arrays as lists, strings as str.
        source: what error messages call the file.

    Raises ModelError for metadata without a tokenizer, or with one of a kind that is not supported.
    """
    tokenizer = gguf_tokenizer(metadata, source=source)
    tokens = _strings(metadata, "tokens", source=source)
    bos, eos = (_special(metadata, f"{name}_token_id", tokens, source=source) for name in ("bos", "eos"))
    ends = [_special(metadata, f"{name}_token_id", tokens, source=source) for name in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template")
    config = {
        "add_bos_token": bos is not None and _adds_bos(metadata),
        "bos_token": None if bos is None else tokens[bos],
        "eos_token": None if eos is None else tokens[eos],
        "chat_template": template if isinstance(template, str) else None,
    }
    out.mkdir(parents=True, exist_ok=True)
    with atomic_path(out / TOKENIZER_NAME) as path:
        path.write_text(tokenizer.to_str(), encoding="utf-8")
    write_json(out / TOKENIZER_CONFIG, config)
    numbers = list(dict.fromkeys(number for number in ends if number is not None))
    write_json(out / GENERATION_CONFIG, {"eos_token_id": numbers})


def gguf_tokenizer(metadata: Mapping[str, Any], *, source: str) -> Tokenizer:
    """The ``tokenizers.Tokenizer`` of a GGUF file's metadata; arguments and errors as ``write_gguf_tokenizer``."""
    library = import_tokenizers()
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokens", source=source)
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError(f"{source}: tokenizer.ggml.tokens holds the same token twice; the file is damaged")
    if kind == "gpt2":
        made = _byte_level(library, metadata, vocab=vocab, source=source)
    elif kind == "llama":
        made = _sentencepiece(library, metadata, tokens=tokens, vocab=vocab, source=source)
    else:
        raise ModelError(
            f"{source}: its tokenizer is of kind {kind!r}; gpt2 (byte-level) and llama (sentencepiece) are supported"
        )
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{source}: has {len(tokens)} tokens but {len(types)} token types; the file is damaged")
    # In order: adding keeps a known token's number, and the library matches the longest.
    made.add_special_tokens([tokens[at] for at, type_ in enumerate(types) if type_ in (_UNKNOWN, _CONTROL)])
    added = [tokens[at] for at, type_ in enumerate(types) if type_ == _USER_DEFINED]
    made.add_tokens([library.AddedToken(token, normalized=False) for token in added])
    return made


def _byte_level(library: ModuleType, metadata: Mapping[str, Any], *, vocab: dict[str, int], source: str) -> Tokenizer:
    rules = metadata.get("tokenizer.ggml.pre")
    if rules not in _RULES:
        raise ModelError(
            f"{source}: splits text by the rules {rules!r} (tokenizer.ggml.pre), which are not known; put the model's "
            f"tokenizer.json beside it. Known: {', '.join(_RULES)}"
        )
    pairs = [tuple(merge.split(" ")) for merge in _strings(metadata, "merges", source=source)]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise ModelError(f"{source}: tokenizer.ggml.merges holds {' '.join(wrong)!r}, which is no pair; it is damaged")
    made = _made_bpe(library, source=source, vocab=vocab, merges=pairs, ignore_merges=rules in _LLAMA3_RULES)
    split = library.pre_tokenizers
    steps: list[Any]
    if rules in _QWEN_RULES or rules in _LLAMA3_RULES:
        words = _WORDS.format(digits="{1,3}" if rules in _LLAMA3_RULES else "")
        steps = [
            split.Split(library.Regex(words), "isolated"),
            split.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        digits = [split.Digits(individual_digits=True)] if rules in _SINGLE_DIGIT_RULES else []
        steps = [*digits, split.ByteLevel(add_prefix_space=False)]
    made.pre_tokenizer = split.Sequence(steps)
    if rules == "qwen2":
        made.normalizer = library.normalizers.NFC()
    made.decoder = library.decoders.ByteLevel()
    return made


def _sentencepiece(
    library: ModuleType, metadata: Mapping[str, Any], *, tokens: Sequence[str], vocab: dict[str, int], source: str
) -> Tokenizer:
    """Sentencepiece's byte-pair model joins the neighbours whose joint token has the best score.

    That is the byte-pair model of the tokenizers library with every split of every token as a merge, best score first.
    """
    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise ModelError(f"{source}: has {len(tokens)} tokens but {len(scores)} scores; the file is damaged")
    order = sorted(range(len(tokens)), key=lambda number: (-scores[number], number))
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[number] for number in order)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    name = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    made = _made_bpe(
        library, source=source, vocab=vocab, merges=merges, unk_token=name, fuse_unk=True, byte_fallback=True
    )
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normal, decoders = library.normalizers, library.decoders
    made.normalizer = normal.Sequence([*([normal.Prepend("▁")] if has_prefix else []), normal.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made


def _made_bpe(library: ModuleType, *, source: str, **settings: Any) -> Tokenizer:
    try:
        made: Tokenizer = library.Tokenizer(library.models.BPE(**settings))
    except Exception as error:
        if type(error) is not Exception:  # the library raises the bare class for merges that do not fit, and only then
            raise
        raise ModelError(f"{source}: its vocabulary and merges do not fit together: {error}") from error
    return made


def _strings(metadata: Mapping[str, Any], name: str, *, source: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list | tuple) or not values or not all(isinstance(value, str) for value in values):
        raise ModelError(f"{source}: has no tokenizer (tokenizer.ggml.{name} is missing or not a list of texts)")
    return list(values)


def _special(metadata: Mapping[str, Any], name: str, tokens: Sequence[str], *, source: str) -> int | None:
    number = metadata.get(f"tokenizer.ggml.{name}")
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ModelError(
            f"{source}: tokenizer.ggml.{name} is {json.dumps(number)}, not one of its {len(tokens)} tokens"
        )
    return number


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """What the file says, else what llama.cpp takes for granted: sentencepiece and Llama 3 begin with that token."""
    said = metadata.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    return metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_RULES
