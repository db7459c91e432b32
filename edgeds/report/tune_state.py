"""What a tuning run has done so far, kept after every step: a killed run goes on where it stopped."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edgeds.bundle.manifest import ENGINES_FOLDER, MANIFEST_NAME
from edgeds.errors import SpecError
from edgeds.files import read_json, sha256_file, write_json
from edgeds.report.tune_device import TuneStep
from edgeds.specs import from_json, to_json

STATE_NAME = "tune.json"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class TuneRow:
    """One step that was measured. ``steady``: the last windows agreed. ``throttled``: what held the device back."""

    step: TuneStep
    latency_ms: float
    power_w: float | None
    power_source: str
    temp_c: float | None
    windows: int
    steady: bool
    throttled: tuple[str, ...]
    date: str

    @property
    def usable(self) -> bool:
        """Whether it says what the device does for long: steady and not throttled."""
        return self.steady and not self.throttled

    @property
    def fps(self) -> float:
        return self.step.batch / self.latency_ms * 1e3


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A step that was not measured, and why."""

    step: TuneStep
    reason: str


@dataclass(frozen=True, kw_only=True)
class TuneState:
    """``manifest_sha256`` says which bundle; ``original_mode`` is the mode to go back to, also after a kill."""

    schema: int = SCHEMA
    manifest_sha256: str
    board: str | None
    device: str
    original_mode: str | None
    rows: tuple[TuneRow, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def with_row(self, row: TuneRow) -> TuneState:
        return replace(self, rows=(*self.rows, row))

    def with_skipped(self, step: TuneStep, reason: str) -> TuneState:
        return replace(self, skipped=(*self.skipped, Skipped(step=step, reason=reason)))

    def is_done(self, step: TuneStep) -> bool:
        return step in [row.step for row in self.rows] + [one.step for one in self.skipped]


def state_path(root: Path) -> Path:
    """Where the state of the bundle folder ``root`` lies: beside the engines, which also belong to one device."""
    return root / ENGINES_FOLDER / STATE_NAME


@contextlib.contextmanager
def hold_tuning(root: Path) -> Iterator[None]:
    """Be the only run that tunes this bundle: two would disturb each other's figures and overwrite each other's state.

    A kernel lock, which a killed process loses by itself. Raises SpecError when another process has it, or when the
    bundle cannot be written.
    """
    path = state_path(root).with_name(".tune.lock")
    try:
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise SpecError(f"{path.parent}: cannot be written to: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SpecError(f"{root}: another process is tuning this bundle; wait for it, or end it") from error
        yield
    finally:
        os.close(descriptor)


def open_state(root: Path, *, board: str | None, device: str, mode: str | None, restart: bool) -> TuneState:
    """The state of an earlier run on this device, else a new one.

    Raises SpecError for a state of another bundle or device, or a damaged one, unless ``restart``.
    """
    path = state_path(root)
    fresh = TuneState(manifest_sha256=sha256_file(root / MANIFEST_NAME), board=board, device=device, original_mode=mode)
    if not path.exists():
        return fresh
    if restart:
        # The mode that an interrupted run left behind is not the one to go back to.
        try:
            return replace(fresh, original_mode=_read(path).original_mode)
        except SpecError:
            return fresh
    state = _read(path)
    for what, found, wanted in (
        ("bundle", state.manifest_sha256, fresh.manifest_sha256),
        ("board", state.board, board),
        ("device", state.device, device),
    ):
        if found != wanted:
            raise SpecError(f"{path}: is of another {what}; start anew with --restart")
    return state


def save_state(root: Path, state: TuneState) -> None:
    """Write the state, atomically. Raises SpecError when the bundle cannot be written."""
    path = state_path(root)
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, to_json(state))
    except OSError as error:
        raise SpecError(f"{path}: cannot be written to: {error.strerror or error}") from error


def _read(path: Path) -> TuneState:
    data = read_json(path)
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise SpecError(f"{path}: schema {data.get('schema')!r}, this edgeds reads {SCHEMA}; start anew with --restart")
    return from_json(TuneState, data, where=str(path))
