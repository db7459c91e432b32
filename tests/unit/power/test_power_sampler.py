"""Mean and energy against closed forms, gaps, failing readers, and a sampler that always stops."""

import itertools
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeds.errors import SensorUnavailable, SpecError
from edgeds.power import PowerSample, PowerSampler, integrate, summarize


class FakeSensor:
    """Power as a function of time; an exception instead of a number is raised."""

    source = "fake"
    is_interval_mean = False
    unavailable: str | None = None
    notes: tuple[str, ...] = ()

    def __init__(self, power_mw: Callable[[float], float | Exception | None]) -> None:
        self.power_mw = power_mw

    def read(self, t_s: float) -> PowerSample:
        value = self.power_mw(t_s)
        if isinstance(value, Exception):
            raise value
        return PowerSample(t_s=t_s, total_mw=value, rails_mw={} if value is None else {"VDD_IN": value})

    def close(self) -> None: ...


class FakeTime:
    """A clock that the sampler's waits move on; the thread runs through a fixed number of turns at once."""

    def __init__(self, end_s: float, *, slow_s: float = 0.0) -> None:
        self.now = 100.0
        self.end = 100.0 + end_s
        self.slow_s = slow_s
        self.done = threading.Event()

    def clock(self) -> float:
        return self.now

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        if self.now + seconds > self.end + 1e-9:
            self.done.set()
            return stop.wait(5)
        self.now += seconds + self.slow_s
        return stop.is_set()


def run_sampler(
    power: Callable[[float], float | Exception | None], *, end_s: float, interval_s: float = 0.1
) -> PowerSampler:
    fake = FakeTime(end_s)
    sampler = PowerSampler(FakeSensor(power), interval_s=interval_s, clock=fake.clock, wait=fake.wait).start()
    assert fake.done.wait(5)
    sampler.stop()
    return sampler


def test_mean_and_energy_of_a_ramp_are_exact() -> None:
    """Power from 4 to 6 W in two seconds: mean 5 W, 10 J, whatever the pace."""
    summary = run_sampler(lambda t: 4000 + 1000 * t, end_s=2.0).summary()
    assert summary.mean_w == pytest.approx(5.0)
    assert summary.energy_j == pytest.approx(10.0)
    assert summary.peak_w == pytest.approx(6.0)
    assert summary.coverage == pytest.approx(1.0)
    assert (summary.gaps, summary.unknown, summary.failures) == (0, 0, 0)
    assert summary.rails_mean_mw["VDD_IN"] == pytest.approx(5000)


def test_the_sampler_survives_what_the_reader_throws() -> None:
    """Failures are counted, the time without readings is a gap, and the mean is of what is known."""

    def power(t_s: float) -> float | Exception:
        return OSError(5, "Input/output error") if 0.95 < t_s < 2.05 else 5000.0

    summary = run_sampler(power, end_s=3.0).summary()
    assert summary.failures == 11
    assert summary.gaps == 1
    assert summary.mean_w == pytest.approx(5.0)
    assert summary.energy_j == pytest.approx(5.0 * summary.covered_s)
    assert summary.covered_s == pytest.approx(1.8, abs=0.01)
    assert "Input/output" in summary.notes[0]


@pytest.mark.parametrize("error", [SensorUnavailable("gone"), ValueError("odd"), PermissionError(13, "no")])
def test_nothing_but_failures_is_unknown_never_0(error: Exception) -> None:
    summary = run_sampler(lambda t: error, end_s=1.0).summary()
    assert (summary.mean_w, summary.energy_j, summary.peak_w) == (None, None, None)
    assert summary.failures == 12  # eleven on the grid and the last one, at the stop


def test_samples_without_total_are_counted() -> None:
    summary = run_sampler(lambda t: None, end_s=1.0).summary()
    assert (summary.mean_w, summary.unknown, summary.samples) == (None, 12, 12)


def test_slow_readings_keep_the_grid() -> None:
    """A reading that takes longer than the interval skips turns instead of piling them up."""
    fake = FakeTime(2.0, slow_s=0.25)
    sampler = PowerSampler(FakeSensor(lambda t: 1000.0), interval_s=0.1, clock=fake.clock, wait=fake.wait).start()
    assert fake.done.wait(5)
    summary = sampler.stop()
    assert summary.samples <= 12  # of 21 turns
    assert summary.energy_j is None or summary.energy_j <= 2.3


