"""A Jetson as a sensor: rails and telemetry from sysfs, or the lines of a running tegrastats."""

from __future__ import annotations

import collections
import contextlib
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from edgeds.power.rails import RailReader, find_rails
from edgeds.power.sample import PowerSample
from edgeds.power.tegrastats import TegraLine, parse_line, to_sample
from edgeds.power.telemetry import Telemetry
from edgeds.power.total import find_total_rule, module_total

STALE_FACTOR = 3.0
MIN_STALE_S = 1.0


class TegraSensor:
    """Rails of the INA chips (module power by the board's rule) and everything else that sysfs tells."""

    is_interval_mean = False

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        total_rails: tuple[str, ...] | None = None,
        read: Callable[[Path], int] | None = None,
    ) -> None:
        self.reader = RailReader(find_rails(root), read=read)
        self.telemetry = Telemetry(root)
        names = [rail.name for rail in self.reader.rails]
        self.rule = total_rails or find_total_rule(names)
        chips = sorted({rail.chip for rail in self.reader.rails})
        what = " + ".join(self.rule) if self.rule else "no known rule for the total"
        self.source = f"{'/'.join(chips) or 'sysfs'}: {what}"
        self.unavailable = self._probe()

    @property
    def notes(self) -> tuple[str, ...]:
        return self.reader.notes

    def read(self, t_s: float) -> PowerSample:
        rails = self.reader.read_mw()
        total, _ = module_total(rails, self.rule)
        values = self.telemetry.read()
        alarms = self.reader.read_alarms()
        if alarms is not None:
            values["throttle"] = (*(values["throttle"] or ()), *alarms)
        return PowerSample(t_s=t_s, rails_mw=rails, total_mw=total, **values)

    def close(self) -> None:
        """Nothing is held open."""

    def _probe(self) -> str | None:
        """Read once: what does not answer now is reported before a measurement starts."""
        if not self.reader.rails:
            return "no INA3221 or INA238 rails under /sys/class/hwmon"
        total, reason = module_total(self.reader.read_mw(), self.rule)
        if total is None and self.notes:
            return f"{reason}; {self.notes[0]}"
        return reason


class TegrastatsSensor:
    """Follows a tegrastats process: for kernels whose hwmon files only root may read."""

    is_interval_mean = False

    def __init__(
        self,
        *,
        total_rails: tuple[str, ...] | None = None,
        interval_s: float = 0.5,
        command: tuple[str, ...] = ("tegrastats",),
        clock: Callable[[], float],
        first_line_s: float = 3.0,
    ) -> None:
        self.rule = total_rails
        self._clock = clock
        self._stale_s = max(MIN_STALE_S, STALE_FACTOR * interval_s)
        self._latest: collections.deque[tuple[float, TegraLine]] = collections.deque(maxlen=1)
        self._first = threading.Event()
        self.unavailable: str | None = None
        self.source = "tegrastats"
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [*command, "--interval", str(max(50, round(interval_s * 1000)))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            self._process = None
            self.unavailable = f"{command[0]} cannot be started: {error.strerror or error}"
            return
        assert self._process.stdout is not None  # asked for just above
        self._thread = threading.Thread(target=self._follow, args=(self._process.stdout,), daemon=True)
        self._thread.start()
        self._first.wait(first_line_s)
        sample = self.read(clock())
        if sample.total_mw is None:
            _, reason = module_total(sample.rails_mw, self.rule)
            self.unavailable = f"{command[0]} gives no module power: {reason}"

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def read(self, t_s: float) -> PowerSample:
        """The latest line; one that is too old counts as no reading."""
        if not self._latest:
            return PowerSample(t_s=t_s)
        seen_s, line = self._latest[0]
        if self._clock() - seen_s > self._stale_s:
            return PowerSample(t_s=t_s)
        return to_sample(line, t_s=t_s, total_rails=self.rule)

    def close(self) -> None:
        """Stop the process. May be called twice."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(timeout=2)
        if self._process.stdout is not None:
            with contextlib.suppress(OSError):
                self._process.stdout.close()

    def _follow(self, stream: IO[bytes]) -> None:
        for raw in iter(lambda: stream.readline(16384), b""):
            line = parse_line(raw.decode("utf-8", "replace"))
            if line is not None:
                self._latest.append((self._clock(), line))
                self._first.set()
        self._first.set()  # the process ended: nobody needs to wait any longer
