"""The catalogue's figures are consistent and sourced; names that people type find the right board and mode."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeds.boards import BoardSpec, PowerMode, load_catalogue, missing_facts, peak_tops, resolve_target
from edgeds.errors import SpecError

ALL = load_catalogue()
MODES = [(board, mode) for board in ALL.boards for mode in board.modes]
IDS = [f"{board.name}@{mode.label}" for board, mode in MODES]


def test_every_orin_module_is_there_with_its_super_profile() -> None:
    names = {board.name for board in ALL.boards}
    assert {"agx-orin-64gb", "agx-orin-32gb", "agx-orin-32gb-super", "agx-orin-industrial", "igx-orin"} <= names
    for module in ("orin-nx-16gb", "orin-nx-8gb", "orin-nano-8gb", "orin-nano-4gb"):
        assert {module, f"{module}-super"} <= names


@pytest.mark.parametrize(("board", "mode"), MODES, ids=IDS)
def test_the_figures_of_a_mode_agree_with_each_other(board: BoardSpec, mode: PowerMode) -> None:
    if mode.sm is not None and mode.tpc is not None:
        assert mode.sm == 2 * mode.tpc
        assert board.sm is None or mode.sm <= board.sm
    if mode.tpc_pg_mask is not None and mode.tpc is not None:
        assert mode.tpc == 8 - bin(mode.tpc_pg_mask).count("1")
    if mode.dram_gb_s is not None and mode.emc_mhz is not None:
        assert board.bus_bits is not None
        assert mode.dram_gb_s == pytest.approx(board.bus_bits / 8 * 2 * mode.emc_mhz / 1000, rel=1e-3)
    if mode.dla_cores is not None and mode.dla_mhz:
        assert len(mode.dla_mhz) == mode.dla_cores
    assert mode.watts is None or str(int(mode.watts)) in mode.name
    assert mode.cpu_cores is None or board.cpu_cores is None or mode.cpu_cores <= board.cpu_cores


@pytest.mark.parametrize(("board", "mode"), MODES, ids=IDS)
def test_every_stated_figure_has_a_source_that_exists(board: BoardSpec, mode: PowerMode) -> None:
    for fact in ("id", "cpu_cores", "cpu_mhz", "sm", "gpu_mhz", "emc_mhz", "dram_gb_s", "watts"):
        if getattr(mode, fact) is not None:
            assert mode.sources.get(fact), fact
    for owner in (board, mode, board.arch):
        for ids in owner.sources.values():
            assert all(one in ALL.sources for one in ids)


def test_sources_are_public_places_and_not_index_numbers() -> None:
    assert not [text for text in ALL.sources.values() if "file id" in text or "/work/" in text]


@pytest.mark.parametrize(
    ("target", "tops"),
    [
        ("agx-orin-64gb@MAXN", 85),
        ("orin-nx-16gb-super@MAXN_SUPER", 38),
        ("orin-nano-8gb@15W", 20),
        ("orin-nano-8gb-super@MAXN", 33),
    ],
)
def test_peaks_reproduce_the_advertised_dense_int8_tops(target: str, tops: float) -> None:
    found = resolve_target(target)
    assert found.mode is not None
    peak = peak_tops(found.board, found.mode, precision="int8")
    assert peak == pytest.approx(tops, rel=0.03)
    assert peak == 2 * (peak_tops(found.board, found.mode, precision="fp16") or 0)
    assert missing_facts(found.board, found.mode) == ()


def test_unknown_facts_stay_unknown_and_are_named() -> None:
    found = resolve_target("agx-orin-industrial@30W")
    assert found.mode is not None
    assert found.mode.gpu_mhz is None
    assert peak_tops(found.board, found.mode, precision="int8") is None
    assert "agx-orin-industrial@30W: gpu_mhz" in missing_facts(found.board, found.mode)
    nano = resolve_target("orin-nano-8gb@15W")
    assert nano.mode is not None
    assert missing_facts(nano.board, nano.mode, precision="int4") == ("sm_87: operations per clock of int4",)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("agx-orin-64gb@30W", "agx-orin-64gb@30W"),
        ("agx orin", "agx-orin-64gb"),
        ("NVIDIA Jetson AGX Orin Developer Kit", "agx-orin-64gb"),
        ("AGX_ORIN_64GB @ mode_50w", "agx-orin-64gb@50W"),
        ("orin-nx-16gb@15w", "orin-nx-16gb@15W"),
        ("Orin NX 16 GB@15", "orin-nx-16gb@15W"),
        ("orin-nano-8gb-super@MAXN_SUPER", "orin-nano-8gb-super@MAXN_SUPER"),
        ("orin-nano-8gb@MAXN_SUPER", "orin-nano-8gb-super@MAXN_SUPER"),
        ("orin-nano-8gb@25W", "orin-nano-8gb-super@25W"),
        ("orin-nano-super@maxn", "orin-nano-8gb-super@MAXN_SUPER"),
        ("p3767-0005-super@7W", "orin-nano-8gb-super@7W"),
        ("rtx-sm86", "rtx-sm86"),
    ],
)
def test_names_that_people_type(typed: str, meant: str) -> None:
    assert str(resolve_target(typed)) == meant


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("orin-nx-32gb", "orin-nx-16gb"),
        ("agxorin64@15W", "agx-orin-64gb"),
        ("agx-orin-64gb@60W", "MAXN, 15W, 30W, 50W"),
        ("orin-nano-4gb@7W", "7W_AI, 7W_CPU"),
        ("orin-nano-8gb@99W", "orin-nano-8gb-super has"),
        ("", "BOARD@MODE"),
        ("@30W", "BOARD@MODE"),
        ("agx-orin@", "BOARD@MODE"),
        ("x" * 5000, "BOARD@MODE"),
    ],
)
def test_unknown_names_list_the_nearest(typed: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_target(typed)
    assert hint in str(caught.value)
    assert len(str(caught.value)) < 400


@given(st.text(max_size=40))
def test_any_text_is_a_target_or_one_clear_error(text: str) -> None:
    try:
        target = resolve_target(text, root=Path("/nonexistent"))
    except SpecError:
        return
    assert target.board.name


def test_default_modes() -> None:
    by_name = {board.name: board.default_mode for board in ALL.boards}
    assert by_name["agx-orin-64gb"] is not None
    assert by_name["agx-orin-64gb"].label == "30W"
    assert by_name["orin-nano-8gb-super"] is not None
    assert by_name["orin-nano-8gb-super"].label == "25W"
    assert by_name["agx-orin-industrial"] is None  # no source says


def write_boards(path: Path, *boards: dict[str, object], schema: int = 1) -> Path:
    path.write_text(json.dumps({"schema": schema, "boards": list(boards)}))
    return path


def test_own_boards_and_modes_from_a_file(tmp_path: Path) -> None:
    mode = {"name": "18W", "watts": 18, "tpc": 4, "gpu_mhz": 800, "emc_mhz": 3199, "is_default": True}
    own = {"name": "our-carrier", "base": "orin-nx-16gb-super", "aliases": ["oc"], "modes": [mode], "source": "our lab"}
    fresh = {"name": "box-4060", "compute_capability": "8.9", "memory_gb": 8, "sm": 24}
    catalogue = load_catalogue(write_boards(tmp_path / "b.json", own, fresh))
    target = resolve_target("oc@18W", catalogue=catalogue)
    assert target.mode is not None
    assert (target.mode.sm, target.mode.dram_gb_s) == (8, 102.37)
    assert target.mode.sources["gpu_mhz"] == ("our lab",)
    assert target.board.default_mode == target.mode
    assert target.board.total_rails == ("VDD_IN",)
    assert [mode.label for mode in target.board.modes][:2] == ["MAXN_SUPER", "10W"]
    assert resolve_target("box-4060", catalogue=catalogue).board.arch.compute_capability == "8.9"
    # The shipped board keeps answering to its part number.
    found = catalogue.find_part("p3767-0000", is_super=True)
    assert found is not None
    assert found.name == "orin-nx-16gb-super"


def test_the_config_folder_is_read_when_there_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert len(load_catalogue().boards) == len(ALL.boards)
    (tmp_path / "edgeds").mkdir()
    write_boards(tmp_path / "edgeds/boards.json", {"name": "mine", "base": "orin-nx-8gb"})
    assert resolve_target("mine@15W").board.memory_gb == 8


@pytest.mark.parametrize(
    ("board", "message"),
    [
        ({"name": "a", "base": "orin-nx-9gb"}, "boards[0].base"),
        ({"name": "a", "base": "orin-nx-8gb", "wats": 3}, "wats"),
        ({"name": "a"}, "compute_capability"),
        ({"name": "a", "compute_capability": "eight"}, "8.6"),
        ({"name": "orin-nx-8gb", "compute_capability": "8.7"}, "taken"),
        ({"name": "A b@c", "compute_capability": "8.7"}, "lower-case"),
        ({"name": "a", "base": "orin-nx-8gb", "modes": [{"name": "x", "gpu_mhz": 612000000}]}, "modes[0].gpu_mhz"),
        ({"name": "a", "base": "orin-nx-8gb", "modes": [{"name": "x", "watts": -3}]}, "watts"),
        ({"name": "a", "base": "orin-nx-8gb", "modes": [{"name": "x", "sm": 99}]}, "more than the 8"),
        ({"name": "a", "base": "orin-nx-8gb", "modes": [{"name": "x"}, {"name": "x"}]}, "twice"),
        ({"name": "a", "base": "orin-nx-8gb", "modes": [{"watts": 3}]}, "'name' is missing"),
        ({"name": "a", "base": "orin-nx-8gb", "memory_gb": "8"}, "memory_gb"),
        ({"name": "a", "base": "orin-nx-8gb", "power_range_w": [9, 3]}, "power_range_w"),
        ({"name": "a", "base": "orin-nx-8gb", "total_rails": []}, "total_rails"),
        ({"name": "a", "base": "orin-nx-8gb", "modes": [{"name": n, "is_default": True} for n in "xy"]}, "is_default"),
    ],
)
def test_a_bad_board_file_is_one_sentence_with_file_and_key(
    tmp_path: Path, board: dict[str, object], message: str
) -> None:
    path = write_boards(tmp_path / "mine.json", board)
    with pytest.raises(SpecError) as caught:
        load_catalogue(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_damaged_or_newer_board_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.json"):
        load_catalogue(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(SpecError, match=r"bad\.json"):
        load_catalogue(tmp_path / "bad.json")
    with pytest.raises(SpecError, match="schema 2"):
        load_catalogue(write_boards(tmp_path / "new.json", schema=2))
