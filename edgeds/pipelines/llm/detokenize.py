"""Tokens to text one at a time, never with half a character (report B102).

A token is bytes, not characters: a letter or an emoji may be spread over several. Here every token is looked up as
bytes, and a UTF-8 decoder that remembers unfinished characters turns them into text, so the pieces put together are
what decoding everything at once gives, and at most the bytes of one character are held back.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgeds.errors import InputError, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SUPPORTED = "ByteLevel, Metaspace, or Replace with ByteFallback, Fuse and Strip"


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """The bytes of every token.

    ``pieces`` by token number (empty where the tokenizer has a gap); ``special`` tokens control and are not text;
    ``strips_space``: a space at the very beginning of a text was put there by the tokenizer and is dropped.
    """

    pieces: tuple[bytes, ...]
    special: frozenset[int]
    strips_space: bool

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of all tokens, from the beginning of a text. Bytes that are no UTF-8 become U+FFFD."""
        stream = Detokenizer(self, skip_special=skip_special, at_start=True)
        return "".join([*(stream.push(token) for token in tokens), stream.flush()])


class Detokenizer:
    """One text that grows. ``push`` gives what is finished, ``flush`` the rest.

    ``at_start`` False (a prompt came before): a space before the first word is text and stays.
    """

    def __init__(self, table: TokenTable, *, skip_special: bool = True, at_start: bool = False) -> None:
        self._table = table
        self._skipped = table.special if skip_special else frozenset()
        self._strip = at_start and table.strips_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that is complete with this token; may be empty. Raises InputError for a number that is no token."""
        if not 0 <= token < len(self._table.pieces):
            raise InputError(f"token {token} is outside the vocabulary of {len(self._table.pieces)} tokens")
        if token in self._skipped:
            return ""
        return self._stripped(self._decoder.decode(self._table.pieces[token]))

    def flush(self) -> str:
        """What was held back: the first bytes of a character that never came to its end, as U+FFFD, or nothing."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if not (self._strip and text):
            return text
        self._strip = False
        return text.removeprefix(" ")


def token_table(tokenizer: Tokenizer) -> TokenTable:
    """The table of a ``tokenizers.Tokenizer``. Raises ModelError when its decoder is of a kind not known here."""
    to_bytes, strips_space = _converter(_decoder_steps(tokenizer))
    vocab: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, number in vocab.items():
        pieces[number] = to_bytes(token)
    special = {number for number, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return TokenTable(pieces=tuple(pieces), special=frozenset(special), strips_space=strips_space)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        raise ModelError(f"the tokenizer has no decoder, so its tokens cannot become text; it needs {_SUPPORTED}")
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    for step in steps:
        if step["type"] not in ("ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"):
            raise ModelError(
                f"the tokenizer's decoder {step['type']} is not known to generation; it takes {_SUPPORTED}"
            )
    return list(steps)


def _converter(steps: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], bool]:
    """How a token's name becomes bytes, and whether a leading space of the whole text is dropped."""
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        return lambda token: _from_alphabet(token, alphabet), False
    replacements: list[tuple[str, str]] = []
    strips_space = False
    for step in steps:
        if step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
            strips_space |= step.get("prepend_scheme", "always") != "never"
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None:
                raise ModelError("the tokenizer's decoder replaces by a regular expression, which is not supported")
            replacements.append((pattern, step["content"]))
        elif step["type"] == "Strip":
            strips_space |= step["content"] == " " and step["start"] > 0
    has_bytes = "ByteFallback" in kinds
    return lambda token: _from_words(token, replacements, has_bytes=has_bytes), strips_space


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level tokenizers write for each byte: its own where that is printable Latin-1.

    The other 68 bytes, in order, take the characters from U+0100 on (the convention that GPT-2 began).
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(own))
    return {**{chr(byte): byte for byte in own}, **{chr(0x100 + index): byte for index, byte in enumerate(others)}}


def _from_alphabet(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes(alphabet[char] for char in token)
    except KeyError:
        return token.encode()  # an added token, written as it is


def _from_words(token: str, replacements: list[tuple[str, str]], *, has_bytes: bool) -> bytes:
    match = _BYTE_TOKEN.match(token) if has_bytes else None
    if match is not None:
        return bytes([int(match.group(1), 16)])
    for old, new in replacements:
        token = token.replace(old, new)
    return token.encode()
