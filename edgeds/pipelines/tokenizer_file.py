"""Read a tokenizer from disk: ``tokenizer.json``, or the ``vocab.txt`` of a WordPiece model."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from edgeds.errors import MissingDependency, ModelError, SpecError
from edgeds.files import open_regular, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
VOCAB_NAME = "vocab.txt"
CONFIG_NAME = "tokenizer_config.json"
TOKENIZER_FILES = (TOKENIZER_NAME, VOCAB_NAME, CONFIG_NAME)
"""What ``load_tokenizer`` reads, so what has to travel with a model."""

MAX_TOKENIZER_BYTES = 256 << 20
MAX_WORD_CHARS = 100
"""Longer words become the unknown token, as in the WordPiece tokenizer that BERT was published with."""

_SPECIAL = {"unk": "[UNK]", "sep": "[SEP]", "cls": "[CLS]", "pad": "[PAD]", "mask": "[MASK]"}


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of a folder (``tokenizer.json``, else ``vocab.txt``) or of one of these files.

    It neither cuts nor pads: settings for that in the file are switched off, since a silent cut cannot be counted.
    A ``tokenizer_config.json`` beside ``vocab.txt`` says about case, accents and the special tokens; without it text
    is lower-cased, as for the uncased models. Every call gives a tokenizer of its own.

    Raises ModelError for a file that is missing or damaged, MissingDependency without the package ``tokenizers``.
    """
    path = _find_file(Path(source))
    library = import_tokenizers()
    found = _from_vocab(library, path) if path.suffix.lower() == ".txt" else _from_json(library, path)
    found.no_truncation()
    found.no_padding()
    return found


def import_tokenizers() -> ModuleType:
    """The tokenizers module, or MissingDependency that names the extra."""
    try:
        import tokenizers
    except ImportError as error:
        raise MissingDependency("tokenizers", extra="text", purpose="turning text into tokens", cause=error) from error
    return tokenizers


def _find_file(source: Path) -> Path:
    if not source.is_dir():
        if not source.exists():
            raise ModelError(
                f"{source}: no such file or folder; give the folder of a tokenizer or its {TOKENIZER_NAME}"
            )
        if source.suffix.lower() not in (".json", ".txt"):
            raise ModelError(f"{source}: not a tokenizer; give {TOKENIZER_NAME}, {VOCAB_NAME} or a folder with one")
        return source
    for name in (TOKENIZER_NAME, VOCAB_NAME):
        if (source / name).exists():
            return source / name
    raise ModelError(f"{source}: holds no tokenizer; it needs {TOKENIZER_NAME} or {VOCAB_NAME}")


def _read_text(path: Path) -> str:
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: the tokenizer cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_TOKENIZER_BYTES:
        raise ModelError(f"{path}: larger than the {MAX_TOKENIZER_BYTES >> 20} MiB a tokenizer may have")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: the tokenizer is not UTF-8 text (byte {error.start})") from error


def _from_json(library: ModuleType, path: Path) -> Any:
    text = _read_text(path)
    try:
        return library.Tokenizer.from_str(text)
    except Exception as error:
        if type(error) is not Exception:  # the library raises the bare class for what it cannot parse, and only then
            raise
        raise ModelError(f"{path}: not a tokenizer that can be read: {' '.join(str(error).split())}") from error


def _from_vocab(library: ModuleType, path: Path) -> Any:
    """WordPiece as BERT uses it. One token per line, its number is that of the line."""
    lines = _read_text(path).removesuffix("\n").split("\n")
    vocab: dict[str, int] = {}
    for number, line in enumerate(lines):
        token = line.removesuffix("\r")
        if token in vocab:
            raise ModelError(f"{path}: line {number + 1} repeats token {token!r} of line {vocab[token] + 1}")
        vocab[token] = number
    config = _read_config(path.with_name(CONFIG_NAME))
    special = {role: _token_text(config, role, path=path) for role in _SPECIAL}
    for role in ("unk", "sep", "cls", "pad"):
        if special[role] not in vocab:
            raise ModelError(f"{path}: has no {special[role]!r}; a WordPiece vocabulary needs its {role} token")
    made = library.Tokenizer(
        library.models.WordPiece(vocab, unk_token=special["unk"], max_input_chars_per_word=MAX_WORD_CHARS)
    )
    made.normalizer = library.normalizers.BertNormalizer(
        lowercase=_flag(config, "do_lower_case", default=True, path=path),
        strip_accents=_flag(config, "strip_accents", default=None, path=path),
        handle_chinese_chars=_flag(config, "tokenize_chinese_chars", default=True, path=path),
    )
    made.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    made.decoder = library.decoders.WordPiece()
    sep, cls = special["sep"], special["cls"]
    made.post_processor = library.processors.BertProcessing((sep, vocab[sep]), (cls, vocab[cls]))
    made.add_special_tokens([token for token in special.values() if token in vocab])
    return made


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = read_json(path)
    except SpecError as error:
        raise ModelError(str(error)) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def _token_text(config: dict[str, Any], role: str, *, path: Path) -> str:
    """A special token's text; the file gives it plainly or as an object with ``content``."""
    value = config.get(f"{role}_token") or _SPECIAL[role]
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise ModelError(f"{path.with_name(CONFIG_NAME)}: {role}_token is {value!r}; it must be a text")
    return text


def _flag(config: dict[str, Any], key: str, *, default: bool | None, path: Path) -> bool | None:
    value = config.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"{path.with_name(CONFIG_NAME)}: {key} is {value!r}; it must be true or false")
    return value
