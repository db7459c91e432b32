"""Power of discrete NVIDIA GPUs through the driver's own library (NVML), probed by reading once.

On a Jetson the library starts and lists a GPU, but every power query answers "not supported": that is a reason, not
a reading. Functions and codes: NVML API reference guide.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from edgeds.power.sample import PowerSample

LIBRARY = "libnvidia-ml.so.1"
CODES = {1: "not initialized", 3: "not supported", 4: "no permission", 9: "driver not loaded", 15: "GPU is lost"}
CLOCK_SM, CLOCK_MEM, SENSOR_GPU = 1, 2, 0
THROTTLE = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class NvmlSensor:
    """All GPUs that NVML lists; ``total_mw`` is the sum of their board powers, without the host."""

    is_interval_mean = False

    def __init__(self, *, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self.source = "NVML: GPU board power, the host is not measured"
        self.unavailable: str | None = None
        self._devices: list[ctypes.c_void_p] = []
        self._is_open = False
        try:
            self._lib = load(LIBRARY)
        except OSError:
            self.unavailable = f"no {LIBRARY} here (no NVIDIA driver)"
            return
        self.unavailable = self._open()

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def read(self, t_s: float) -> PowerSample:
        rails: dict[str, float] = {}
        temps: dict[str, float] = {}
        throttle: list[str] = []
        for index, device in enumerate(self._devices):
            power = self._uint("nvmlDeviceGetPowerUsage", device)
            if power is not None:
                rails[f"GPU{index}"] = float(power)
            temperature = self._uint("nvmlDeviceGetTemperature", device, SENSOR_GPU)
            if temperature is not None:
                temps[f"gpu{index}"] = float(temperature)
            throttle += [f"GPU{index} {why}" for why in self._reasons(device)]
        first = self._devices[0] if self._devices else None
        # Every GPU or nothing, as for the rails of a module.
        total = sum(rails.values()) if rails and len(rails) == len(self._devices) else None
        return PowerSample(
            t_s=t_s,
            rails_mw=rails,
            total_mw=total,
            gpu_load_pct=self._load_pct(first),
            gpu_mhz=self._uint("nvmlDeviceGetClockInfo", first, CLOCK_SM),
            emc_mhz=self._uint("nvmlDeviceGetClockInfo", first, CLOCK_MEM),
            temps_c=temps,
            throttle=tuple(throttle) if hasattr(self._lib, "nvmlDeviceGetCurrentClocksThrottleReasons") else None,
        )

    def close(self) -> None:
        """Let go of the library. May be called twice."""
        if self._is_open:
            self._is_open = False
            self._devices = []
            self._lib.nvmlShutdown()

    def _open(self) -> str | None:
        try:
            code = int(self._lib.nvmlInit_v2())
            if code:
                return f"NVML does not start: {_text(code)}"
            self._is_open = True
            count = ctypes.c_uint()
            code = int(self._lib.nvmlDeviceGetCount_v2(ctypes.byref(count)))
            for index in range(0 if code else count.value):
                device = ctypes.c_void_p()
                code = int(self._lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)))
                if code:
                    break
                self._devices.append(device)
            if code or not self._devices:
                return f"NVML lists no usable GPU: {_text(code) if code else 'none'}"
            value = ctypes.c_uint()
            code = int(self._lib.nvmlDeviceGetPowerUsage(self._devices[0], ctypes.byref(value)))
        except AttributeError as error:  # a library without these functions
            return f"{LIBRARY} is too old: {error}"
        return f"NVML gives no power: {_text(code)}" if code else None

    def _uint(self, function: str, device: ctypes.c_void_p | None, *arguments: int) -> int | None:
        value = ctypes.c_uint()
        if device is None or not hasattr(self._lib, function):
            return None
        call = getattr(self._lib, function)
        code = int(call(device, *(ctypes.c_uint(argument) for argument in arguments), ctypes.byref(value)))
        return None if code else value.value

    def _load_pct(self, device: ctypes.c_void_p | None) -> float | None:
        if device is None or not hasattr(self._lib, "nvmlDeviceGetUtilizationRates"):
            return None
        value = _Utilization()
        code = int(self._lib.nvmlDeviceGetUtilizationRates(device, ctypes.byref(value)))
        return None if code else float(value.gpu)

    def _reasons(self, device: ctypes.c_void_p) -> list[str]:
        if not hasattr(self._lib, "nvmlDeviceGetCurrentClocksThrottleReasons"):
            return []
        value = ctypes.c_ulonglong()
        code = int(self._lib.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(value)))
        return [] if code else [name for bit, name in THROTTLE.items() if value.value & bit]


def _text(code: int) -> str:
    return f"{CODES.get(code, 'error')} (code {code})"
