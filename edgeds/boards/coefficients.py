"""The fitted table that ships with edgeds: coefficients of time and power, and how wrong they were on left-out data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeds.boards.roofline import Coefficients
from edgeds.errors import SpecError
from edgeds.files import read_json
from edgeds.specs import from_json

DATA = Path(__file__).parent / "coefficients.json"


@dataclass(frozen=True, kw_only=True)
class PowerCoefficients:
    """Watts at the module's input.

    ``static_w`` plus ``memory_static_w`` per 100 GB/s of the mode's peak; ``gpu_w`` per SM and GHz at the voltage of
    1.3 GHz; ``dram_w`` per 100 GB/s really moved.
    """

    static_w: float
    memory_static_w: float
    gpu_w: float
    dram_w: float


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Factors that 80 % of left-out measurements lie between: measured / predicted."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Table:
    """One version of the fit. ``report`` is what the fit printed: figures on sources it had not seen."""

    schema: int
    version: str
    time: Coefficients
    llm: Coefficients
    power: PowerCoefficients
    intervals: Mapping[str, Interval]
    report: Mapping[str, float]


@functools.cache
def load_table(path: Path = DATA) -> Table:
    """Read the table. Raises SpecError for a damaged installation."""
    table = from_json(Table, read_json(path), where=path.name)
    if table.schema != 1:
        raise SpecError(f"{path}: schema {table.schema} is not 1; reinstall edgeds")
    return table
