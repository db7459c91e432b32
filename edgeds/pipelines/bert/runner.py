"""Rows to the session and back: grouped by length for throughput, or one at a time into length buckets."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from edgeds.engines.base import Array
from edgeds.errors import EngineMismatch
from edgeds.pipelines.bert.embed import pool_states, unit_rows
from edgeds.pipelines.bert.encode import Row
from edgeds.pipelines.bert.feeds import build_feeds, check_inputs
from edgeds.pipelines.bert.head import TextHead
from edgeds.pipelines.bert.lengths import group_rows, pick_length
from edgeds.runtime import Answer, Session


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows under way together: their places among the rows given, and the run's future."""

    places: tuple[int, ...]
    rows: tuple[Row, ...]
    future: Future[Answer]


class RowRunner:
    """Sends token rows through a session that is shared and stays its owner's.

    ``lengths`` are the padded lengths of single requests, which meet there and are batched. Rows that arrive together
    are padded only to the longest of their group where the engine takes any length (``exact``). ``max_tokens`` bounds
    a group's padded tokens.
    """

    def __init__(
        self,
        session: Session,
        head: TextHead,
        *,
        lengths: Sequence[int],
        pad_id: int,
        max_tokens: int,
        exact: bool,
    ) -> None:
        self.session = session
        self.head = head
        self._specs = session.engine.inputs
        fixed = check_inputs(self._specs)
        self.lengths = (fixed,) if fixed is not None else tuple(lengths)
        self._exact = exact and fixed is None
        self._pad_id = pad_id
        self._max_tokens = max_tokens

    def start(self, rows: Sequence[Row]) -> list[Group]:
        """Group ``rows`` by length and submit all groups; waits while the session's queue is full."""
        sizes = [len(row) for row in rows]
        groups = group_rows(sizes, max_tokens=self._max_tokens, max_rows=self.session.policy.max_batch)
        return [self._submit(rows, places) for places in groups]

    def finish(self, groups: Sequence[Group], count: int) -> list[Any]:
        """The values of all ``count`` rows in their order, see ``reduce_outputs``."""
        values: list[Any] = [None] * count
        for group in groups:
            outputs = group.future.result().outputs
            for place, value in zip(group.places, reduce_outputs(outputs, group.rows, self.head), strict=True):
                values[place] = value
        return values

    def submit(self, row: Row, *, priority: int = 0, deadline_ms: float | None = None) -> Future[Answer]:
        """One row, padded to its bucket so that others can join it."""
        feeds = self._feeds([row], pick_length(len(row), self.lengths))
        return self.session.submit(feeds, priority=priority, deadline_ms=deadline_ms)

    def _submit(self, rows: Sequence[Row], places: Sequence[int]) -> Group:
        chosen = tuple(rows[place] for place in places)
        longest = len(chosen[0])
        length = longest if self._exact else pick_length(longest, self.lengths)
        future = self.session.submit(self._feeds(chosen, length))
        return Group(places=tuple(places), rows=chosen, future=future)

    def _feeds(self, rows: Sequence[Row], length: int) -> dict[str, Array]:
        return build_feeds(rows, self._specs, length=length, pad_id=self._pad_id)


def reduce_outputs(outputs: dict[str, Array], rows: Sequence[Row], head: TextHead) -> list[Any]:
    """One value per row: the embedding [hidden], logits [labels], logits [tokens, labels], or (start, end) [tokens]."""
    for name in head.outputs:
        if name not in outputs:
            raise EngineMismatch(f"the model gives {', '.join(outputs)}, not {name!r}, which the bundle's head names")
    first = outputs[head.outputs[0]]
    if head.task == "embed":
        if head.pooling is not None:
            first = pool_states(first, [len(row) for row in rows], pooling=head.pooling)
        return list(unit_rows(first) if head.normalize else first)
    if head.task == "classify":
        return list(first)
    if head.task == "tag":
        return [first[at, : len(row)] for at, row in enumerate(rows)]
    last = outputs[head.outputs[1]]
    return [(first[at, : len(row)], last[at, : len(row)]) for at, row in enumerate(rows)]
