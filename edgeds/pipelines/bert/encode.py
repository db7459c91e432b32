"""Text to token rows: cut, windowed or refused when too long, and never with ids that the model does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeds.errors import EngineMismatch, InputError, SpecError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OnLong = Literal["truncate", "window", "error"]
ON_LONG = ("truncate", "window", "error")
MAX_QUESTION_TOKENS = 64
_PAD_NAMES = ("[PAD]", "<pad>", "<|padding|>", "<|endoftext|>", "</s>")

Text = str | bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One row for the model: ``ids`` and ``types`` int64 [tokens], special tokens included.

    ``encoding`` is the tokenizer's own record (offsets, words), kept where the task needs it.
    """

    ids: NDArray[np.int64]
    types: NDArray[np.int64]
    encoding: Any = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """A text as one row, or several overlapping ones. ``cut_tokens``: tokens of the text that no row holds."""

    rows: tuple[Row, ...]
    cut_tokens: int = 0


class TextEncoder:
    """Encodes texts for one model; thread-safe.

    ``max_length`` counts special tokens. Longer texts are cut at the end (``truncate``), covered by windows that share
    ``stride`` tokens (``window``), or refused (``error``). ``spans`` keeps what maps tokens back to the text.

    Raises SpecError for a stride that leaves no progress, EngineMismatch when the tokenizer's vocabulary is larger
    than the model's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        on_long: str = "truncate",
        stride: int | None = None,
        vocab_size: int | None = None,
        spans: bool = False,
    ) -> None:
        if on_long not in ON_LONG:
            raise SpecError(f"on_long {on_long!r}: expected one of {', '.join(ON_LONG)}")
        self._tokenizer = tokenizer
        self._special = {pair: tokenizer.num_special_tokens_to_add(pair) for pair in (False, True)}
        self.max_length = max_length
        self.on_long = on_long
        room = max_length - self._special[False]
        if room < 1:
            raise SpecError(
                f"max_length {max_length}: the {self._special[False]} special tokens leave no room for text"
            )
        self.stride = room // 4 if stride is None else stride
        if not 0 <= self.stride < room:
            raise SpecError(f"stride {stride}: windows hold {room} tokens of text and must overlap by fewer, 0 or more")
        size = tokenizer.get_vocab_size(with_added_tokens=False)
        if vocab_size is not None and size > vocab_size:
            raise EngineMismatch(
                f"the tokenizer has {size} tokens, but the model's vocabulary {vocab_size}; it is another model's "
                "tokenizer, use the one the model was trained with"
            )
        self._vocab = vocab_size
        self._spans = spans
        self.pad_id = next((i for i in map(tokenizer.token_to_id, _PAD_NAMES) if i is not None), 0)

    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=False))

    def encode(self, texts: Sequence[Text], *, first: int = 0) -> list[Encoded]:
        """Encode single texts; ``first`` is the number of the first one, for messages.

        Raises InputError naming the text that is no valid Unicode, gives no tokens, or is too long to be taken.
        """
        clean = [check_text(text, where=f"text {first + at}") for at, text in enumerate(texts)]
        # The fast form leaves out offsets, a third of the time.
        batch = self._tokenizer.encode_batch if self._spans else self._tokenizer.encode_batch_fast
        found = batch(clean)
        made = []
        for at, encoding in enumerate(found):
            where = f"text {first + at}"
            if len(encoding) <= self.max_length:
                made.append(Encoded(rows=(self._row(encoding, where=where),)))
            else:
                made.append(self._split(self._bare(clean[at]), where=where))
        return made

    def encode_words(self, words: Sequence[str], *, where: str = "text") -> Encoded:
        """One text given as words; ``encoding.word_ids`` are then their positions."""
        clean = [check_text(word, where=f"{where}, word {at}") for at, word in enumerate(words)]
        encoding = self._tokenizer.encode(clean, is_pretokenized=True, add_special_tokens=False)
        return self._split(encoding, where=where)

    def encode_pair(self, first: Text, second: Text, *, where: str = "text", windows: bool = False) -> Encoded:
        """Two texts in one row, the longer one cut first (or refused, by ``on_long``).

        ``windows``: as for a question and its context: of the first at most ``MAX_QUESTION_TOKENS`` stay, and the
        second is covered by as many overlapping rows as it takes.
        """
        one = self._bare(check_text(first, where=f"{where}, first part"))
        two = self._bare(check_text(second, where=f"{where}, second part"))
        room = self.max_length - self._special[True]
        if room < 2:
            raise SpecError(f"max_length {self.max_length}: special tokens leave no room for two texts")
        total = len(one) + len(two)
        if total > room and self.on_long == "error" and not windows:
            raise InputError(f"{where}: {total} tokens in two parts, more than the {room} that fit; shorten it")
        if windows:
            keep = min(len(one), MAX_QUESTION_TOKENS, room // 2)
        else:
            keep = min(len(one), max(room - len(two), (room + 1) // 2))
        cut = len(one) - keep
        if cut:
            one.truncate(keep)
        left = room - keep
        pieces, lost = [two], 0
        if len(two) > left:
            if windows:
                two.truncate(left, stride=min(self.stride, left // 2))
                pieces = [two, *two.overflowing]
            else:
                lost = len(two) - left
                two.truncate(left)
        joined = [self._tokenizer.post_process(one, piece) for piece in pieces]
        return Encoded(rows=tuple(self._row(item, where=where) for item in joined), cut_tokens=cut + lost)

    def _bare(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _split(self, encoding: Any, *, where: str) -> Encoded:
        """Rows of a text that is encoded without special tokens."""
        room, count = self.max_length - self._special[False], len(encoding)
        pieces, cut = [encoding], 0
        if count > room:
            if self.on_long == "error":
                raise InputError(f"{where}: {count} tokens, more than the {room} that fit; shorten it")
            if self.on_long == "window":
                encoding.truncate(room, stride=self.stride)
                pieces = [encoding, *encoding.overflowing]
            else:
                encoding.truncate(room)
                cut = count - room
        done = [self._tokenizer.post_process(piece) for piece in pieces]
        return Encoded(rows=tuple(self._row(item, where=where) for item in done), cut_tokens=cut)

    def _row(self, encoding: Any, *, where: str) -> Row:
        ids = np.array(encoding.ids, np.int64)
        if not len(ids):
            raise InputError(f"{where}: gives no tokens (it is empty, or holds only what the tokenizer drops)")
        if self._vocab is not None and ids.max() >= self._vocab:
            token = self._tokenizer.id_to_token(int(ids.max()))
            raise EngineMismatch(
                f"{where}: token {token!r} has the id {ids.max()}, but the model's vocabulary ends at "
                f"{self._vocab - 1}; the tokenizer is another model's"
            )
        return Row(ids=ids, types=np.array(encoding.type_ids, np.int64), encoding=encoding if self._spans else None)


def check_text(text: object, *, where: str) -> str:
    """The text as valid Unicode. Bytes must be UTF-8. Raises InputError that says where it is not."""
    if isinstance(text, bytes):
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{where}: is not UTF-8 (byte {error.start}); decode it with the right encoding"
            ) from error
    if not isinstance(text, str):
        raise InputError(f"{where}: expected text, got {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"{where}: is no valid Unicode (half of a character pair at character {error.start}); "
                "read it with the right encoding"
            ) from error
    return text
