"""``edgeds monitor``: logs of any board as JSON lines or a table, the live screen, wrong use."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import edgeds
from edgeds.cli.main import main
from edgeds.power import PowerSample, summarize
from edgeds.power.view import redraw, screen_lines, table_row

LINES = [
    row.split("\t")
    for row in (Path(__file__).parents[2] / "data/power/tegrastats_lines.txt").read_text().splitlines()
    if not row.startswith("#")
]
BY_ID = {number: line for number, _, line in LINES}
KEYS = {"t_s", "rails_mw", "total_mw", "gpu_load_pct", "gpu_mhz", "emc_mhz", "temp_c"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text(f"{BY_ID['S12']}\n{BY_ID['S12'].replace('08:38:09', '08:38:10').replace('12479', '13000')}\n")
    return path


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_log_becomes_json_lines(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--from-log", str(log), "--target", "orin-nano-8gb", "--json"]) == 0
    first, second = rows(capsys)
    assert first.keys() >= KEYS
    assert (first["t_s"], first["total_mw"], second["t_s"], second["total_mw"]) == (0, 12479, 1, 13000)
    assert first["rails_mw"] == {"VDD_IN": 12479, "VDD_CPU_GPU_CV": 4667, "VDD_SOC": 2817}
    assert (first["gpu_load_pct"], first["gpu_mhz"], first["emc_mhz"], first["temp_c"]) == (63, 621, 2133, 53.968)


def test_every_line_of_every_board_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.log"
    path.write_text("\n".join(BY_ID.values()))
    assert main(["monitor", "--from-log", str(path), "--json", "--interval", "0.1"]) == 0
    found = rows(capsys)
    assert len(found) == 24
    assert [row["t_s"] for row in found[:3]] == [0, 0.1, 0.2]
    assert sum(row["total_mw"] is None for row in found) == 2
    assert all(row["total_mw"] != 0 for row in found)


def test_the_wrong_target_makes_the_total_unknown_and_says_so_b113(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B113: never another module's rule, never 0."""
    assert main(["monitor", "--from-log", str(log), "--target", "agx-orin-64gb", "--json"]) == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["total_mw"] for line in captured.out.splitlines()] == [None, None]
    assert "is the target right" in captured.err


def test_table_and_summary_of_a_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--from-log", str(log)]) == 0
    out = capsys.readouterr().out
    assert "12.48" in out
    assert "mean 12.74 W, max 13.00 W, 12.7 J over 1.0 s" in out


def test_count_and_stdin(log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(b"\x00junk\xff\n" + log.read_bytes()))
    monkeypatch.setattr("sys.stdin", stream)
    assert main(["monitor", "--from-log", "-", "--json", "--count", "1"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert "left out: lines 1" in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--from-log", "/nonexistent/x.log"], 2, "/nonexistent/x.log"),
        (["--from-log", "/"], 2, "cannot be read"),
        (["--from-log", "/dev/zero"], 2, "give - and pipe"),
        (["--from-log", "LOG", "--target", "orin-nx-99"], 2, "nearest"),
        (["--interval", "0"], 2, "--interval"),
        (["--interval", "nan"], 2, "--interval"),
        (["--count", "0"], 2, "--count"),
        (["--from-log", "EMPTY"], 1, "no tegrastats line"),
    ],
)
def test_wrong_use_is_one_sentence(
    log: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = log.with_name("empty.log")
    empty.write_text("nothing\nhere\n")
    filled = [{"LOG": str(log), "EMPTY": str(empty)}.get(one, one) for one in arguments]
    assert main(["monitor", *filled]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_live_json_without_a_sensor_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever this runs: rows have the keys, and power without a sensor is null, not 0."""
    assert main(["monitor", "--count", "2", "--interval", "0.02", "--json"]) == 0
    found = rows(capsys)
    assert len(found) == 2
    for row in found:
        assert row.keys() >= KEYS
        assert row["total_mw"] is None or isinstance(row["total_mw"], int | float)
        assert row["total_mw"] != 0


def monitor_process(*arguments: str, **options: object) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": str(Path(edgeds.__file__).parents[1]), "TERM": "xterm"}
    command = [sys.executable, "-m", "edgeds", "monitor", "--interval", "0.05", *arguments]
    return subprocess.Popen(command, env=environment, **options)  # type: ignore[call-overload,no-any-return]


def test_ctrl_c_ends_cleanly_with_a_summary() -> None:
    process = monitor_process(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert b"Traceback" not in err
    assert out.strip()


def test_the_screen_is_redrawn_in_place_on_a_terminal() -> None:
    leader, follower = pty.openpty()
    process = monitor_process("--count", "4", stdout=follower, stderr=subprocess.DEVNULL)
    os.close(follower)
    shown = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    assert process.wait(timeout=20) == 0
    os.close(leader)
    assert shown.count(b"\x1b[H") == 4
    assert b"throttling" in shown


FULL = PowerSample(
    t_s=12.3,
    rails_mw={"VDD_GPU_SOC": 14312.0, "VDD_CPU_CV": 14312.0, "VIN_SYS_5V0": 4968.0, "VDDQ_VDD2_1V8AO": 1091.0},
    total_mw=33592.0,
    gpu_load_pct=99.5,
    gpu_mhz=1300.5,
    temps_c={f"soc{index}": 70.125 for index in range(12)},
    ram_used_mib=20000,
    ram_total_mib=62780,
    throttle=("thermal cpu-throttle-alert", "over-current VDD_IN") * 3,
    oc_events={"oc3": 5},
)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("sample", [FULL, PowerSample(t_s=0)], ids=["full", "unknown"])
def test_the_screen_fits_its_width(sample: PowerSample, width: int) -> None:
    summary = summarize([sample, sample], source="a sensor with a long name " * 5, interval_s=1)
    lines = screen_lines(sample, summary, title="agx-orin-64gb@30W", budget_w=30, width=width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24 or width < 80
    text = "\n".join(lines)
    if sample is FULL:
        assert "EXCEEDED" in text or width == 40
    else:
        assert "? W" in text
        assert "0.00 W" not in text
    assert redraw(lines, height=10).count("\n") == 9


def test_unknown_is_a_question_mark_in_the_table() -> None:
    assert table_row(PowerSample(t_s=1)).split() == ["1.0", "?", "?", "?", "?", "?", "?"]
