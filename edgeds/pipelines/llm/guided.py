"""Guided decoding: only tokens whose text can still become JSON of a schema, or a match of an expression.

The grammar work is done by ``llguidance``, a small Rust library without dependencies; this module says its errors in
one sentence and turns its masks into numpy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeds.engines.base import Array
from edgeds.errors import InputError, MissingDependency, ModelError, SpecError
from edgeds.pipelines.llm.options import SamplingOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# One way to write JSON, Python's: free white space lets small models fill their tokens with blanks. A schema may say
# otherwise in its own "x-guidance".
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Guide:
    """Makes the constraints of one tokenizer's requests; any thread. The first takes about a second, to index tokens.

    ``token_count`` is the length of the masks, ``eos_tokens`` end a text whose grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, token_count: int, eos_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._token_count = token_count
        self._eos_tokens = tuple(eos_tokens)
        self._lock = threading.Lock()
        self._index: Any = None

    def constraint(self, options: SamplingOptions) -> GrammarConstraint | None:
        """A fresh constraint for one request; None when it asked for none.

        Raises SpecError for a schema or an expression that is malformed or not supported, ModelError for a model
        without end tokens, MissingDependency without the package ``llguidance``.
        """
        if not options.is_guided:
            return None
        library = import_llguidance()
        index = self._token_index(library)
        name, grammar = _grammar(library, options)
        limits = library.LLParserLimits(verbose_errors=False)
        failed, notes = library.LLMatcher.validate_grammar_with_warnings(grammar, index, limits=limits)
        if failed:
            raise SpecError(f"{name}: {_one_line(notes[0])}")
        matcher = library.LLMatcher(index, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise SpecError(f"{name}: {_one_line(matcher.get_error())}")
        return GrammarConstraint(matcher, name=name, eos_tokens=self._eos_tokens)

    def _token_index(self, library: ModuleType) -> Any:
        with self._lock:
            if self._index is None:
                if not self._eos_tokens:
                    raise ModelError(
                        "guided decoding needs a model with an end token (generation_config.json: eos_token_id)"
                    )
                try:
                    self._index = library.LLTokenizer(
                        self._tokenizer.to_str(), n_vocab=self._token_count, eos_token=list(self._eos_tokens)
                    )
                except ValueError as error:
                    raise ModelError(
                        f"guided decoding does not know this tokenizer: {_one_line(str(error))}"
                    ) from error
            return self._index


class GrammarConstraint:
    """One request's place in its grammar; a ``sampling.Constraint``. Not for several threads at once."""

    def __init__(self, matcher: Any, *, name: str, eos_tokens: Sequence[int]) -> None:
        self._matcher = matcher
        self._name = name
        self._eos_tokens = frozenset(eos_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether the text so far fits as it is, so that it may end here."""
        return bool(self._matcher.is_accepting())

    def allowed(self, extra_tokens: Sequence[int] = ()) -> Array:
        """Bool [tokens]: what may come next, as if ``extra_tokens`` had been taken as well.

        All False after extra tokens that the grammar does not allow. Raises InputError for a grammar that grows beyond
        the library's limits on the way.
        """
        extra = [token for token in extra_tokens if token not in self._eos_tokens]
        taken = self._matcher.try_consume_tokens(extra) if extra else 0
        try:
            mask = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        finally:
            if taken:
                self._matcher.rollback(taken)
        self._must_work()
        return mask if taken == len(extra) else np.zeros_like(mask)

    def advance(self, token: int) -> None:
        """Take a token. Raises InputError when the grammar does not allow it here."""
        if token in self._eos_tokens and self.is_complete:
            return
        if not self._matcher.consume_token(token):
            raise InputError(f"{self._name}: token {token} does not fit the grammar at this place")

    def _must_work(self) -> None:
        if self._matcher.is_error():
            raise InputError(f"{self._name}: {_one_line(self._matcher.get_error())}")


def import_llguidance() -> ModuleType:
    """The llguidance module, or MissingDependency that names the extra."""
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependency("llguidance", extra="llm", purpose="guided decoding", cause=error) from error
    return llguidance


def _grammar(library: ModuleType, options: SamplingOptions) -> tuple[str, str]:
    if options.regex is not None:
        return "regex", library.LLMatcher.grammar_from_regex(options.regex)
    try:
        return "json_schema", library.LLMatcher.grammar_from_json_schema(options.schema_text(), defaults=_JSON_STYLE)
    except ValueError as error:
        raise SpecError(f"json_schema: {_one_line(str(error))}") from error


def _one_line(message: str) -> str:
    """The library's message without its picture of the place or the state it was in."""
    words = " ".join(message.split("\n<state>")[0].split())
    return words if len(words) <= 300 else words[:297] + "..."
