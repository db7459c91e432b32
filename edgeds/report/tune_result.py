"""From a tuning run to what plans use: measurements in the bundle, factors for this board, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgeds.boards.catalogue import load_catalogue
from edgeds.boards.cost_file import ModelWork
from edgeds.boards.plan_choice import resize_to
from edgeds.boards.plan_file import MEASURED_NAME
from edgeds.boards.plan_spec import BoardScale, Measured
from edgeds.boards.predictor import predict
from edgeds.boards.refit import SCALE_NAME, fit_scale
from edgeds.boards.spec import BoardSpec, PowerMode
from edgeds.boards.targets import find_mode
from edgeds.bundle.manifest import ENGINES_FOLDER
from edgeds.errors import SpecError
from edgeds.files import write_json
from edgeds.report.stats import utc_now
from edgeds.report.tune_device import TuneStep
from edgeds.report.tune_state import TuneRow, TuneState
from edgeds.specs import Resolution, to_json


def store_measured(root: Path, state: TuneState) -> tuple[Measured, ...]:
    """Write the usable rows as ``engines/measured.json``; returns them. Rows without a known mode are kept as ``?``."""
    rows = tuple(_measured(row, state) for row in state.rows if row.usable)
    write_json(root / ENGINES_FOLDER / MEASURED_NAME, to_json(rows))
    return rows


def store_scale(root: Path, state: TuneState, *, work: ModelWork) -> BoardScale | None:
    """Compare the rows with predictions and store the factors for this board; None when it is not in the catalogue."""
    board = _board(state.board)
    if board is None:
        return None
    latencies, powers = [], []
    for row in state.rows:
        mode = find_mode(row.step.mode or state.original_mode or "", board.modes)
        if mode is None or not row.usable:
            continue
        predicted = predict_step(work, row.step, board=board, mode=mode)
        if predicted is not None:
            latencies.append((row.latency_ms, predicted[0]))
            if row.power_w is not None:
                powers.append((row.power_w, predicted[1]))
    scale = fit_scale(board.name, latencies=latencies, powers=powers, date=utc_now())
    if scale is not None:
        write_json(root / ENGINES_FOLDER / SCALE_NAME, to_json(scale))
    return scale


def predict_step(work: ModelWork, step: TuneStep, *, board: BoardSpec, mode: PowerMode) -> tuple[float, float] | None:
    """(ms, watts) that are predicted for a step; None when a fact of the board is unknown."""
    try:
        sized = resize_to(work, Resolution.parse(step.size)) if step.size is not None else work
        found = predict(sized, board=board, mode=mode, precision=step.precision, batch=step.batch)
    except SpecError:
        return None
    return found.latency_ms, found.power_w


def order_steps(steps: Sequence[TuneStep], *, work: ModelWork | None, board: str | None) -> list[TuneStep]:
    """Modes stay together (switching is slow), forms with the least predicted time per frame first, batches growing."""
    spec = _board(board)

    def time_of(step: TuneStep) -> float:
        mode = find_mode(step.mode or "", spec.modes) if spec is not None else None
        if work is None or spec is None or mode is None:
            return 0.0
        found = predict_step(
            work, TuneStep(mode=step.mode, precision=step.precision, size=step.size, batch=1), board=spec, mode=mode
        )
        return found[0] if found is not None else 0.0

    modes = list(dict.fromkeys(step.mode for step in steps))
    return sorted(
        steps, key=lambda step: (modes.index(step.mode), time_of(step), step.precision, step.size or "", step.batch)
    )


def best_rows(rows: Sequence[TuneRow]) -> dict[str, TuneRow | None]:
    """The best usable row by each objective; None where nothing tells (no power, no rows)."""
    usable = [row for row in rows if row.usable]
    powered = [(row, row.power_w) for row in usable if row.power_w is not None]
    return {
        "fps": max(usable, key=lambda row: row.fps, default=None),
        "latency": min(usable, key=lambda row: row.latency_ms, default=None),
        "fps_per_watt": max(powered, key=lambda pair: pair[0].fps / pair[1], default=(None, 0.0))[0],
    }


def _measured(row: TuneRow, state: TuneState) -> Measured:
    return Measured(
        board=state.board or state.device,
        mode=row.step.mode or state.original_mode or "?",
        variant=row.step.precision,
        precision=row.step.precision,
        batch=row.step.batch,
        size=row.step.size,
        latency_ms=row.latency_ms,
        power_w=row.power_w,
        date=row.date,
        device=state.device,
    )


def _board(name: str | None) -> BoardSpec | None:
    return load_catalogue().find(name) if name is not None else None
