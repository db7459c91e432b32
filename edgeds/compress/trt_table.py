"""TensorRT calibration tables, as implicit INT8 of TensorRT 10 and older reads and writes them, and our ranges.

A table is text: a header ``TRT-<version>-<algorithm>``, then ``<tensor>: <float32 scale as 8 hexadecimal digits, most
significant byte first>`` per tensor, where scale = range / 127 (TensorRT developer guide, INT8 calibration; the form of
the version number as in tables of 7.0, 8.6 and 10.7).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeds.compress.ranges import TensorRange
from edgeds.errors import CalibrationError, SpecError
from edgeds.files import open_regular, write_text

MAX_TABLE_BYTES = 64 * 2**20
ALGORITHM = "EntropyCalibration2"
"""What trtexec's own calibrator is called: tables with this header are taken by ``trtexec --calib`` without more."""

_HEADER = re.compile(r"TRT-(\d+)-([A-Za-z]\w*)")
_HEX = re.compile(r"[0-9a-fA-F]{8}")


@dataclass(frozen=True, kw_only=True)
class TrtTable:
    """One table: the number in its header (``100300`` for 10.3.0), the calibrator's name, int8 steps by tensor."""

    version: int
    algorithm: str
    scales: dict[str, float]

    def ranges(self) -> dict[str, TensorRange]:
        """The scales as ranges. A table has one symmetric range per tensor: minimum and maximum are its two ends."""
        found = {}
        for name, scale in self.scales.items():
            threshold = scale * 127
            found[name] = TensorRange(threshold=threshold, minimum=-threshold, maximum=threshold, count=0)
        return found


def version_number(text: str) -> int:
    """``10.3`` or ``8.6.1`` as TensorRT writes it in the header: 100300, 8601. Raises SpecError."""
    parts = text.split(".")
    if not 1 <= len(parts) <= 3 or not all(part.isascii() and part.isdigit() and len(part) <= 2 for part in parts):
        raise SpecError(f"TensorRT version {text!r}: give it like 10.3 or 8.6.1")
    major, minor, patch = ([int(part) for part in parts] + [0, 0])[:3]
    if not 1 <= major <= 10:
        raise SpecError(
            f"TensorRT version {text!r}: calibration tables exist up to 10; newer ones read ranges from the Q/DQ model"
        )
    if major == 10:
        return 10_000 * major + 100 * minor + patch
    if minor > 9:
        raise SpecError(f"TensorRT version {text!r}: there is no such release")
    return 1_000 * major + 100 * minor + patch


def write_table(
    ranges: Mapping[str, TensorRange], path: Path, *, version: str = "10.3", algorithm: str = ALGORITHM
) -> tuple[str, ...]:
    """Write the ranges as a table, atomically; returns the tensors left out (they have no usable range).

    Raises SpecError for an impossible version, for names with line breaks, and when the file cannot be written.
    """
    lines, left_out = [f"TRT-{version_number(version)}-{algorithm}"], []
    for name, known in ranges.items():
        if known.note is not None:
            left_out.append(name)
            continue
        if "\n" in name or "\r" in name:
            raise SpecError(f"{path}: tensor {name!r} has a line break in its name, which a table cannot hold")
        lines.append(f"{name}: {_to_hex(known.scale)}")
    try:
        write_text(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise SpecError(f"{path}: cannot be written to: {error.strerror or error}") from error
    return tuple(left_out)


def is_table(path: Path) -> bool:
    """Whether the file starts as a calibration table does; False also when it cannot be read."""
    try:
        with open_regular(path) as stream:
            return stream.read(4) == b"TRT-"
    except OSError:
        return False


def read_table(path: Path) -> TrtTable:
    """Read a table. Raises CalibrationError that names the line: header, scale, duplicate tensor, size, encoding."""
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_TABLE_BYTES + 1)
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_TABLE_BYTES:
        raise CalibrationError(f"{path}: larger than {MAX_TABLE_BYTES >> 20} MiB; this is no calibration table")
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not UTF-8 text at byte {error.start}; this is no calibration table") from error
    lines = [line.removesuffix("\r") for line in lines]  # tables are copied through Windows machines too
    header = _HEADER.fullmatch(lines[0].strip())
    if header is None:
        shown = lines[0][:60]
        raise CalibrationError(f"{path}, line 1: expected a header like TRT-100300-{ALGORITHM}, got {shown!r}")
    scales: dict[str, float] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        name, scale = _parse_line(line, where=f"{path}, line {number}")
        if name in scales:
            raise CalibrationError(f"{path}, line {number}: tensor '{name}' stands there twice")
        scales[name] = scale
    if not scales:
        raise CalibrationError(f"{path}: the table holds no tensors")
    return TrtTable(version=int(header[1]), algorithm=header[2], scales=scales)


def _parse_line(line: str, *, where: str) -> tuple[str, float]:
    # Names of tensors may hold colons and blanks ("(Unnamed Layer* 3) [Shuffle]_output", "x:0"): the last colon counts.
    name, colon, digits = line.rpartition(":")
    digits = digits.strip()
    if not colon or not name or _HEX.fullmatch(digits) is None:
        raise CalibrationError(f"{where}: expected 'tensor: 8 hexadecimal digits', got {line[:80]!r}")
    scale = struct.unpack(">f", bytes.fromhex(digits))[0]
    if not math.isfinite(scale) or scale <= 0:
        raise CalibrationError(f"{where}: the scale of '{name}' is {scale}; scales are finite and above 0")
    return name, scale


def _to_hex(scale: float) -> str:
    # A step below the smallest normal float32 would be read as 0, and one above the largest cannot be packed.
    smallest, largest = 2.0**-126, (2 - 2.0**-23) * 2.0**127
    return struct.pack(">f", min(max(scale, smallest), largest)).hex()
