"""This machine by what it has: nvpmodel.conf, mode, release, module, discrete GPUs; nothing there is fatal."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jetson_tree import conf_mode, make_jetson, nx_conf, write

from edgeds.boards import (
    load_catalogue,
    parse_nvpmodel_conf,
    power_modes,
    probe_machine,
    read_power_mode,
    resolve_target,
)
from edgeds.boards.l4t import find_jetpack, jetpack_table, parse_release, read_l4t
from edgeds.boards.nvpmodel import parse_query
from edgeds.boards.probe import find_part
from edgeds.errors import SpecError


@pytest.mark.parametrize("uncapped", [0, -1, 2147483647, 9223372036854775807])
def test_conf_modes_agree_with_the_catalogue(uncapped: int) -> None:
    """Every spelling of "no cap" gives the ceiling; capped values are converted from kHz and Hz; beyond 32 bits."""
    board = load_catalogue().find("orin-nx-16gb")
    assert board is not None
    conf = parse_nvpmodel_conf(nx_conf(uncapped_emc=uncapped), where="conf")
    modes = {mode.name: mode for mode in power_modes(conf, board=board, source="conf")}
    for known in board.modes:
        if known.name in modes:
            found = modes[known.name]
            for fact in ("id", "watts", "cpu_cores", "cpu_mhz", "tpc", "sm", "gpu_mhz", "emc_mhz", "is_default"):
                assert getattr(found, fact) == getattr(known, fact), fact
            assert found.dram_gb_s == pytest.approx(known.dram_gb_s, rel=1e-3)
    assert modes["10W"].dla_mhz == (153.6, 153.6)
    assert modes["MAXN"].dla_mhz == (None, None)


def test_conf_without_board_keeps_lifted_caps_unknown() -> None:
    modes = power_modes(parse_nvpmodel_conf(nx_conf(), where="c"), source="c")
    assert modes[0].gpu_mhz is None
    assert modes[0].dram_gb_s is None
    assert modes[1].gpu_mhz == 612


def test_odd_conf_lines_become_notes_with_line_numbers_b117() -> None:
    """B117: the default entry missing, one mode, a new mode name, an id twice."""
    new = conf_mode(7, "TURBO_SUPER2", cores=8, khz=-1, mask=0, gpu_hz=-1, emc_hz=-1, dla_hz=-1)
    conf = parse_nvpmodel_conf(f"lonely line\n{new}{new}< POWER_MODEL NAME=x >\n< PM_CONFIG DEFAULT=MAXN >", where="f")
    assert [mode.name for mode in conf.modes] == ["TURBO_SUPER2"]
    assert conf.default_id is None
    assert conf.notes[0].startswith("f:1: not understood")
    assert any("appears twice" in note for note in conf.notes)
    assert any("no default mode" in note for note in conf.notes)


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(SpecError, match="not an nvpmodel"):
        parse_nvpmodel_conf("hello\n", where="x")


@given(st.text(alphabet=st.sampled_from("<>=# \nPARMOWE_DLN019-x"), max_size=200))
def test_any_conf_text_parses_or_is_refused(text: str) -> None:
    try:
        conf = parse_nvpmodel_conf(text, where="x")
    except SpecError:
        return
    power_modes(conf, source="x")


def answers(code: int, output: str) -> Callable[[list[str], float], tuple[int, str]]:
    def run(command: list[str], timeout_s: float) -> tuple[int, str]:
        assert timeout_s <= 10
        return code, output

    return run


@pytest.mark.parametrize(
    ("code", "output", "name"),
    [
        (0, "NV Power Mode: 25W\n1\n", "25W"),
        (0, "NVPM VERB: Current mode: NV Power Mode: MODE_40W\n4\n", "MODE_40W"),
        (0, "NV Power Mode: HYPER_SUPER\n9\n", "HYPER_SUPER"),
        (0, "", None),
        (1, "NVPM ERROR: Error opening /sys/kernel/nvpmodel_emc_cap/emc_iso_cap: 13", None),
        (127, "not found", None),
    ],
)
def test_nvpmodel_answers_b117(tmp_path: Path, code: int, output: str, name: str | None) -> None:
    """B117: empty output, unknown names, failure, not installed: the mode is unknown with a reason, never a crash."""
    reading = read_power_mode(root=tmp_path, run=answers(code, output))
    assert reading.name == name
    assert (reading.note is None) == (name is not None)


def test_the_status_file_is_asked_first_and_is_decimal(tmp_path: Path) -> None:
    conf = parse_nvpmodel_conf(conf_mode(10, "10W", cores=4, khz=1, mask=0, gpu_hz=1, emc_hz=1, dla_hz=1), where="c")
    write(tmp_path, "var/lib/nvpmodel/status", "pmode:0010\n")
    reading = read_power_mode(root=tmp_path, conf=conf, run=answers(0, "NV Power Mode: WRONG\n1\n"))
    assert (reading.id, reading.name) == (10, "10W")
    write(tmp_path, "var/lib/nvpmodel/status", "garbage\n")
    assert read_power_mode(root=tmp_path, conf=conf, run=answers(0, "NV Power Mode: 15W\n2\n")).name == "15W"
    write(tmp_path, "var/lib/nvpmodel/status", "pmode:0044\n")
    odd = read_power_mode(root=tmp_path, conf=conf)
    assert (odd.id, odd.name) == (44, None)
    assert "44" in (odd.note or "")


def test_query_needs_the_name() -> None:
    assert parse_query("3\n", code=0).name is None


def test_probe_reads_module_modes_memory_and_caps(tmp_path: Path) -> None:
    probe = probe_machine(root=make_jetson(tmp_path))
    assert (probe.kind, probe.part_number) == ("jetson", "p3767-0000")
    assert probe.board is not None
    assert probe.board.name == "orin-nx-16gb"
    assert probe.board.usable_memory_mib == 15625
    assert [mode.name for mode in probe.board.modes] == ["MAXN", "10W", "15W"]
    assert probe.current_mode is not None
    assert probe.current_mode.label == "15W"
    assert probe.l4t is not None
    assert probe.l4t.jetpack is not None
    assert probe.l4t.jetpack.jetpack == "6.2.1"
    assert probe.live.cpu_online == 4
    assert probe.notes == ()
    assert str(resolve_target("jetson", root=tmp_path)) == "orin-nx-16gb@15W"
    assert str(resolve_target("jetson@MAXN", root=tmp_path)) == "orin-nx-16gb@MAXN"


@pytest.mark.parametrize(
    ("release", "jetpack", "exact"),
    [
        ("# R35 (release), REVISION: 5.0, GCID: 1", "5.1.3", True),
        ("# R36 (release), REVISION: 4.4, GCID: 1", "6.2.1", True),
        ("# R39 (release), REVISION: 2.0, GCID: 1", "7.2", True),
        ("# R36 (release), REVISION: 9.9, GCID: 1", "6.2.3", False),
        ("# R99 (release), REVISION: 1.0, GCID: 1", "7.2.1", False),
        ("# R32 (release), REVISION: 7.1, GCID: 1", "5.0.2", False),
        ("garbage \x00\xff", None, False),
        ("", None, False),
        (None, None, False),
    ],
)
def test_releases_never_switch_anything_off_b121(
    tmp_path: Path, release: str | None, jetpack: str | None, exact: bool
) -> None:
    """B121: known, new, old, garbage and absent release files: nearest table and a note; the board is still found."""
    probe = probe_machine(root=make_jetson(tmp_path, release=release))
    assert probe.board is not None
    assert probe.current_mode is not None
    assert probe.l4t is not None
    assert (probe.l4t.jetpack.jetpack if probe.l4t.jetpack else None) == jetpack
    assert probe.l4t.is_exact == exact
    assert (probe.l4t.note is None) == exact
    assert exact or probe.l4t.note in probe.notes


def test_release_forms() -> None:
    assert parse_release("# R36 (release), REVISION: 4.4, GCID: 41062509") == "36.4.4"
    assert find_jetpack("36.4.5").jetpack == find_jetpack("36.4.4").jetpack
    assert len({entry.l4t for entry in jetpack_table()}) == len(jetpack_table())
    assert read_l4t(Path("/nonexistent")).jetpack is None


@pytest.mark.parametrize(
    ("compatible", "part"),
    [
        (["nvidia,p3737-0000+p3701-0005", "nvidia,tegra234"], ("p3701-0005", False)),
        (["nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005"], ("p3767-0005", True)),
        (["nvidia,p3737-0000+p3701-0000-as-p3767-0001", "nvidia,tegra234"], ("p3767-0001", False)),
        (["vendor,carrier", "nvidia,p3767-0003", "nvidia,tegra234"], ("p3767-0003", False)),
        (["vendor,box", "nvidia,tegra234"], (None, False)),
    ],
)
def test_module_part_numbers(compatible: list[str], part: tuple[str | None, bool]) -> None:
    assert find_part(compatible) == part


def test_an_unknown_module_is_described_by_its_own_files(tmp_path: Path) -> None:
    probe = probe_machine(root=make_jetson(tmp_path, compatible="nvidia,p9999-0000+p3767-0099"))
    assert probe.board is not None
    assert (probe.board.name, probe.board.arch.name) == ("p3767-0099", "sm_87")
    assert probe.board.modes[1].gpu_mhz == 612
    assert any("not in the catalogue" in note for note in probe.notes)


def test_developer_kit_with_32_gb_is_not_taken_for_the_32_gb_module(tmp_path: Path) -> None:
    root = make_jetson(tmp_path, compatible="nvidia,p3737-0000+p3701-0000", memory_kb=31_358_000, conf="", status=None)
    probe = probe_machine(root=root)
    assert probe.board is not None
    assert (probe.board.name, probe.board.memory_gb, probe.board.cpu_cores) == ("agx-orin-64gb", 32, 12)
    assert probe.current_mode is None  # no conf and no status: unknown, not the default


def test_a_switch_that_waits_for_a_reboot_is_noticed(tmp_path: Path) -> None:
    root = make_jetson(tmp_path, status="pmode:0000\n")
    notes = " ".join(probe_machine(root=root).notes)
    assert "waits for a reboot" in notes
    assert "4 are online" in notes


@pytest.mark.parametrize(
    "name",
    [
        "proc/device-tree/model",
        "proc/device-tree/compatible",
        "proc/meminfo",
        "etc/nv_tegra_release",
        "etc/nvpmodel.conf",
        "var/lib/nvpmodel/status",
        "sys/class/devfreq/17000000.gpu/max_freq",
        "sys/kernel/nvpmodel_clk_cap/emc",
        "sys/devices/platform/gpu.0/tpc_pg_mask",
        "sys/devices/system/cpu/cpu1/online",
    ],
)
def test_each_missing_file_costs_only_its_own_fact_b119(tmp_path: Path, name: str) -> None:
    """B119: files come and go with JetPack releases."""
    root = make_jetson(tmp_path)
    (root / name).unlink()
    probe = probe_machine(root=root)
    assert probe.kind == "jetson"
    assert probe.board is not None


SMI = "NVIDIA GeForce RTX 4060, 8.9, 8188, 115.00, 3105, 8501\nNVIDIA T400 4GB, 7.5, 4096, [N/A], 2100, 5001\n"


def test_discrete_gpus_by_capability(tmp_path: Path) -> None:
    probe = probe_machine(root=tmp_path, run=answers(0, SMI))
    assert probe.kind == "nvidia"
    assert [gpu.compute_capability for gpu in probe.gpus] == ["8.9", "7.5"]
    assert probe.gpus[1].power_limit_w is None
    board = probe.board
    assert board is not None
    assert (board.arch.compute_capability, board.sm, board.total_rails) == ("8.9", None, None)
    assert probe.current_mode is not None
    assert (probe.current_mode.gpu_mhz, probe.current_mode.watts) == (3105, 115)


def test_old_driver_without_compute_cap(tmp_path: Path) -> None:
    def run(command: list[str], timeout_s: float) -> tuple[int, str]:
        if "compute_cap" in command[1]:
            return 2, 'Field "compute_cap" is not a valid field to query.'
        return 0, "Tesla T4, 15360, 70.00, 1590, 5001\n"

    probe = probe_machine(root=tmp_path, run=run)
    assert probe.board is not None
    assert (probe.board.name, probe.board.arch.compute_capability) == ("tesla-t4", "unknown")


@pytest.mark.parametrize(("code", "output"), [(127, ""), (9, "NVIDIA-SMI has failed"), (0, ""), (0, "a,b\n")])
def test_no_discrete_gpu_is_a_note(tmp_path: Path, code: int, output: str) -> None:
    probe = probe_machine(root=tmp_path, run=answers(code, output))
    assert (probe.kind, probe.board) == ("cpu", None)
    assert probe.notes
    with pytest.raises(SpecError, match="no Jetson"):
        resolve_target("jetson", root=tmp_path)
