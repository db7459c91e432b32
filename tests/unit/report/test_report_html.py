"""The report page, its words, charts and picture: right figures, nothing mixed up, nothing hostile, bounded size."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_builders import HOSTILE, Reader, bare, measured, predicted

from edgeds.errors import SpecError
from edgeds.report.axes import linear_scale, log_scale, number, round_ticks
from edgeds.report.drawing import Box, Dot, Text
from edgeds.report.drawing import Path as Line
from edgeds.report.html import write_report
from edgeds.report.plots import (
    fps_over_watts,
    latency_by_batch,
    latency_cdf,
    layer_bars,
    power_rules,
    power_trace,
    roofline,
)
from edgeds.report.png import write_png
from edgeds.report.record import (
    Device,
    LatencyFigures,
    LayerTime,
    PowerFigures,
    Roof,
    RunRecord,
    ThrottleEvent,
    keep_spread,
)
from edgeds.report.words import budget_words, compare, events_words, headline, summarize_runs
from edgeds.specs import Budget

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (1280, 390)


def page_of(tmp_path: Path, *runs: RunRecord, title: str = "A title") -> str:
    return write_report(tmp_path / "report.html", runs, title=title).read_text(encoding="utf-8")


def drawings(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_summary_is_what_a_manager_reads() -> None:
    first, *rest = summarize_runs([measured()])
    assert first.startswith(
        "31.2 frames per second at 12.4 W on Jetson Orin NX 16GB in 15W mode with yolo11n, int8, batch 1 (measured on "
        "2026-12-01). 99 of 100 requests are answered within 50.9 ms"
    )
    assert "Energy: 397 mJ per frame." in first
    assert "The power is 2.6 W under the budget of 15 W: it meets it." in rest
    assert "The speed is 1.2 frames per second above the goal of 30 frames per second: it meets it." in rest
    assert "The device was held back: oc2 (3 times)." in rest


def test_prediction_is_never_worded_as_a_measurement() -> None:
    run = predicted(budget=Budget(watts=15.0, fps=30.0))
    words = " ".join(summarize_runs([run]))
    assert "(predicted, not measured)" in words
    assert "(measured" not in words
    assert "probably between 9 and 14.2 ms" in words
    assert "The power would be 4 W above the budget of 15 W: it MISSES it." in words


def test_unknown_figures_fail_no_limit_and_pass_none() -> None:
    words = budget_words(bare(budget=Budget(watts=15.0, fps=30.0)))
    assert words == [
        "The power budget of 15 W cannot be checked: the figure is unknown.",
        "The speed goal of 30 frames per second cannot be checked: the figure is unknown.",
    ]
    assert "exactly at the budget" in budget_words(measured(budget=Budget(watts=12.4)))[0]


def test_several_streams_are_held_against_their_sum() -> None:
    words = budget_words(measured(budget=Budget(fps=30.0, streams=2)))
    assert "28.8 frames per second under the goal of 60" in words[0]


def test_power_without_a_sensor_is_said_and_never_zero(tmp_path: Path) -> None:
    run = measured(power=PowerFigures(unavailable="no sensor was found"), energy_mj=None)
    page = page_of(tmp_path, run)
    text = Reader(page).text
    assert "Power: unavailable, no sensor was found." in text
    assert "Power over time: unavailable" in text
    assert "0 W" not in re.sub(r"\d0 W", "", text)
    assert "unavailable, no sensor was found" in text


def test_interruption_is_said() -> None:
    assert "interrupted" in headline(measured(interrupted=True))


def test_comparison_has_ratios_and_warns_of_unlike_things() -> None:
    words = compare(measured("a"), predicted("b"))
    assert words == (
        "b has 2.82 times the frames per second, 1.53 times the power and 0.544 times the energy per frame of a "
        "(predicted against measured)."
    )
    assert compare(measured("a"), bare("b")) == ""
    assert "the same power" in compare(measured("a"), measured("b", fps=60.0))


def test_events_that_nobody_tells_are_not_none_seen() -> None:
    assert "unavailable" in events_words(bare())
    assert events_words(bare(throttle_events=())) == "none seen"
    many = tuple(ThrottleEvent(what=f"e{index}") for index in range(500))
    assert events_words(bare(throttle_events=many)).endswith("and 488 more")


def test_page_states_board_mode_versions_sensor_date_and_status(tmp_path: Path) -> None:
    """B127: versions in every report; B76: the reason of a fallback too."""
    text = Reader(page_of(tmp_path, measured(notes=("no TensorRT engine, so onnxruntime runs",)))).text
    assert "no TensorRT engine, so onnxruntime runs" in text
    for fact in ("Jetson Orin NX 16GB", "15W", "tensorrt 10.3.0", "INA3221 (VDD_IN)", "2026-12-01", "\u00a0measured"):
        assert fact in text
    assert "coco128" in text


def test_measured_and_predicted_look_different_everywhere(tmp_path: Path) -> None:
    page = page_of(tmp_path, measured(), predicted())
    read = Reader(page)
    assert "\u25cf\u00a0measured" in read.text
    assert "\u25cb\u00a0predicted" in read.text
    figure = fps_over_watts([measured(), predicted()])
    assert figure.drawing is not None
    dots = [shape.filled for shape in figure.drawing.shapes if isinstance(shape, Dot)]
    assert dots == [True, False]


def test_page_needs_nothing_from_elsewhere_and_its_drawings_are_well_formed(tmp_path: Path) -> None:
    page = page_of(tmp_path, measured(), predicted(), measured("third", batch=8))
    assert "default-src 'none'" in page
    assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in Reader(page).tags}
    without_names = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search("https?:", without_names)
    assert "url(" not in page
    found = drawings(page)
    assert len(found) >= 6
    assert all(drawing.get("aria-label") for drawing in found)
    for bad in ("NaN", "nan", "inf,", "None"):
        assert bad not in page


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    layer = LayerTime(name=HOSTILE, kind=HOSTILE, time_us=5.0, flops=10.0, bytes=1.0)
    device = Device(board=HOSTILE, mode=HOSTILE, versions={HOSTILE: HOSTILE})
    run = measured(
        HOSTILE, layers=(layer,), device=device, model=HOSTILE, notes=(HOSTILE,), accuracy={HOSTILE: HOSTILE}
    )
    page = page_of(tmp_path, run, replace(run, batch=2), title=HOSTILE)
    tags = Reader(page).tags
    assert not {"script", "img"} & {tag for tag, _ in tags}
    assert not [name for _, attrs in tags for name in attrs if name.startswith("on")]
    drawings(page)


def test_nothing_known_gives_sentences_and_no_empty_chart(tmp_path: Path) -> None:
    page = page_of(tmp_path, bare())
    assert drawings(page) == []
    text = Reader(page).text
    for words in ("Latency distribution: unavailable", "Power over time: unavailable", "Accuracy: unavailable"):
        assert words in text
    assert "Layers and roofline: unavailable" in text


def test_hundred_thousand_points_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    watts = rng.normal(12, 1, 100_000)
    watts[54_321] = 60.0
    series = tuple((index / 10, float(value)) for index, value in enumerate(watts))
    samples = keep_spread(rng.gamma(9, 3, 100_000).tolist(), limit=100_000)
    run = measured(
        power=PowerFigures(mean_w=12.0, source="s", series=series), latency_ms=LatencyFigures(samples=samples)
    )
    page = page_of(tmp_path, *(replace(run, title=f"run {index}") for index in range(4)))
    assert len(page) < 400_000
    figure = power_trace([run])
    assert figure.drawing is not None
    (line,) = (shape.points for shape in figure.drawing.shapes if isinstance(shape, Line) and len(shape.points) > 9)
    assert len(line) <= 600
    assert min(y for _, y in line) < 60, "the one peak of 60 W is still drawn, near the top"


def test_one_point_is_a_mark_and_odd_values_do_not_break_a_chart(tmp_path: Path) -> None:
    one = measured(
        power=PowerFigures(mean_w=7.0, source="s", series=((3.0, 7.0),)),
        latency_ms=LatencyFigures(p50_ms=1.0, samples=(1.0,)),
    )
    figure = power_trace([one])
    assert figure.drawing is not None
    assert sum(isinstance(shape, Dot) for shape in figure.drawing.shapes) == 1
    odd = measured(
        fps=1e280,
        power=PowerFigures(mean_w=1e-280, source="s", series=((0.0, 0.0), (0.0, 0.0), (1e9, 1e280))),
        latency_ms=LatencyFigures(p50_ms=0.0, samples=(0.0, 0.0, 0.0)),
        layers=(
            LayerTime(name="", kind="", time_us=0.0),
            LayerTime(name="a", kind="b", time_us=1e250, flops=1.0, bytes=1e9),
        ),
    )
    page = page_of(tmp_path, one, odd)
    for bad in ("NaN", "nan", "None", "inf,"):
        assert bad not in page
    drawings(page)


def test_power_chart_has_the_budget_line_or_what_the_mode_is_named_after() -> None:
    assert [rule.name for rule in power_rules([measured()])] == ["budget 15 W"]
    assert [rule.name for rule in power_rules([measured(budget=Budget())])] == ["mode 15W"]
    assert power_rules([bare()]) == []


def test_latency_by_batch_joins_runs_that_differ_in_their_batch() -> None:
    runs = [measured(f"b{batch}", batch=batch, by_batch=()) for batch in (1, 2, 4)]
    figure = latency_by_batch(runs)
    assert figure.drawing is not None
    assert sum(isinstance(shape, Dot) for shape in figure.drawing.shapes) == 3
    assert latency_by_batch([bare()]).drawing is None
    mixed = latency_by_batch([*runs, *(replace(run, status="predicted") for run in runs)])
    assert mixed.drawing is not None
    names = [shape.text for shape in mixed.drawing.shapes if isinstance(shape, Text)]
    statuses = [name.rpartition(", ")[2] for name in names]
    assert [status for status in statuses if status in ("measured", "predicted")] == ["measured", "predicted"]


def test_layers_are_the_top_twenty_and_the_rest() -> None:
    figure = layer_bars(measured())
    assert figure.drawing is not None
    boxes = [shape for shape in figure.drawing.shapes if isinstance(shape, Box)]
    assert len(boxes) == 21
    assert "10 other layers" in boxes[-1].hint
    assert "in 30 layers" in figure.caption


def test_roofline_has_its_knee_where_compute_and_memory_meet() -> None:
    figure = roofline(measured(roof=Roof(flops_per_s=1e12, bytes_per_s=1e11)))
    assert "left of 10 operations per byte" in figure.caption
    assert "not known" in roofline(measured(roof=None)).caption
    assert roofline(bare()).drawing is None


def test_front_names_the_runs_that_no_other_beats_in_both() -> None:
    runs = [measured("a"), predicted("b"), measured("c", fps=10.0)]
    assert fps_over_watts(runs).caption.endswith("Beaten in both by no other run: 1, 2.")
    assert "unavailable" in fps_over_watts([measured(), bare()]).caption


def test_distribution_is_of_the_kept_latencies() -> None:
    assert latency_cdf([predicted()]).drawing is None, "a prediction has no distribution"
    assert latency_cdf([measured(f"r{index}") for index in range(11)]).caption.endswith("3 more are not drawn.")


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=20), st.booleans())
def test_scales_put_every_value_between_their_ends(values: list[float], from_zero: bool) -> None:
    for scale in (
        linear_scale(values, start=10, end=110, from_zero=from_zero),
        log_scale([abs(value) for value in values], start=10, end=110),
    ):
        for value in values:
            if scale.is_log and value <= 0:
                continue
            assert 10 <= scale.at(value) <= 110
        assert all(10 <= scale.at(tick) <= 110 for tick in scale.ticks())
        assert len(scale.ticks()) <= 20


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9))
def test_ticks_are_round_and_within(low: float, span: float) -> None:
    ticks = round_ticks(low, low + span)
    assert len(ticks) <= 7
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (12.34, "12.3"),
        (4567.8, "4568"),
        (12_340, "12.3k"),
        (6.7e6, "6.7M"),
        (2e13, "20T"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_picture_is_a_png_with_ink_in_it(tmp_path: Path) -> None:
    hostile = measured(f"{HOSTILE} \u00e9\u4e2d\udcff", power=measured().power)
    path = write_png(tmp_path / "r.png", [hostile, predicted(), bare()], title="\u00b5 t\u00edtle")
    image = cv2.imread(str(path))
    assert image.shape[1] == 2104
    assert 0.02 < float((image < 128).any(axis=2).mean()) < 0.5
    bare_path = write_png(tmp_path / "bare.png", [bare()], title="")
    assert cv2.imread(str(bare_path)).shape[0] < image.shape[0]
    with pytest.raises(SpecError, match=r"r\.jpg"):
        write_png(tmp_path / "r.jpg", [bare()], title="t")


@pytest.mark.skipif(CHROMIUM is None, reason="no headless browser here")
@pytest.mark.parametrize("width", WIDTHS)
def test_page_loads_in_a_browser_without_errors_or_overflow(tmp_path: Path, width: int) -> None:
    """The page's own policy forbids scripts, so the frame around it measures: one of its width, as a phone has."""
    page_of(tmp_path, measured(), predicted(), measured("float " + "x" * 90, fps=9.0))
    frame = (
        f"<body><iframe id=f width={width} height=900 src=report.html></iframe><p id=out></p><script>"
        "f.onload = () => { const d = f.contentDocument.documentElement; "
        "const charts = d.querySelectorAll('svg').length; "
        "out.textContent = 'widths ' + d.scrollWidth + ' ' + d.clientWidth + ' charts ' + charts }"
        "</script>"
    )
    (tmp_path / "frame.html").write_text(frame)
    options = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files"),
        *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000"),
    )
    command = [str(CHROMIUM), *options, "--dump-dom", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "CONSOLE" not in done.stderr
    found = re.search(r"widths (\d+) (\d+) charts (\d+)", done.stdout)
    assert found is not None, done.stdout[-500:]
    assert int(found[1]) <= int(found[2]), "the page is wider than the window"
    assert int(found[3]) >= 6
    assert math.isclose(int(found[2]), width, abs_tol=20)