def test_stop_is_prompt_and_may_be_repeated() -> None:
    sampler = PowerSampler(FakeSensor(lambda t: 1000.0), interval_s=60).start()
    with pytest.raises(SpecError, match="runs already"):
        sampler.start()
    begin = time.monotonic()
    first = sampler.stop()
    assert time.monotonic() - begin < 2
    assert first.samples == 2  # at the start and at the end
    assert sampler.stop() == first
    assert not [thread for thread in threading.enumerate() if thread.name == "edgeds-power"]


def test_an_exception_in_the_measured_work_stops_the_thread() -> None:
    with pytest.raises(RuntimeError), PowerSampler(FakeSensor(lambda t: 1.0), interval_s=0.01):
        raise RuntimeError("work failed")
    assert not [thread for thread in threading.enumerate() if thread.name == "edgeds-power"]


@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf"), 1e9])
def test_impossible_intervals_are_refused(interval: float) -> None:
    with pytest.raises(SpecError, match="interval_s"):
        PowerSampler(FakeSensor(lambda t: 1.0), interval_s=interval)


steps = st.lists(st.tuples(st.floats(0.01, 0.3), st.floats(0, 50)), min_size=2, max_size=40)


@given(steps)
def test_integral_equals_numpy_where_there_are_no_gaps(parts: list[tuple[float, float]]) -> None:
    times = np.cumsum([step for step, _ in parts])
    values = np.array([value for _, value in parts])
    area, covered, gaps = integrate(list(zip(times.tolist(), values.tolist(), strict=True)), max_gap_s=1.0)
    assert gaps == 0
    assert covered == pytest.approx(times[-1] - times[0])
    assert area == pytest.approx(float(np.sum((values[1:] + values[:-1]) / 2 * np.diff(times))), abs=1e-9)


@given(steps, st.floats(0.05, 0.2))
def test_time_is_either_covered_or_a_gap(parts: list[tuple[float, float]], limit: float) -> None:
    times = np.cumsum([step for step, _ in parts]).tolist()
    values = [value for _, value in parts]
    area, covered, gaps = integrate(list(zip(times, values, strict=True)), max_gap_s=limit)
    long = [b - a for a, b in itertools.pairwise(times) if b - a > limit]
    assert gaps == len(long)
    assert covered + sum(long) == pytest.approx(times[-1] - times[0])
    assert 0 <= area <= max(values) * covered + 1e-9


def test_uneven_samples_are_weighted_by_time() -> None:
    """Nine quick samples at 10 W and one slow second at 2 W are not 9.2 W."""
    points = [(0.01 * i, 10.0) for i in range(10)] + [(0.1, 2.0), (1.09, 2.0)]
    samples = [PowerSample(t_s=t, total_mw=w * 1000) for t, w in points]
    summary = summarize(samples, source="x", interval_s=0.5)
    assert summary.mean_w is not None
    assert 2.6 < summary.mean_w < 3.0


def test_interval_means_are_integrated_as_such() -> None:
    """A counter that gave 2 J in the first second and 4 J in the next has given 6 J, not a trapezoid of it."""
    samples = [PowerSample(t_s=0), PowerSample(t_s=1, total_mw=2000), PowerSample(t_s=2, total_mw=4000)]
    known = summarize([PowerSample(t_s=0, total_mw=0.0), *samples[1:]], source="x", interval_s=1, is_interval_mean=True)
    assert known.energy_j == pytest.approx(6.0)


def test_over_current_counts_are_differences_and_throttling_is_collected() -> None:
    samples = [
        PowerSample(t_s=0, oc_events={"oc1": 2, "oc3": 100}),
        PowerSample(t_s=1, oc_events=None, throttle=("thermal cpu",)),
        PowerSample(t_s=2, oc_events={"oc1": 2, "oc3": 107}, throttle=("thermal cpu", "over-current VDD_IN")),
    ]
    summary = summarize(samples, source="x", interval_s=1)
    assert summary.oc_events == {"oc3": 7}
    assert summary.throttle == ("thermal cpu", "over-current VDD_IN")


def test_no_samples_at_all() -> None:
    summary = summarize([], source="x", interval_s=1)
    assert (summary.mean_w, summary.coverage, summary.duration_s) == (None, 0, 0)
