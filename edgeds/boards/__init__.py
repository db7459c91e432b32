"""What the device is: Orin modules and power modes with their sources, and a probe of the machine we run on.

``load_catalogue`` gives all boards, ``resolve_target`` reads what people type (``agx-orin-64gb@30W``, ``jetson``),
``probe_machine`` looks at this machine. Unknown facts are None: nothing is guessed.
"""

from edgeds.boards.catalogue import Catalogue, load_catalogue
from edgeds.boards.memory import MemoryReading, read_memory
from edgeds.boards.nvpmodel import ModeReading, NvpmodelConf, parse_nvpmodel_conf, power_modes, read_power_mode
from edgeds.boards.probe import MachineProbe, probe_machine
from edgeds.boards.spec import BoardSpec, GpuArch, PowerMode, Target, ThermalLimits, missing_facts, peak_tops
from edgeds.boards.targets import resolve_target

__all__ = [
    "BoardSpec",
    "Catalogue",
    "GpuArch",
    "MachineProbe",
    "MemoryReading",
    "ModeReading",
    "NvpmodelConf",
    "PowerMode",
    "Target",
    "ThermalLimits",
    "load_catalogue",
    "missing_facts",
    "parse_nvpmodel_conf",
    "peak_tops",
    "power_modes",
    "probe_machine",
    "read_memory",
    "read_power_mode",
    "resolve_target",
]
