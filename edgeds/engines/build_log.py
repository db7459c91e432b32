"""TensorRT's log, the only place where most of its failures are told: one logger per process that fans out.

TensorRT ignores a second logger while any object made with the first one lives, so there is exactly one per module
for the life of the process. Who wants to read it opens a ``LogTap``. Everything also goes to ``logging`` under
``edgeds.tensorrt``.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

LOGGER = logging.getLogger("edgeds.tensorrt")

LEVELS = {
    "INTERNAL_ERROR": logging.ERROR,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.DEBUG,  # TensorRT's "info" is what others call debug: dozens of lines for each build
    "VERBOSE": logging.NOTSET,
}
ERRORS = ("INTERNAL_ERROR", "ERROR")

# Told after every other error on a machine without a GPU; it is never the cause.
NOISE = re.compile(r"cudaError 35|CUDA initialization failure with error: 35|checkMacros\.cpp::catchCudaError")

# Warnings that mean a useless or wrong engine, although the build goes on and "succeeds".
FATAL_WARNINGS = re.compile(r"not self-consistent|Defaulting to INT8 instead", re.IGNORECASE)

MAX_LINES = 200_000
"""Lines a tap keeps. A build of a detector writes about ten thousand; this bounds what a broken one can take."""

MAX_TOLD = 10_000
"""Distinct warnings remembered so that each is logged once; beyond that many they are logged as they come."""

_lock = threading.Lock()
_told: set[str] = set()
_taps: list[LogTap] = []
_loggers: dict[str, Any] = {}


class LogTap:
    """Lines written while it is open, as (severity, text). Safe to read from any thread."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, str]] = []
        self.dropped = 0

    def add(self, severity: str, text: str) -> None:
        if len(self._lines) < MAX_LINES:
            self._lines.append((severity, text))
        else:
            self.dropped += 1

    @property
    def lines(self) -> list[tuple[str, str]]:
        return list(self._lines)

    def errors(self) -> list[str]:
        """Errors, and warnings that make the engine useless, in order, without repetition and noise."""
        found = [
            clean(text)
            for severity, text in self.lines
            if (severity in ERRORS and not NOISE.search(text)) or FATAL_WARNINGS.search(text)
        ]
        return list(dict.fromkeys(found))

    def fatal_warnings(self) -> list[str]:
        return list(dict.fromkeys(clean(text) for _, text in self.lines if FATAL_WARNINGS.search(text)))

    def warnings(self) -> list[str]:
        """Warnings in order, each once."""
        found = [clean(text) for severity, text in self.lines if severity == "WARNING" and not NOISE.search(text)]
        return list(dict.fromkeys(found))

    def clear(self) -> None:
        self._lines.clear()


@contextlib.contextmanager
def tap_log() -> Iterator[LogTap]:
    """Collect what TensorRT writes until the block ends."""
    tap = LogTap()
    with _lock:
        _taps.append(tap)
        _told.clear()  # each build tells its warnings, once
    try:
        yield tap
    finally:
        with _lock:
            # By identity: two taps are never equal in meaning, however alike their lines are.
            _taps[:] = [other for other in _taps if other is not tap]


def process_logger(trt: ModuleType) -> Any:
    """The ``trt.ILogger`` of this process for that module; made once, kept for ever."""
    with _lock:
        key = f"{trt.__name__} {trt.__version__} {id(trt)}"
        if key not in _loggers:
            _loggers[key] = _make_logger(trt)
        return _loggers[key]


def clean(text: str) -> str:
    """One line without the source position and error numbers that TensorRT puts in front."""
    text = " ".join(text.split())
    text = re.sub(r"^\[?(?:IBuilder|INetworkDefinition|IOptimizationProfile|IBuilderConfig)::\w+: ?", "", text)
    text = re.sub(r"Error Code:? ?\d+: (?:\w+ ?\w* )?\((.*)\)\]?$", r"\1", text)
    return text if len(text) <= 600 else f"{text[:400]} ... {text[-190:]}"


def _make_logger(trt: ModuleType) -> Any:
    class ProcessLogger(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # pybind classes must be initialised by name

        def log(self, severity: Any, msg: str) -> None:
            _hand_out(getattr(severity, "name", str(severity)), msg)

    return ProcessLogger()


def _hand_out(severity: str, text: str) -> None:
    # Called from C++, often from its own threads: nothing here may raise, and the lock is held for a copy only.
    level = LEVELS.get(severity, logging.INFO)
    with _lock:
        taps = list(_taps)
        # RTX repeats some warnings once for each layer; the taps keep them all, people read them once.
        told = severity == "WARNING" and text in _told
        if severity == "WARNING" and len(_told) < MAX_TOLD:
            _told.add(text)
    for tap in taps:
        tap.add(severity, text)
    if level and not told and LOGGER.isEnabledFor(level) and not NOISE.search(text):
        LOGGER.log(level, "%s", clean(text))
