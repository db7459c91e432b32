"""Switching the power mode: a plan changes nothing, applying checks that it worked, reasons are plain."""

from pathlib import Path

import pytest
from power_tree import write

from edgeds.errors import DeviceError, SpecError
from edgeds.power import apply_mode_change, plan_mode_change

CONF = """
< PARAM TYPE=FILE NAME=TPC_POWER_GATING >
TPC_PG_MASK /sys/devices/gpu.0/tpc_pg_mask
< POWER_MODEL ID=0 NAME=MAXN >
TPC_POWER_GATING TPC_PG_MASK 240
GPU MAX_FREQ -1
< POWER_MODEL ID=1 NAME=10W >
TPC_POWER_GATING TPC_PG_MASK 252
GPU MAX_FREQ 612000000
< POWER_MODEL ID=2 NAME=15W >
TPC_POWER_GATING TPC_PG_MASK 252
GPU MAX_FREQ 612000000
< PM_CONFIG DEFAULT=2 >
"""


class Board:
    """A Jetson whose nvpmodel writes the status file, or fails as told."""

    def __init__(self, root: Path, *, code: int = 0, output: str = "", obeys: bool = True) -> None:
        self.root, self.code, self.output, self.obeys = root, code, output, obeys
        self.commands: list[list[str]] = []
        write(root, "proc/device-tree/compatible", "nvidia,p3768-0000+p3767-0000\0nvidia,tegra234\0")
        write(root, "etc/nvpmodel.conf", CONF)
        write(root, "var/lib/nvpmodel/status", "pmode:0002")
        write(root, "sys/devices/platform/gpu.0/tpc_pg_mask", "252")

    def run(self, command: list[str], timeout_s: float) -> tuple[int, str]:
        if command[:3] == ["sudo", "-n", "nvpmodel"]:
            self.commands.append(command)
            if self.obeys and not self.code:
                write(self.root, "var/lib/nvpmodel/status", f"pmode:{int(command[4]):04d}")
            return self.code, self.output
        return 127, ""


def test_a_plan_names_the_command_and_changes_nothing(tmp_path: Path) -> None:
    board = Board(tmp_path)
    change = plan_mode_change("10w", root=tmp_path, run=board.run)
    assert change.summary == "from 15W to 10W: sudo -n nvpmodel -m 1"
    assert change.needs_reboot is False
    assert board.commands == []
    assert (tmp_path / "var/lib/nvpmodel/status").read_text() == "pmode:0002\n"


def test_other_gpu_units_need_a_reboot(tmp_path: Path) -> None:
    change = plan_mode_change("MAXN", root=tmp_path, run=Board(tmp_path).run)
    assert change.needs_reboot is True
    assert any("reboot" in note for note in change.notes)
    (tmp_path / "sys/devices/platform/gpu.0/tpc_pg_mask").unlink()
    assert plan_mode_change("MAXN", root=tmp_path, run=Board(tmp_path).run).needs_reboot is True
    (tmp_path / "sys/devices/platform/gpu.0/tpc_pg_mask").unlink()
    assert plan_mode_change("MAXN", root=tmp_path).needs_reboot is None


def test_applying_switches_and_looks_again(tmp_path: Path) -> None:
    board = Board(tmp_path)
    change = plan_mode_change("10W", root=tmp_path, run=board.run)
    apply_mode_change(change, root=tmp_path, run=board.run, sleep=lambda s: None)
    assert board.commands == [["sudo", "-n", "nvpmodel", "-m", "1"]]
    same = plan_mode_change("10W", root=tmp_path, run=board.run)
    assert same.command is None
    assert "already" in same.summary
    apply_mode_change(same, root=tmp_path, run=board.run)
    assert len(board.commands) == 1


@pytest.mark.parametrize(
    ("code", "output", "obeys", "message"),
    [
        (1, "sudo: a password is required", True, "wants a password"),
        (127, "no such file", True, "exit 127"),
        (0, "NVPM WARN: Reboot required", False, "not in 10W"),
    ],
)
def test_a_switch_that_does_not_happen_is_an_error(
    tmp_path: Path, code: int, output: str, obeys: bool, message: str
) -> None:
    board = Board(tmp_path, code=code, output=output, obeys=obeys)
    change = plan_mode_change("10W", root=tmp_path, run=board.run)
    with pytest.raises(DeviceError, match=message):
        apply_mode_change(change, root=tmp_path, run=board.run, sleep=lambda s: None)


def test_what_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="only a Jetson"):
        plan_mode_change("15W", root=tmp_path)
    board = Board(tmp_path)
    with pytest.raises(SpecError, match="MAXN, 10W, 15W"):
        plan_mode_change("99W", root=tmp_path, run=board.run)
    (tmp_path / "etc/nvpmodel.conf").unlink()
    with pytest.raises(DeviceError, match=r"no /etc/nvpmodel\.conf"):
        plan_mode_change("15W", root=tmp_path, run=board.run)
