"""tegrastats lines of every board and JetPack we have, cut lines, unknown fields, and logs of them."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeds.power import LogStats, module_total, parse_line, read_log
from edgeds.power.tegrastats import TegraLine, to_sample

DATA = Path(__file__).parents[2] / "data" / "power" / "tegrastats_lines.txt"
LINES = {
    number: line
    for number, _, line in (row.split("\t") for row in DATA.read_text().splitlines() if not row.startswith("#"))
}

# Total in mW, GPU load, GPU clocks, EMC load, EMC MHz, CPUs, CPUs off, tj or hottest zone.
Expected = tuple[int | None, int | None, tuple[int, ...], int | None, int | None, int, int, float]
EXPECTED: dict[str, Expected] = {
    "S1": (2532, 0, (76,), 7, 408, 4, 0, 42.75),
    "S2": (1931, 0, (140,), 0, 1866, 6, 0, 41),
    "S3": (3140, 0, (), 0, None, 6, 0, 42.5),
    "S4": (None, 0, (), 0, None, 8, 0, 32),
    "S5": (1022, 0, (76,), 0, 204, 4, 0, 39.5),
    "S6": (4067, 62, (306,), 10, 1600, 6, 0, 43.5),
    "S7": (4788 + 798 + 3842, 0, (114,), 0, 204, 12, 0, 43.5),
    "S8": (2399 + 400 + 4032, 0, (0,), 0, 2133, 12, 0, 42.593),
    "S9": (3150 + 14312 + 4968, 14, (407, 407), 1, 2133, 12, 0, 77.281),
    "S10": (5299, 0, (611,), 0, 2133, 8, 4, 48.875),
    "S11": (4915, 0, (305,), 0, 2133, 6, 2, 46.968),
    "S12": (12479, 63, (621,), 43, 2133, 6, 0, 53.968),
    "S13": (4824, 0, (), None, None, 6, 0, 50.25),
    "S14": (4046, 0, (), None, None, 6, 0, 45.968),
    "S15": (1995 + 0 + 2524, 0, (), None, None, 12, 4, 43.343),
    "S16": (3205 + 4405 + 4767, 0, (305, 305), 1, 2133, 12, 0, 53.062),
    "S17": (4940 + 988 + 4442, 0, (), None, None, 12, 0, 42),
    "S18": (2412 + 1607 + 4707, 0, (0, 0), 3, 2133, 12, 0, 52.562),
    "S19": (5139 + 3268 + 5500, 12, (1300, 1300), 3, 3199, 12, 0, 52.968),
    "S20": (3034 + 1137 + 4939, 0, (), None, None, 12, 0, 47.906),
    "S21": (7280, 0, (), None, None, 8, 2, 59.687),
    "S22": (3462, 0, (305,), 3, 665, 6, 0, 46.562),
    "S23": (4548, 12, (), None, None, 6, 0, 50.875),
    "S24": (None, None, (314, 314, 314), 0, 2750, 14, 0, 38.875),
}


def parse(number: str) -> TegraLine:
    line = parse_line(LINES[number])
    assert line is not None
    return line


@pytest.mark.parametrize("number", EXPECTED)
def test_every_published_line_b113(number: str) -> None:
    """B113: names and forms differ per module; none is missing, none is taken for another."""
    line = parse(number)
    total, load, clocks, emc_load, emc, cpus, off, temp = EXPECTED[number]
    sample = to_sample(line, t_s=0)
    assert sample.total_mw == total
    assert (line.gpu_load_pct, line.gpu_mhz) == (load, clocks)
    assert (line.emc_load_pct, line.emc_mhz) == (emc_load, emc)
    assert (len(line.cpus), sum(core is None for core in line.cpus)) == (cpus, off)
    assert sample.temp_c == temp
    assert sample.gpu_mhz == max(clocks, default=None)
    has_stamp = LINES[number][:2].isdigit()
    assert (line.time is not None) == has_stamp


def test_no_line_is_untested() -> None:
    assert set(EXPECTED) == set(LINES)
    assert len(LINES) == 24


def test_rails_are_an_ordered_list_with_average_and_peak() -> None:
    names = [rail.name for rail in parse("S7").rails]
    assert names == ["VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "NC", "VDDQ_VDD2_1V8AO", "NC"]
    assert "NC" not in parse("S7").rails_mw
    rail = parse("S20").rails[0]
    assert (rail.cur_mw, rail.avg_mw, rail.peak_mw) == (3034, 3049, 3412)
    bare = parse("S1").rails[1]
    assert (bare.name, bare.cur_mw, bare.avg_mw, bare.peak_mw) == ("VDD_CPU", 76, 178, None)


def test_sleeping_zones_are_missing_and_not_minus_256() -> None:
    assert set(parse("S7").temps_c) == {"cpu", "tdiode", "soc2", "soc0", "gpu", "soc1"}


def test_engines_that_run_have_clocks() -> None:
    assert parse("S18").engines_mhz["NVENC"] == 166
    assert parse("S9").engines_mhz["NVDLA0"] == 1600
    assert "NVDLA0" not in parse("S16").engines_mhz


@pytest.mark.parametrize("number", LINES)
def test_a_cut_line_never_gives_another_number_b113(number: str) -> None:
    """Cut anywhere, every figure is the whole line's or unknown; the total is never a part of it and never 0."""
    whole = to_sample(parse(number), t_s=0)
    text = LINES[number]
    for end in range(len(text)):
        line = parse_line(text[:end])
        if line is None:
            continue
        part = to_sample(line, t_s=0)
        assert part.total_mw in (whole.total_mw, None)
        assert part.emc_mhz in (whole.emc_mhz, None)
        assert part.gpu_mhz in (whole.gpu_mhz, None)
        assert part.gpu_load_pct in (whole.gpu_load_pct, None)
        assert part.ram_total_mib in (whole.ram_total_mib, None)
        assert part.rails_mw.items() <= whole.rails_mw.items()
        assert part.temps_c.items() <= whole.temps_c.items()


