"""Compare what two engines give for the same inputs: any two backends, precisions or versions of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgeds.difference import Difference, Tolerance
from edgeds.engines.base import Engine
from edgeds.errors import SpecError
from edgeds.progress import track
from edgeds.specs import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]
Feeds = Mapping[str, Array]

DEFAULT_TOLERANCE = Tolerance(relative=0.01)
"""One part in a hundred of an output's largest magnitude, when the caller states none."""

_SCORE_NAMES = re.compile(r"logit|score|prob|softmax|class", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class OutputDifference:
    """One output of A beside its counterpart in B. Figures are None where ``problem`` says why there are none."""

    name: str
    other: str
    dtype_a: str
    dtype_b: str
    shape: tuple[int, ...] | None
    ok: bool
    max_abs: float | None
    mean_abs: float | None
    rel: float | None
    cosine: float | None
    sqnr_db: float | None
    argmax_agreement: float | None
    """Share of rows (last axis) with the same largest element; only for outputs that look like class scores."""
    nan_a: int
    nan_b: int
    non_finite_mismatch: int
    non_finite_positions: tuple[tuple[int, ...], ...]
    worst_sample: int | None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompareReport:
    """``ok``: every output of either side has a counterpart and keeps the tolerance. ``outputs`` by A's names."""

    ok: bool
    outputs: dict[str, OutputDifference]
    samples: int
    tolerance: Tolerance
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Pair:
    name: str
    other: str
    difference: Difference = field(default_factory=Difference)
    dtypes: tuple[str, str] = ("", "")
    shape: tuple[int, ...] | None = None
    rows: int = 0
    same_rows: int = 0


def compare_engines(
    a: Engine,
    b: Engine,
    feeds: Iterable[Feeds],
    *,
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    quiet: bool = False,
) -> CompareReport:
    """Run both engines on every feed; A is the reference. One sample's outputs are in memory at a time.

    Float feeds are converted to the width (float16, float32) that an engine takes. Outputs are matched by name, or by
    position where no name is shared. Raises SpecError when the inputs do not match or there is no feed, InputError for
    feeds that do not fit.
    """
    notes = check_inputs(a, b)
    pairs, only_a, only_b, more = _match_outputs(a, b)
    notes += more
    count = 0
    for sample in track(feeds, what="comparing", unit="sample", quiet=quiet):
        want, got = a.infer(fit_feeds(a.inputs, sample)), b.infer(fit_feeds(b.inputs, sample))
        for pair in pairs:
            _add(pair, want[pair.name], got[pair.other])
        count += 1
    if not count:
        raise SpecError("there is no sample to compare on; give --data PATH or --samples N")
    outputs = {pair.name: _judge(pair, tolerance) for pair in pairs}
    notes += [
        f"output {item.name!r} is {item.dtype_a} in A and {item.dtype_b} in B; compared as float64"
        for item in outputs.values()
        if item.dtype_a != item.dtype_b
    ]
    ok = all(item.ok for item in outputs.values()) and not only_a and not only_b
    return CompareReport(
        ok=ok,
        outputs=outputs,
        samples=count,
        tolerance=tolerance,
        only_a=only_a,
        only_b=only_b,
        notes=tuple(notes),
    )


def check_inputs(a: Engine, b: Engine) -> list[str]:
    """Refuse engines that cannot take the same feeds, in one sentence; notes on types that are converted."""
    mine, theirs = {spec.name: spec for spec in a.inputs}, {spec.name: spec for spec in b.inputs}
    if set(mine) != set(theirs):
        raise SpecError(
            f"A and B cannot be compared: A takes {', '.join(sorted(mine)) or 'nothing'}, "
            f"B takes {', '.join(sorted(theirs)) or 'nothing'}; give two forms of one model"
        )
    notes = []
    for name, spec in mine.items():
        other = theirs[name]
        kinds = spec.np_dtype.kind, other.np_dtype.kind
        if len(spec.shape) != len(other.shape) or any(
            isinstance(p, int) and isinstance(q, int) and p != q for p, q in zip(spec.shape, other.shape, strict=True)
        ):
            raise SpecError(f"A and B cannot be compared: input {name!r} is {spec} in A and {other} in B")
        if spec.dtype != other.dtype:
            if kinds[0] != kinds[1] and not set(kinds) <= {"i", "u"}:
                raise SpecError(f"A and B cannot be compared: input {name!r} is {spec.dtype} in A, {other.dtype} in B")
            notes.append(f"input {name!r} is {spec.dtype} in A and {other.dtype} in B; each gets its own")
    return notes


def fit_feeds(inputs: Sequence[TensorSpec], feeds: Feeds) -> dict[str, Array]:
    """The feeds that these inputs need, converted between widths of one kind (float16 and float32, int32 and int64).

    Raises SpecError for integers that do not fit.
    """
    fitted: dict[str, Array] = {}
    for spec in inputs:
        array = feeds.get(spec.name)
        if array is None:
            continue  # the engine names what is missing
        kinds = {array.dtype.kind, spec.np_dtype.kind}
        if array.dtype != spec.np_dtype and (kinds == {"f"} or kinds <= {"i", "u"}):
            with np.errstate(over="ignore"):  # what overflows float16 becomes infinity and shows in the outputs
                converted = array.astype(spec.np_dtype)
            if "f" not in kinds and not np.array_equal(converted, array):
                raise SpecError(f"input {spec.name!r}: the sample holds values that do not fit {spec.dtype}")
            array = converted
        fitted[spec.name] = array
    return fitted


def _match_outputs(a: Engine, b: Engine) -> tuple[list[_Pair], tuple[str, ...], tuple[str, ...], list[str]]:
    mine, theirs = [spec.name for spec in a.outputs], [spec.name for spec in b.outputs]
    shared = [name for name in mine if name in theirs]
    if not shared and len(mine) == len(theirs):
        listed = ", ".join(f"{p!r} with {q!r}" for p, q in zip(mine, theirs, strict=True))
        pairs = [_Pair(p, q) for p, q in zip(mine, theirs, strict=True)]
        return pairs, (), (), [f"no output name is shared, so outputs are compared by position: {listed}"]
    only_a, only_b = tuple(n for n in mine if n not in shared), tuple(n for n in theirs if n not in shared)
    notes = [f"output {name!r} is only in A" for name in only_a] + [f"output {name!r} is only in B" for name in only_b]
    if not shared:
        raise SpecError(
            f"A and B cannot be compared: A gives {', '.join(mine)}, B gives {', '.join(theirs)}; "
            "they share no output name and differ in number"
        )
    return [_Pair(name, name) for name in shared], only_a, only_b, notes


def _add(pair: _Pair, want: Array, got: Array) -> None:
    pair.dtypes = (want.dtype.name, got.dtype.name)
    pair.shape = tuple(want.shape)
    pair.difference.add(want, got)
    if want.shape == got.shape and _looks_like_scores(pair.name, want):
        best_a, best_b = np.nan_to_num(want).argmax(axis=-1), np.nan_to_num(got).argmax(axis=-1)
        pair.rows += best_a.size
        pair.same_rows += int((best_a == best_b).sum())


def _looks_like_scores(name: str, array: Array) -> bool:
    """Class scores along the last axis: [N, classes], a telling name, or rows that sum to one."""
    if array.dtype.kind != "f" or array.ndim < 2 or array.shape[-1] < 2 or not array.size:
        return False
    if array.ndim == 2 or _SCORE_NAMES.search(name):
        return True
    with np.errstate(all="ignore"):
        return bool(array.min() >= 0 and np.allclose(array.sum(axis=-1, dtype=np.float64), 1.0, atol=1e-2))


def _judge(pair: _Pair, tolerance: Tolerance) -> OutputDifference:
    found = pair.difference
    known = found.problem is None
    return OutputDifference(
        name=pair.name,
        other=pair.other,
        dtype_a=pair.dtypes[0],
        dtype_b=pair.dtypes[1],
        shape=pair.shape,
        ok=tolerance.allows(found),
        max_abs=found.max_abs if known else None,
        mean_abs=found.mean_abs if known else None,
        rel=found.relative if known else None,
        cosine=found.cosine if known else None,
        sqnr_db=found.sqnr_db if known else None,
        argmax_agreement=pair.same_rows / pair.rows if known and pair.rows else None,
        nan_a=found.nan_want,
        nan_b=found.nan_got,
        non_finite_mismatch=found.non_finite_mismatch,
        non_finite_positions=tuple(found.positions),
        worst_sample=found.worst_sample,
        problem=found.problem,
    )
