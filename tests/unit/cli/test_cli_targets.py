"""``edgeds targets``: the table, one board, JSON with its keys, own boards, dry runs of a mode switch."""

import json
from pathlib import Path

import pytest

from edgeds.cli.main import main


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["targets", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    data: dict[str, object] = json.loads(captured.out)
    return data


def test_table_lists_every_board_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("orin-nano-8gb-super ") and "MAXN_SUPER" in line for line in lines)
    assert "?" in next(line for line in lines if line.startswith("igx-orin"))


def test_json_of_one_board_has_the_contract_keys(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "agx-orin-64gb")
    assert {"name", "modes", "clocks", "bandwidth", "memory", "sources"} <= data.keys()
    assert data["name"] == "agx-orin-64gb"
    assert data["clocks"] == {"gpu_mhz": 1300.5, "cpu_mhz": 2201.6, "emc_mhz": 3200}
    assert data["bandwidth"] == {"dram_gb_s": 204.8, "bus_bits": 256}
    modes = data["modes"]
    assert isinstance(modes, list)
    assert [mode["label"] for mode in modes] == ["MAXN", "15W", "30W", "50W"]
    sources = data["sources"]
    assert isinstance(sources, dict)
    assert all(source in sources for mode in modes for ids in mode["sources"].values() for source in ids)


def test_json_of_a_mode_and_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    one = run_json(capsys, "orin-nx-16gb@15w")
    assert isinstance(one["modes"], list)
    assert [mode["name"] for mode in one["modes"]] == ["15W"]
    assert one["clocks"] == {"gpu_mhz": 612, "cpu_mhz": 1420.8, "emc_mhz": 3200}
    everything = run_json(capsys)
    assert isinstance(everything["targets"], list)
    assert len(everything["targets"]) >= 13
    assert all(
        {"name", "modes", "clocks", "bandwidth", "memory", "sources"} <= row.keys() for row in everything["targets"]
    )


@pytest.mark.parametrize(
    "name", ["agx-orin-64gb", "agx-orin-industrial", "igx-orin", "orin-nano-4gb-super@MAXN", "sm86"]
)
def test_page_of_a_board_states_sources_and_unknowns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", name]) == 0
    out = capsys.readouterr().out
    assert "MODE" in out
    assert ("sources:" in out) == (name != "sm86")
    assert "None" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["orin-nx-32gb"], "nearest"),
        (["agx-orin-64gb@99W"], "MAXN, 15W, 30W, 50W"),
        (["agx-orin-64gb@15W", "--set"], "jetson@MODE"),
        (["--set"], "jetson@MODE"),
        (["jetson@15W", "--yes"], "belongs to --set"),
        (["--boards", "/nonexistent/boards.json"], "/nonexistent/boards.json"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["targets", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_own_boards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "boards.json"
    board = {"name": "our-box", "base": "orin-nx-8gb-super", "modes": [{"name": "12W", "watts": 12, "gpu_mhz": 500}]}
    path.write_text(json.dumps({"schema": 1, "boards": [board]}))
    data = run_json(capsys, "our-box@12W", "--boards", str(path))
    assert data["clocks"] == {"gpu_mhz": 500, "cpu_mhz": None, "emc_mhz": None}
    assert main(["targets", "--boards", str(path)]) == 0
    assert "our-box" in capsys.readouterr().out


def test_this_machine_is_said_to_be_no_jetson_or_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever the tests run: a page, or one sentence."""
    code = main(["targets", "jetson"])
    captured = capsys.readouterr()
    assert code in (0, 2)
    assert ("this machine" in captured.out) if code == 0 else ("no Jetson" in captured.err)


def test_set_outside_a_jetson_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/etc/nv_tegra_release").exists():
        pytest.skip("runs on a Jetson")
    assert main(["targets", "jetson@15W", "--set", "--yes"]) == 1
    assert "only a Jetson" in capsys.readouterr().err
