"""Measured run times per shape and batch size; the batcher asks it how long a batch will take."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeds.errors import SpecError
from edgeds.files import read_json, write_json

SCHEMA = 1


class LatencyTable:
    """Milliseconds by key (one input shape) and rows, smoothed exponentially. Thread-safe, bounded in size.

    The second measurement of a cell replaces a slower first one, since first runs of a shape carry allocations.
    """

    def __init__(self, *, smoothing: float = 0.2, max_keys: int = 256) -> None:
        if not 0 < smoothing <= 1:
            raise SpecError(f"smoothing: expected a number above 0 and up to 1, got {smoothing!r}")
        if max_keys < 1:
            raise SpecError(f"max_keys: expected at least 1, got {max_keys!r}")
        self._smoothing = smoothing
        self._max_keys = max_keys
        # key -> rows -> (smoothed ms, measurements)
        self._cells: OrderedDict[str, dict[int, tuple[float, int]]] = OrderedDict()
        self._lock = threading.Lock()

    def update(self, key: str, *, rows: int, latency_ms: float) -> None:
        """Add one measurement. A value that is not finite or is negative is a SpecError."""
        if rows < 1 or not (math.isfinite(latency_ms) and latency_ms >= 0):
            raise SpecError(
                f"latency of {key!r}, {rows} rows: expected rows >= 1 and a finite time, got {latency_ms!r} ms"
            )
        with self._lock:
            row = self._cells.setdefault(key, {})
            self._cells.move_to_end(key)
            mean, count = row.get(rows, (latency_ms, 0))
            if count == 1 and latency_ms < mean:
                mean = latency_ms
            row[rows] = (mean + self._smoothing * (latency_ms - mean), count + 1)
            while len(self._cells) > self._max_keys:
                self._cells.popitem(last=False)

    def estimate(self, key: str, rows: int) -> float | None:
        """Expected milliseconds, or None for a key never measured.

        Between measured sizes linear; below the smallest that one's time; above the largest in proportion.
        """
        with self._lock:
            row = self._cells.get(key)
            if not row:
                return None
            if rows in row:
                return row[rows][0]
            below = max((size for size in row if size < rows), default=None)
            above = min((size for size in row if size > rows), default=None)
            if below is None:
                return row[above][0] if above is not None else None
            if above is None:
                return row[below][0] * rows / below
            share = (rows - below) / (above - below)
            return row[below][0] + share * (row[above][0] - row[below][0])

    def snapshot(self) -> dict[str, dict[int, float]]:
        """A copy: key -> rows -> milliseconds."""
        with self._lock:
            return {key: {rows: cell[0] for rows, cell in sorted(row.items())} for key, row in self._cells.items()}

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, atomically."""
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "latency_ms": {
                key: {str(rows): value for rows, value in row.items()} for key, row in self.snapshot().items()
            },
        }
        write_json(Path(path), data)

    @classmethod
    def load(cls, path: str | Path) -> LatencyTable:
        """Read a table written by ``save``; anything else is a SpecError that names the file and key."""
        data = read_json(Path(path))
        if (
            not isinstance(data, Mapping)
            or data.get("schema") != SCHEMA
            or not isinstance(data.get("latency_ms"), Mapping)
        ):
            raise SpecError(f"{path}: not a latency table of schema {SCHEMA}; measure again with 'edgeds bench'")
        table = cls()
        for key, row in data["latency_ms"].items():
            if not isinstance(row, Mapping):
                raise SpecError(f"{path}: latency_ms[{key!r}]: expected an object of rows to milliseconds, got {row!r}")
            for rows, value in row.items():
                good = str(rows).isdecimal() and isinstance(value, int | float) and not isinstance(value, bool)
                if not good:
                    raise SpecError(
                        f"{path}: latency_ms[{key!r}][{rows!r}]: expected rows: milliseconds, got {value!r}"
                    )
                table.update(key, rows=int(rows), latency_ms=float(value))
        return table
