"""Conversations to prompts, by the template that the model was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from edgeds.errors import InputError, ModelError
from edgeds.pipelines.llm.template_sandbox import TemplateRefused, TemplateTooLong, run_template

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_TEMPLATE_CHARS = 1 << 20
_PYTHON_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What the code of a template can make Python raise beyond Jinja's own errors."""

Message = Mapping[str, Any]


def render_chat(
    messages: Sequence[Message],
    *,
    template: str | None,
    bos: str = "",
    eos: str = "",
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    values: Mapping[str, Any] | None = None,
    now: datetime | None = None,
) -> str:
    """The prompt of a conversation, special tokens included, as text.

    Args:
        messages: ``{"role": ..., "content": ...}`` in order; content is text, a list of ``{"type": "text"}`` parts, or
            None where an assistant's message has ``tool_calls``. Other keys go to the template as they are.
        template: Jinja text; None when the model has none.
        bos: the text of the model's begin token, which templates write themselves; ``eos`` likewise.
        add_generation_prompt: end with what opens the assistant's answer.
        tools: JSON descriptions of functions the model may call.
        values: what else the template may ask for (``enable_thinking`` of Qwen3, ...).
        now: the time ``strftime_now`` tells, the current local time by default.

    Raises InputError for messages that are malformed or that the template refuses, ModelError for a template that is
    missing, broken, or takes more than 5 seconds or 16 Mi characters.
    """
    if not template:
        raise ModelError(
            "the model has no chat template (tokenizer_config.json: chat_template); it is not made for conversations, "
            "so give it a plain prompt (edgeds generate)"
        )
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ModelError(f"chat template: is {len(template)} characters long; at most {MAX_TEMPLATE_CHARS} are taken")
    clock = now or datetime.now()
    context = {
        **(values or {}),
        "messages": check_messages(messages),
        "tools": None if tools is None else list(tools),
        "bos_token": bos,
        "eos_token": eos,
        "add_generation_prompt": add_generation_prompt,
        "strftime_now": clock.strftime,
    }
    return _run(template, context)


def _run(template: str, context: Mapping[str, Any]) -> str:
    import_error = _jinja_errors()
    try:
        return run_template(template, context)
    except TemplateRefused as error:
        raise InputError(f"the model's chat template refuses the messages: {error}") from error
    except TemplateTooLong as error:
        raise ModelError(f"chat template: {error}; use a model from a source you trust") from error
    except import_error as error:
        line = getattr(error, "lineno", None)
        where = f"chat template, line {line}" if line else "chat template"
        raise ModelError(f"{where}: {' '.join(str(error).split())}") from error
    except _PYTHON_ERRORS as error:
        what = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"chat template: cannot be filled in with these messages ({what})") from error


def _jinja_errors() -> type[Exception]:
    try:
        from jinja2 import TemplateError
    except ImportError:
        return TemplateTooLong  # never raised: run_template says first what is missing
    return TemplateError


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain dicts with text contents. Raises InputError that names the first wrong one by position."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InputError(f"messages: expected a list of objects with role and content, got {type(messages).__name__}")
    if not messages:
        raise InputError("messages: the list is empty; give at least one message")
    return [_check_message(message, where=f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: object, *, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{where}: expected an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"{where}: role is {role!r}; expected one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None:
        if role != "assistant" or not message.get("tool_calls"):
            raise InputError(f"{where}: has no content; only an assistant's message with tool_calls may have none")
        return {**message}
    return {**message, "content": content if isinstance(content, str) else _join_parts(content, where=where)}


def _join_parts(content: object, *, where: str) -> str:
    if not isinstance(content, list | tuple):
        raise InputError(f"{where}: content is {type(content).__name__}; expected text or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise InputError(f"{where}: content[{index}] is of type {kind!r}; this model reads text parts only")
        texts.append(text)
    return "".join(texts)


def pick_template(value: object, *, has_tools: bool = False) -> str | None:
    """The template of ``chat_template`` in a tokenizer_config.json: a text, or several with names; None without any.

    Of several, ``tool_use`` serves requests with tools and ``default`` all others. Raises ModelError for another form.
    """
    if value is None or isinstance(value, str):
        return value or None
    named: dict[object, object] = {}
    if isinstance(value, Mapping):
        named = dict(value)
    elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        named = {item.get("name"): item.get("template") for item in value}
    template = (named.get("tool_use") if has_tools else None) or named.get("default")
    if not isinstance(template, str):
        raise ModelError("tokenizer_config.json: chat_template is neither a text nor templates of which one is default")
    return template
