"""The text of one request as its tokens come, and the true reason why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeds.errors import SpecError
from edgeds.pipelines.llm.detokenize import Detokenizer, TokenTable
from edgeds.pipelines.llm.options import SamplingOptions
from edgeds.pipelines.llm.stops import StopStrings

FINISH_REASONS = ("stop", "length", "cancelled", "error")


@dataclass(frozen=True, kw_only=True)
class Delta:
    """New text, and once the request is over its reason; ``stop`` is the end token or stop string that ended it."""

    text: str
    finish_reason: str | None = None
    stop: int | str | None = None


class TextOutput:
    """Turns one request's tokens into text. The texts of all its deltas, put together, are the answer.

    The reason is ``stop`` when an end token or a stop string ended the text, also when that was its last allowed
    token; ``length`` when ``max_tokens`` did; ``cancelled`` and ``error`` when ``end`` says so. Whatever the reason,
    text that was held back goes out, an unfinished character as U+FFFD, and nothing of a stop string ever does.
    """

    def __init__(self, options: SamplingOptions, *, table: TokenTable, eos_tokens: Sequence[int]) -> None:
        self._options = options
        self._ends = frozenset((*(() if options.ignore_eos else eos_tokens), *options.stop_tokens))
        self._stream = Detokenizer(table)
        self._stops = StopStrings(options.stop)
        self.tokens = 0
        self.finish_reason: str | None = None

    def accept(self, token: int) -> Delta:
        """Take the next generated token. Raises SpecError after the end, InputError for a number that is no token."""
        self._must_be_open()
        if token in self._ends:
            self.tokens += 1
            return self._close("stop", stop=token)
        piece = self._stream.push(token)
        self.tokens += 1
        text, found = self._stops.push(piece, enabled=self.tokens >= self._options.min_tokens)
        if found is not None:
            self.finish_reason = "stop"
            return Delta(text=text, finish_reason="stop", stop=found)
        if self.tokens >= self._options.max_tokens:
            return self._close("length", before=text)
        return Delta(text=text)

    def end(self, reason: str) -> Delta:
        """End the text from outside (``cancelled``, ``error``, or ``length`` when the context is full)."""
        self._must_be_open()
        if reason not in FINISH_REASONS:
            raise SpecError(f"finish reason {reason!r}: expected one of {', '.join(FINISH_REASONS)}")
        return self._close(reason)

    def _close(self, reason: str, *, before: str = "", stop: int | None = None) -> Delta:
        text, found = self._stops.push(self._stream.flush())
        text = before + text
        if found is None:
            text += self._stops.flush()
        elif reason == "length":  # a stop string that holds U+FFFD
            reason = "stop"
        self.finish_reason = reason
        return Delta(text=text, finish_reason=reason, stop=stop if found is None else found)

    def _must_be_open(self) -> None:
        if self.finish_reason is not None:
            raise SpecError(f"the request ended ({self.finish_reason}); it takes no more tokens")