@pytest.mark.parametrize("number", LINES)
def test_a_line_without_its_beginning_keeps_its_total(number: str) -> None:
    text = LINES[number]
    start = text.index(" CPU [") + 30
    line = parse_line(text[start:])
    assert line is not None
    assert to_sample(line, t_s=0).total_mw == EXPECTED[number][0]


def test_unknown_new_fields_are_skipped() -> None:
    text = LINES["S12"].replace("APE 200", "NPU9 77%@[1,2] QUX{a=1} APE 200 FOO 12/34kB BAR 3.5W")
    line = parse_line(text)
    assert line is not None
    assert line.rails_mw == parse("S12").rails_mw
    assert line.gpu_load_pct == 63


@given(st.text(max_size=300))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    parse_line(text)


@given(st.text(alphabet="RAMCPUVDD_IN [@%],/0123456789mWB()GR3D_FREQ", max_size=200))
def test_near_misses_never_raise(text: str) -> None:
    line = parse_line(text)
    if line is not None:
        to_sample(line, t_s=0)


@pytest.mark.parametrize("text", ["", "\n", "hello", "x" * 100_000, "CPU", "RAM", "\0\0"])
def test_other_text_is_no_line(text: str) -> None:
    assert parse_line(text) is None


def test_total_rules() -> None:
    """A part is never the total, 0 never stands for unknown, a wrong target is told."""
    assert module_total({"VDD_CPU_GPU_CV": 700.0, "VDD_SOC": 1400.0})[0] is None
    assert module_total({"VDD_GPU_SOC": 1.0, "VDD_CPU_CV": 2.0})[0] is None
    assert module_total({"VDD_IN": 0.0})[0] is None
    assert module_total({})[0] is None
    agx = ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")
    total, reason = module_total({"VDD_IN": 5000.0}, agx)
    assert total is None
    assert "is the target right" in (reason or "")
    four = {"VDD_GPU_SOC": 1.0, "VDD_CPU_CV": 2.0, "VIN_SYS_5V0": 4.0, "VDDQ_VDD2_1V8AO": 8.0}
    assert module_total(four, agx) == (7.0, None)


def log(*numbers: str) -> io.BytesIO:
    return io.BytesIO("\n".join(LINES[number] for number in numbers).encode())


def test_log_times_come_from_stamps() -> None:
    """Lines within a second are spread over it; a clock that goes back does not turn time round."""
    text = "\n".join(
        LINES["S22"].replace("13:33:03", stamp)
        for stamp in ("13:33:03", "13:33:03", "13:33:04", "13:33:04", "13:33:09", "13:30:00")
    )
    times = [sample.t_s for sample in read_log(io.BytesIO(text.encode()))]
    assert times == [0.0, 0.5, 1.0, 1.5, 6.0, 7.0]


def test_log_times_by_interval_and_without_stamps() -> None:
    assert [sample.t_s for sample in read_log(log("S16", "S10", "S1"), interval_s=0.1)] == pytest.approx([0, 0.1, 0.2])
    assert [sample.t_s for sample in read_log(log("S16", "S10", "S1"))] == [0, 1, 2]


def test_log_counts_what_it_leaves_out() -> None:
    stats = LogStats()
    stream = io.BytesIO(b"start\n\xff\xfe\n\n" + LINES["S13"].encode() + b"\r\n" + LINES["S4"].encode())
    samples = list(read_log(stream, stats=stats))
    assert [sample.total_mw for sample in samples] == [4824, None]
    assert (stats.lines, stats.parsed, stats.without_total) == (4, 2, 1)
    assert stats.skipped == [1, 2]
    assert "no rule" in (stats.reason or "")
