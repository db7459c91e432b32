"""Constants of the predictor that its fit cannot tell, each with where it comes from: ``assumptions.json``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeds.errors import SpecError
from edgeds.files import read_json
from edgeds.specs import from_json

DATA = Path(__file__).parent / "assumptions.json"


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A value and its source in words. Units are in the names."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The table as it is stored."""

    schema: int
    values: Mapping[str, Assumption]


@functools.cache
def load_assumptions() -> Mapping[str, Assumption]:
    """Name -> value and source. Raises SpecError for a damaged installation."""
    table = from_json(Assumptions, read_json(DATA), where=DATA.name)
    if table.schema != 1:
        raise SpecError(f"{DATA}: schema {table.schema} is not 1; reinstall edgeds")
    return table.values


@functools.cache
def assumed(name: str) -> float:
    """The value of one assumption."""
    return load_assumptions()[name].value


def explain(name: str) -> str:
    """``name value (source)`` for the notes of a prediction."""
    found = load_assumptions()[name]
    return f"assumed {name} {found.value:g} ({found.source})"
