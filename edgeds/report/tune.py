"""Tune a bundle on a board: measure power modes, batches and forms, steadily and not too hot, and keep the results."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeds.errors import DeviceError, EngineMismatch, SpecError
from edgeds.progress import stage
from edgeds.report.stats import utc_now
from edgeds.report.tune_device import TuneDevice, TuneStep, Window
from edgeds.report.tune_state import TuneRow, TuneState, hold_tuning, open_state, save_state

LOGGER = logging.getLogger("edgeds.report")
AGREEING = 3
POLL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """``window_s``: one window; a step is steady when three in a row lie within ``agree_share`` of their mean, and is
    given up after ``max_windows``. ``start_temp_c``: not begun above it, but waited for at most ``cool_limit_s``.
    ``minutes``: no step begins after that. ``gain_share``: a larger batch must give so much more per second, or still
    larger ones are left out. ``latency_limit_ms`` ends a branch of growing batches too."""

    window_s: float = 3.0
    agree_share: float = 0.03
    max_windows: int = 12
    start_temp_c: float = 60.0
    cool_limit_s: float = 300.0
    minutes: float | None = None
    gain_share: float = 0.02
    latency_limit_ms: float | None = None

    def __post_init__(self) -> None:
        if not 0.01 <= self.window_s <= 600 or self.max_windows < AGREEING:
            raise SpecError(f"window {self.window_s} s, {self.max_windows} windows: expected 0.01 to 600 s, at least 3")


@dataclass(frozen=True, kw_only=True)
class TuneOutcome:
    """The state at the end; ``complete`` is False when time ran out or it was interrupted."""

    state: TuneState
    complete: bool
    interrupted: bool
    notes: tuple[str, ...]


def tune(
    steps: Sequence[TuneStep],
    *,
    device: TuneDevice,
    root: Path,
    options: TuneOptions,
    restart: bool = False,
    quiet: bool = False,
) -> TuneOutcome:
    """Measure ``steps`` in their order, except those done before, those that others rule out and those without time.

    State is kept under ``root`` (a bundle folder) after every step. The power mode that the device was in is set again
    at the end, also after Ctrl-C and errors, and by the next run after a kill. Raises SpecError for a state of another
    bundle or device and while another run tunes the bundle, DeviceError when a mode cannot be set.
    """
    with hold_tuning(root):
        return _walk(steps, device=device, root=root, options=options, restart=restart, quiet=quiet)


def _walk(
    steps: Sequence[TuneStep], *, device: TuneDevice, root: Path, options: TuneOptions, restart: bool, quiet: bool
) -> TuneOutcome:
    state = open_state(root, board=device.board, device=device.name, mode=device.mode(), restart=restart)
    save_state(root, state)
    started, notes = device.clock(), list[str]()
    complete = interrupted = False
    with _mode_kept(device, state.original_mode, notes):
        try:
            for index, step in enumerate(steps):
                if state.is_done(step):
                    continue
                if options.minutes is not None and device.clock() - started > options.minutes * 60:
                    notes.append(f"time is up; {len(steps) - index} steps are left: run it again to go on")
                    break
                with stage(f"tuning {index + 1}/{len(steps)}: {step.key}", quiet=quiet):
                    state = _take(step, state, device=device, options=options, notes=notes)
                save_state(root, state)
            else:
                complete = True
        except KeyboardInterrupt:
            interrupted = True
            notes.append("interrupted; what was measured is kept: run it again to go on")
    return TuneOutcome(state=state, complete=complete, interrupted=interrupted, notes=tuple(dict.fromkeys(notes)))


def ruled_out(step: TuneStep, rows: Sequence[TuneRow], options: TuneOptions) -> str | None:
    """Why a step need not be measured: smaller batches in the same mode, form and size already show it."""
    branch = sorted(
        (row for row in rows if row.usable and _branch(row.step) == _branch(step) and row.step.batch < step.batch),
        key=lambda row: row.step.batch,
    )
    if not branch:
        return None
    limit = options.latency_limit_ms
    if limit is not None and branch[-1].latency_ms > limit:
        return f"batch {branch[-1].step.batch} takes {branch[-1].latency_ms:.3g} ms already, over {limit:g} ms"
    if len(branch) > 1 and branch[-1].fps < branch[-2].fps * (1 + options.gain_share):
        last, before = branch[-1], branch[-2]
        return f"batch {last.step.batch} gives {last.fps:.4g} per second, batch {before.step.batch} {before.fps:.4g}"
    return None


def measure_steady(step: TuneStep, *, device: TuneDevice, options: TuneOptions) -> TuneRow:
    """Windows until three in a row agree in latency and power; the mean of those three, else of the last three."""
    windows: list[Window] = []
    steady = False
    while len(windows) < options.max_windows and not steady:
        windows.append(device.measure(step, options.window_s))
        steady = _agree(windows[-AGREEING:], options.agree_share)
    last = windows[-AGREEING:]
    powers = [one.power_w for one in last if one.power_w is not None]
    temperatures = [one.temp_c for one in windows if one.temp_c is not None]
    return TuneRow(
        step=step,
        latency_ms=sum(one.latency_ms for one in last) / len(last),
        power_w=sum(powers) / len(powers) if len(powers) == len(last) else None,
        power_source=last[-1].power_source,
        temp_c=max(temperatures, default=None),
        windows=len(windows),
        steady=steady,
        throttled=tuple(dict.fromkeys(reason for one in last for reason in one.throttled)),
        date=utc_now(),
    )


def _take(step: TuneStep, state: TuneState, *, device: TuneDevice, options: TuneOptions, notes: list[str]) -> TuneState:
    reason = ruled_out(step, state.rows, options)
    if reason is not None:
        return state.with_skipped(step, reason)
    if step.mode is not None and step.mode != device.mode():
        device.set_mode(step.mode)
    if not _cool(device, options):
        notes.append(f"the device did not cool below {options.start_temp_c:g} C in {options.cool_limit_s:g} s")
    try:
        row = measure_steady(step, device=device, options=options)
    except (SpecError, DeviceError, EngineMismatch) as error:
        return state.with_skipped(step, str(error))
    if not row.usable:
        why = f"throttled by {', '.join(row.throttled)}" if row.throttled else "no steady windows"
        LOGGER.warning("%s: %s; measured, but not used for plans", step.key, why)
    return state.with_row(row)


def _cool(device: TuneDevice, options: TuneOptions) -> bool:
    """Wait until the device is cool enough to start; an unknown temperature is not waited for."""
    waited = 0.0
    while True:
        now = device.temperature_c()
        if now is None or now <= options.start_temp_c:
            return True
        if waited >= options.cool_limit_s:
            return False
        device.sleep(POLL_S)
        waited += POLL_S


def _agree(windows: Sequence[Window], share: float) -> bool:
    if len(windows) < AGREEING:
        return False
    read: tuple[Callable[[Window], float | None], ...] = (lambda one: one.latency_ms, lambda one: one.power_w)
    for get in read:
        values = [value for one in windows if (value := get(one)) is not None]
        mean = sum(values) / len(values) if values else 0.0
        if values and max(abs(value - mean) for value in values) > share * mean:
            return False
    return True


def _branch(step: TuneStep) -> tuple[str | None, str, str | None]:
    return step.mode, step.precision, step.size


@contextlib.contextmanager
def _mode_kept(device: TuneDevice, original: str | None, notes: list[str]) -> Iterator[None]:
    try:
        yield
    finally:
        if device.can_set_mode and original is not None and device.mode() != original:
            try:
                device.set_mode(original)
            except DeviceError as error:
                notes.append(f"the device is still in {device.mode()}: {error}")
                LOGGER.warning("the power mode could not be set back to %s: %s", original, error)
