"""Power and telemetry of the machine we run on: rails, clocks, temperatures, throttling, energy.

``open_sensor`` finds what this machine has; ``PowerSampler`` reads it in a thread; ``PowerSummary`` holds the mean and
the energy. Unknown is None, never 0; ``require_power`` refuses where a budget would have to pass on unknown.
"""

from edgeds.power.modes import ModeChange, apply_mode_change, plan_mode_change
from edgeds.power.sample import PowerSample, Sensor
from edgeds.power.sampler import PowerSampler
from edgeds.power.sensors import NoSensor, open_sensor, require_power
from edgeds.power.tegralog import LogStats, read_log
from edgeds.power.tegrastats import TegraLine, parse_line
from edgeds.power.total import find_total_rule, module_total
from edgeds.power.trace import PowerSummary, integrate, summarize

__all__ = [
    "LogStats",
    "ModeChange",
    "NoSensor",
    "PowerSample",
    "PowerSampler",
    "PowerSummary",
    "Sensor",
    "TegraLine",
    "apply_mode_change",
    "find_total_rule",
    "integrate",
    "module_total",
    "open_sensor",
    "parse_line",
    "plan_mode_change",
    "read_log",
    "require_power",
    "summarize",
]
