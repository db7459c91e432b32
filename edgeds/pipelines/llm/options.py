"""What one request may ask of generation; names and meanings as in vLLM and the OpenAI interface."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeds.errors import SpecError

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_GRAMMAR_LENGTH = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """One request's choices. Raises SpecError with the name and value of the first that is out of range.

    ``max_tokens`` tokens generated at most; ``min_tokens`` before that many no end token is chosen and no stop string
    is looked for. ``temperature`` 0 takes the likeliest token, ``top_k`` (0 or -1: off), ``top_p`` and ``min_p`` narrow
    the choice in this order, each on what the one before left. ``repetition_penalty`` divides positive and multiplies
    negative logits of tokens seen in prompt or output (CTRL, arXiv:1909.05858); ``presence_penalty`` and
    ``frequency_penalty`` are subtracted from the logits of generated tokens, once and once per occurrence.

    ``dynamic_temperature`` D works against loops: with r the share of three-token sequences among the last 64
    generated tokens that occurred before among them (1 - distinct / all, at 0 until there are two of them), the
    temperature of the next token is ``temperature + D * r``. A greedy request stays greedy until it repeats itself.

    ``seed`` makes a request reproducible, whatever runs beside it; None draws one. ``logprobs`` asks for the log
    probability of every chosen token and of that many likeliest ones, under the model itself (before penalties and
    filters). ``stop`` strings end the text and are not part of it; ``stop_tokens`` end it as the model's end tokens
    do; ``ignore_eos`` goes on after the model's end tokens. ``json_schema`` (a mapping, or its JSON text) or ``regex``
    allow only text that fits.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    dynamic_temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        _check_whole("max_tokens", self.max_tokens, low=1)
        _check_whole("min_tokens", self.min_tokens, low=0, high=self.max_tokens)
        _check_whole("top_k", self.top_k, low=-1)
        _check_number("temperature", self.temperature, low=0.0)
        _check_number("dynamic_temperature", self.dynamic_temperature, low=0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, above=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_number("repetition_penalty", self.repetition_penalty, low=0.0, above=True)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        if self.seed is not None:
            _check_whole("seed", self.seed, low=0)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise SpecError(f"ignore_eos: expected true or false, got {self.ignore_eos!r}")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_tokens", _stop_tokens(self.stop_tokens))
        self._check_grammar()

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken every time: no randomness, so the seed does not matter."""
        return self.temperature == 0 and self.dynamic_temperature == 0

    @property
    def is_guided(self) -> bool:
        """Only text that fits a schema or an expression is allowed."""
        return self.json_schema is not None or self.regex is not None

    def _check_grammar(self) -> None:
        if self.json_schema is not None and self.regex is not None:
            raise SpecError("json_schema and regex: give one of them, not both")
        if self.is_guided and self.ignore_eos:
            name = "regex" if self.regex is not None else "json_schema"
            raise SpecError(f"ignore_eos: cannot be used with {name}, whose text has an end; leave one of them out")
        if self.regex is not None:
            if not isinstance(self.regex, str) or not self.regex:
                raise SpecError(f"regex: expected a regular expression, got {self.regex!r}")
            _check_length("regex", self.regex)
        if isinstance(self.json_schema, str):
            _check_length("json_schema", self.json_schema)
        elif self.json_schema is not None and not isinstance(self.json_schema, Mapping):
            raise SpecError(f"json_schema: expected an object or its JSON text, got {type(self.json_schema).__name__}")

    def schema_text(self) -> str:
        """The JSON schema as text. Raises SpecError when a mapping holds what JSON cannot say."""
        if isinstance(self.json_schema, str):
            return self.json_schema
        try:
            text = json.dumps(self.json_schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecError(f"json_schema: cannot be written as JSON ({error})") from error
        _check_length("json_schema", text)
        return text


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise SpecError(f"{name}: is {len(text)} characters long; at most {MAX_GRAMMAR_LENGTH} are taken")


def _check_whole(name: str, value: object, *, low: int, high: int | None = None) -> None:
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        raise SpecError(f"{name}: expected a whole number {bounds}, got {value!r}")


def _check_number(name: str, value: object, *, low: float, high: float | None = None, above: bool = False) -> None:
    """``above``: ``low`` itself is not allowed."""
    at_least = f"above {low:g}" if above else f"of at least {low:g}"
    bounds = at_least if high is None else f"{at_least} and at most {high:g}"
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise SpecError(f"{name}: expected a number {bounds}, got {value!r}")
    if value < low or (above and value == low) or (high is not None and value > high):
        raise SpecError(f"{name}: expected a number {bounds}, got {value!r}")


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) and text for text in strings):
        raise SpecError(f"stop: expected strings that are not empty, got {value!r}")
    if len(strings) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in strings):
        raise SpecError(f"stop: at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters are taken")
    return tuple(strings)


def _stop_tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise SpecError(f"stop_tokens: expected token numbers, got {value!r}")
    for token in value:
        _check_whole("stop_tokens", token, low=0)
    return tuple(value)
