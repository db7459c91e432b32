"""Single values out of JSON that other commands wrote: the right kind, None where absent, or a clear error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeds.errors import SpecError
from edgeds.report.record import Status

Document = Mapping[str, Any]


def number_at(data: Document, *names: str, where: str) -> float | None:
    """The first of the keys that is there, as a number not below 0."""
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"{where}.{name}: expected a number, got {value!r:.80}")
        if value < 0:
            raise SpecError(f"{where}.{name}: {value:g} cannot have been measured; it must not be below 0")
        return float(value)
    return None


def whole_at(data: Document, *names: str, where: str) -> int | None:
    """As ``number_at``, a whole number."""
    value = number_at(data, *names, where=where)
    if value is None:
        return None
    if value != int(value):
        raise SpecError(f"{where}.{names[0]}: expected a whole number, got {value:g}")
    return int(value)


def text_at(data: Document, *names: str, where: str) -> str | None:
    """The first of the keys that is there, as text."""
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise SpecError(f"{where}.{name}: expected text, got {value!r:.80}")
        return value
    return None


def list_at(data: Document, name: str, *, where: str) -> list[Any]:
    """A list, empty where absent."""
    value = data.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise SpecError(f"{where}.{name}: expected a list, got {value!r:.80}")
    return value


def object_at(data: Document, name: str, *, where: str) -> Document:
    """An object, empty where absent."""
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}.{name}: expected an object, got {value!r:.80}")
    return value


def texts_at(data: Document, name: str, *, where: str) -> tuple[str, ...]:
    """A list of texts, empty where absent."""
    return tuple(str(item) for item in list_at(data, name, where=where))


def status_at(data: Document, *, where: str, default: Status) -> Status:
    """``measured`` or ``predicted``."""
    value = data.get("status", default)
    if value not in ("measured", "predicted"):
        raise SpecError(f"{where}.status: expected measured or predicted, got {value!r:.80}")
    return "predicted" if value == "predicted" else "measured"
