"""The tokenizer of a language model with what belongs to it: end tokens, begin token, chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.errors import InputError, ModelError, SpecError
from edgeds.files import read_json, read_regular
from edgeds.pipelines.llm.chat_template import MAX_TEMPLATE_CHARS, Message, pick_template, render_chat
from edgeds.pipelines.llm.detokenize import TokenTable, token_table
from edgeds.pipelines.llm.guided import Guide
from edgeds.pipelines.tokenizer_file import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"
TEMPLATE_FILE = "chat_template.jinja"
LLM_TEXT_FILES = ("tokenizer.json", TOKENIZER_CONFIG, GENERATION_CONFIG, TEMPLATE_FILE)
"""What ``open_text`` reads of a bundle's ``tokenizer/`` folder; ``config.json`` beside them only for its end tokens."""

MIN_VOCAB_SHARE = 0.9
"""Models pad their vocabulary to round sizes, never by a tenth; a tokenizer that knows fewer is another model's."""


@dataclass(frozen=True, kw_only=True)
class LlmText:
    """Text to tokens and back. Immutable; any thread.

    ``eos_tokens`` end a text (several are common); without any, only ``max_tokens`` and stop strings do.
    ``bos_token`` is put before a plain prompt, once, when the model was trained so; chat templates write it themselves.
    """

    source: Path
    tokenizer: Tokenizer
    table: TokenTable
    eos_tokens: tuple[int, ...]
    bos_token: int | None
    bos_text: str
    eos_text: str
    templates: object

    @property
    def token_count(self) -> int:
        """Tokens the tokenizer knows: the highest number plus one."""
        return len(self.table.pieces)

    @functools.cached_property
    def ordinary_tokens(self) -> tuple[int, ...]:
        """Tokens that are text: none that control, none that a gap of the tokenizer leaves empty."""
        pieces = self.table.pieces
        return tuple(number for number in range(len(pieces)) if pieces[number] and number not in self.table.special)

    @functools.cached_property
    def guide(self) -> Guide:
        """Makes constraints for guided decoding."""
        return Guide(self.tokenizer, token_count=self.token_count, eos_tokens=self.eos_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` works: the model was made for conversations."""
        return pick_template(self.templates) is not None

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, after the begin token if the model wants one; never two, and no end token.

        Special tokens written out in the text become those tokens. Raises InputError for what is not valid text.
        """
        tokens = self._encode(text)
        if self.bos_token is not None and tokens[:1] != [self.bos_token]:
            tokens.insert(0, self.bos_token)
        return tokens

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        values: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a conversation, by the model's own template; see ``render_chat`` for arguments and errors."""
        text = render_chat(
            messages,
            template=pick_template(self.templates, has_tools=bool(tools)),
            bos=self.bos_text,
            eos=self.eos_text,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            values=values,
        )
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise InputError(f"prompt: expected text, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"prompt: character {error.start} is half of a surrogate pair, not valid Unicode"
            ) from error
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens. Raises InputError for a number that is no token."""
        return self.table.decode(tokens, skip_special=skip_special)

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ModelError unless a model with ``vocab_size`` output logits can be this tokenizer's."""
        count = self.token_count
        if count > vocab_size or count < MIN_VOCAB_SHARE * vocab_size:
            raise ModelError(
                f"{self.source}: the tokenizer knows {count} tokens, but the model gives {vocab_size} logits; they do "
                "not belong together, so take the tokenizer files from where the weights came from"
            )


def open_text(folder: str | Path, *, vocab_size: int | None = None) -> LlmText:
    """Read a tokenizer folder: ``tokenizer.json``, ``tokenizer_config.json``, ``generation_config.json``.

    The template is ``chat_template.jinja`` where there is one, else what ``tokenizer_config.json`` says. End tokens are
    those of ``generation_config.json`` (of ``config.json`` without it) and the tokenizer's own.

    Raises ModelError for files that are missing, damaged or name tokens that do not exist, or for a tokenizer that is
    not that of a model with ``vocab_size`` logits; MissingDependency without the package ``tokenizers``.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ModelError(f"{root}: no such folder; give the folder with tokenizer.json and {TOKENIZER_CONFIG}")
    tokenizer = load_tokenizer(root)
    table = token_table(tokenizer)
    config = _read_object(root / TOKENIZER_CONFIG)
    bos_text = _token_text(config, "bos_token", path=root / TOKENIZER_CONFIG)
    eos_text = _token_text(config, "eos_token", path=root / TOKENIZER_CONFIG)
    text = LlmText(
        source=root,
        tokenizer=tokenizer,
        table=table,
        eos_tokens=_end_tokens(root, tokenizer, eos_text=eos_text, count=len(table.pieces)),
        bos_token=_begin_token(tokenizer, config, bos_text=bos_text, path=root / TOKENIZER_CONFIG),
        bos_text=bos_text,
        eos_text=eos_text,
        templates=_read_template(root / TEMPLATE_FILE) or config.get("chat_template"),
    )
    pick_template(text.templates)  # a malformed one is the model's fault: say so now, not at the first request
    if vocab_size is not None:
        text.check_vocab(vocab_size)
    return text


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = read_json(path)
    except SpecError as error:
        raise ModelError(str(error)) from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _read_template(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        data = read_regular(path)
        text = data.decode()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: the chat template is not UTF-8 text (byte {error.start})") from error
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ModelError(f"{path}: is {len(text)} characters long; at most {MAX_TEMPLATE_CHARS} are taken")
    return text


def _token_text(config: Mapping[str, Any], key: str, *, path: Path) -> str:
    """A special token's text, given plainly or as an object with ``content``; empty when the model has none."""
    value = config.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise ModelError(f"{path}: {key} is {json.dumps(value)[:80]}; it must be a text")
    return text or ""


def _begin_token(tokenizer: Tokenizer, config: Mapping[str, Any], *, bos_text: str, path: Path) -> int | None:
    """The token to put before a prompt: what ``add_bos_token`` says, else what the tokenizer itself does."""
    wanted = config.get("add_bos_token")
    number = tokenizer.token_to_id(bos_text) if bos_text else None
    if wanted is None:
        first = tokenizer.encode("", add_special_tokens=True).ids[:1]
        return number if first == [number] else None
    if not isinstance(wanted, bool):
        raise ModelError(f"{path}: add_bos_token is {wanted!r}; it must be true or false")
    if wanted and number is None:
        raise ModelError(f"{path}: add_bos_token is true, but bos_token {bos_text!r} is not a token of the tokenizer")
    return number if wanted else None


def _end_tokens(root: Path, tokenizer: Tokenizer, *, eos_text: str, count: int) -> tuple[int, ...]:
    path = root / GENERATION_CONFIG
    if not path.exists():
        path = root / MODEL_CONFIG
    value = _read_object(path).get("eos_token_id")
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise ModelError(f"{path}: eos_token_id {number!r} is not one of the tokenizer's {count} tokens")
    own = tokenizer.token_to_id(eos_text) if eos_text else None
    if eos_text and own is None:
        raise ModelError(f"{root / TOKENIZER_CONFIG}: eos_token {eos_text!r} is not a token of the tokenizer")
    return tuple(dict.fromkeys([*numbers, *([] if own is None else [own])]))
