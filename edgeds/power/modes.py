"""Switch the power mode of this machine: first what it would do, then, only when asked, with sudo."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgeds.boards.catalogue import Catalogue
from edgeds.boards.nvpmodel import Run, run_command
from edgeds.boards.probe import probe_machine
from edgeds.boards.spec import PowerMode
from edgeds.boards.targets import find_mode
from edgeds.errors import DeviceError, SpecError

SWITCH_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ModeChange:
    """A planned switch. Nothing has happened yet. ``command`` is None when the machine is in that mode already."""

    mode: PowerMode
    current: str | None
    command: tuple[str, ...] | None
    needs_reboot: bool | None
    notes: tuple[str, ...]

    @property
    def summary(self) -> str:
        if self.command is None:
            return f"this machine is in {self.mode.label} already"
        return f"from {self.current or 'an unknown mode'} to {self.mode.label}: {shlex.join(self.command)}"


def plan_mode_change(
    name: str, *, root: Path = Path("/"), catalogue: Catalogue | None = None, run: Run | None = None
) -> ModeChange:
    """What a switch to mode ``name`` would run and mean. Changes nothing.

    Raises SpecError for an unknown mode, DeviceError when this is no Jetson or its modes cannot be read.
    """
    probe = probe_machine(root=root, catalogue=catalogue, run=run)
    if probe.kind != "jetson" or probe.board is None:
        raise DeviceError("power modes are switched with nvpmodel, which only a Jetson has; this machine is none")
    if not (root / "etc/nvpmodel.conf").exists():
        raise DeviceError("this Jetson has no /etc/nvpmodel.conf, so its power modes are unknown")
    mode = find_mode(name, probe.board.modes)
    if mode is None or mode.id is None:
        labels = ", ".join(one.label for one in probe.board.modes)
        raise SpecError(f"power mode {name!r}: this machine has {labels}")
    current = probe.current_mode
    reading = probe.mode.name if probe.mode else None
    if current is not None and current.id == mode.id:
        return ModeChange(mode=mode, current=current.name, command=None, needs_reboot=False, notes=probe.notes)
    live = probe.live.tpc_pg_mask
    needs_reboot = None if live is None or mode.tpc_pg_mask is None else live != mode.tpc_pg_mask
    notes = [*probe.notes, "jetson_clocks, if it was on, is undone by the switch"]
    if needs_reboot is None:
        notes.append("whether a reboot is needed cannot be told: the GPU units of one of the modes are unknown")
    elif needs_reboot:
        notes.append(
            f"the GPU units differ (mask {live} to {mode.tpc_pg_mask}): nvpmodel asks for a reboot, and until then the "
            "old mode stays"
        )
    return ModeChange(
        mode=mode,
        current=current.name if current else reading,
        command=("sudo", "-n", "nvpmodel", "-m", str(mode.id)),
        needs_reboot=needs_reboot,
        notes=tuple(notes),
    )


def apply_mode_change(
    change: ModeChange,
    *,
    root: Path = Path("/"),
    catalogue: Catalogue | None = None,
    run: Run = run_command,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run the planned command and look whether the machine is in the mode then.

    nvpmodel's question about a reboot is answered by the end of its input, so it never reboots by itself here.
    Raises DeviceError with what nvpmodel said, or when the mode did not change.
    """
    if change.command is None:
        return
    code, output = run(list(change.command), SWITCH_TIMEOUT_S)
    said = " ".join(output.split())[:200]
    if code:
        hint = "; run it yourself, since sudo wants a password" if "password" in said else ""
        raise DeviceError(f"{shlex.join(change.command)} failed (exit {code}): {said or 'no message'}{hint}")
    for wait_s in (0.0, 0.5, 1.5):
        sleep(wait_s)
        now = probe_machine(root=root, catalogue=catalogue, run=run)
        if now.current_mode is not None and now.current_mode.id == change.mode.id:
            return
    reason = "it needs a reboot" if change.needs_reboot else said or "no message"
    raise DeviceError(f"nvpmodel ended well but the machine is not in {change.mode.label}: {reason}")
