"""Runs a chat template that came with a model: untrusted code, so without Python's insides and with limits.

Jinja's immutable sandbox keeps a template from attributes that lead out of it and from changing what it is given. It
does not limit time or memory, which a few lines of template can take without end; here every turn of a loop, every
call and every piece of output is counted, and results that grow too large are refused.
"""

from __future__ import annotations

import contextvars
import functools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from edgeds.errors import MissingDependency

if TYPE_CHECKING:
    import jinja2

MAX_SECONDS = 5.0
MAX_OUTPUT_CHARS = 16 << 20
MAX_INTEGER_BITS = 4096
_WIDE_FORMAT = re.compile(r"%[-+ #0]*\*|\.\*|\d{5,}|\{[^{}]*\{")


class TemplateRefused(Exception):
    """The template itself says no, through ``raise_exception``."""


class TemplateTooLong(Exception):
    """The template runs too long or makes too much."""


@dataclass(kw_only=True)
class _Budget:
    """What one rendering may still take."""

    end_s: float
    chars: int


_BUDGET: contextvars.ContextVar[_Budget | None] = contextvars.ContextVar("edgeds_template_budget", default=None)


def run_template(source: str, values: Mapping[str, Any]) -> str:
    """The text ``source`` makes of ``values``.

    Raises:
        TemplateRefused: the template called ``raise_exception``.
        TemplateTooLong: more than 5 seconds, 16 Mi characters, or a value as large.
        jinja2.TemplateError: the template is malformed, or uses what the sandbox forbids.
        MissingDependency: without the package ``jinja2``.

    Whatever else a template can make Python raise (TypeError, KeyError, ...) comes as it is.
    """
    template = _compile(source)
    token = _BUDGET.set(_Budget(end_s=time.monotonic() + MAX_SECONDS, chars=MAX_OUTPUT_CHARS))
    try:
        out: list[str] = []
        total = 0
        for piece in template.generate(**values):
            _tick()
            total += len(piece)
            _check_length(total)
            out.append(piece)
        return "".join(out)
    finally:
        _BUDGET.reset(token)


def _import_jinja() -> ModuleType:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
        import jinja2.visitor
    except ImportError as error:
        raise MissingDependency("jinja2", extra="llm", purpose="a chat template", cause=error) from error
    return jinja2


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    module = _import_jinja()
    environment = _environment()
    tree = environment.parse(source)
    _add_counting(module, tree)
    code = environment.compile(tree, filename="<chat template>")
    template: jinja2.Template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    return template


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    module = _import_jinja()

    class Bounded(module.sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc, name-defined]
        intercepted_binops = frozenset({"+", "*", "**", "%"})
        tick = staticmethod(lambda: _tick())
        join = staticmethod(lambda *parts: _checked("".join(str(part) for part in parts)))

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            _tick()
            _check_arguments(args, kwargs)
            _check_text_work(getattr(function, "__name__", ""), (getattr(function, "__self__", None), *args))
            return _checked(super().call(context, function, *args, **kwargs))

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is not None:
                _check_text_work("format", (value.__self__,))
            return wrapped

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

    environment = Bounded(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[module.ext.LoopControlExtension, _generation_tag(module)],
        finalize=_spend,
    )
    # Chat templates are written for a tojson that leaves <, > and letters outside ASCII as they are.
    environment.filters["tojson"] = _to_json
    environment.filters.update({name: _bounded(function) for name, function in environment.filters.items()})
    environment.globals["raise_exception"] = _refuse
    return environment


def _generation_tag(module: ModuleType) -> Any:
    """``{% generation %}``, with which some templates mark the assistant's words; the words are all it leaves."""

    class GenerationTag(module.ext.Extension):  # type: ignore[misc, name-defined]
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _add_counting(module: ModuleType, tree: Any) -> None:
    """Count every turn of a loop and every call of a macro; join strings where their length is checked."""
    nodes = module.nodes

    def call(name: str, arguments: list[Any], line: int) -> Any:
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)

    class Counting(module.visitor.NodeTransformer):  # type: ignore[misc, name-defined]
        def _count(self, node: Any) -> Any:
            self.generic_visit(node)
            node.body.insert(0, nodes.ExprStmt(call("tick", [], node.lineno), lineno=node.lineno))
            return node

        visit_For = visit_Macro = visit_CallBlock = _count

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return call("join", node.nodes, node.lineno)

    Counting().visit(tree)
    tree.set_environment(_environment())


def _tick() -> None:
    budget = _BUDGET.get()
    if budget is not None and time.monotonic() > budget.end_s:
        raise TemplateTooLong("it runs too long")


def _spend(value: Any) -> Any:
    """Jinja's ``finalize``: sees every value on its way to the output, also inside blocks that are captured."""
    budget = _BUDGET.get()
    if budget is not None:
        _tick()
        if isinstance(value, str):
            budget.chars -= len(value)
            _check_length(MAX_OUTPUT_CHARS - budget.chars)
    return value


def _check_length(length: int) -> None:
    if length > MAX_OUTPUT_CHARS:
        raise TemplateTooLong(f"it makes more than {MAX_OUTPUT_CHARS >> 20} Mi characters")


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict):
        _check_length(len(value))
    return value


def _check_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """A count or width beyond the limit makes a result beyond it (``ljust``, ``indent``, ``range``, ...)."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _check_length(value)
        elif isinstance(value, list | tuple):  # what a join would make of it
            _check_length(sum(len(item) for item in value if isinstance(item, str)))


def _check_text_work(name: str, values: tuple[Any, ...]) -> None:
    """Replacing and formatting make long texts of short ones; ``values`` holds the text first, then the arguments."""
    texts = [value for value in values if isinstance(value, str)]
    if "replace" in name and len(texts) >= 3:
        _check_length(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
    if "format" in name and texts and _WIDE_FORMAT.search(texts[0]):
        raise TemplateTooLong("it formats with a width that is out of bounds")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_length(len(left) + len(right))
        return
    if operator == "%":
        _check_text_work("format", (left,))
    integers = isinstance(left, int) and isinstance(right, int)
    if operator == "**" and integers and left.bit_length() * max(0, right) > MAX_INTEGER_BITS:
        raise TemplateTooLong("it computes with numbers that are out of bounds")
    if operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(count, int):
                _check_length(len(value) * count)
            elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
                raise TemplateTooLong("it computes with numbers that are out of bounds")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose counts and results are checked; jinja's marks on the function stay."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _tick()
        _check_arguments(args, kwargs)
        _check_text_work(function.__name__, args)
        return _checked(function(*args, **kwargs))

    return run


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object = "") -> None:
    raise TemplateRefused(str(message))
