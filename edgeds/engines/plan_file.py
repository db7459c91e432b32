"""Split a TensorRT engine file into its optional JSON header and the plan.

Two layouts exist: the bare plan, and (as Ultralytics writes it) a 4-byte little-endian signed length, that many bytes
of UTF-8 JSON, then the plan. Nothing but the header is read into memory.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from edgeds.errors import ModelError
from edgeds.files import open_regular

PLAN_MAGICS = (b"ftrt", b"ptrt", b"vtrt")
"""First bytes of TensorRT plans: TensorRT, its older form, and TensorRT-RTX."""

MAX_HEADER_BYTES = 4 << 20


def split_engine(path: str | Path) -> tuple[dict[str, str], int, int]:
    """Return (metadata, plan_offset_bytes, plan_length_bytes) of an engine file.

    Metadata values are strings (non-strings as JSON); a bare plan gives ``{}`` and offset 0. Raises ModelError for an
    empty file, a length that is negative or larger than the file, a header that is not a JSON object, or no plan.
    """
    path = Path(path)
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            head = stream.read(4)
            if head in PLAN_MAGICS:
                return {}, 0, size
            if size == 0:
                raise ModelError(f"{path}: the file is empty; export or build the engine again")
            if size < 8:
                raise ModelError(f"{path}: {size} bytes are too few for an engine; export or build it again")
            length = struct.unpack("<i", head)[0]
            if length <= 0 or length > size - 4:
                raise ModelError(
                    f"{path}: not a TensorRT engine: it starts with neither a plan nor a valid header length "
                    f"(read {length}, the file has {size} bytes); build the engine again from its ONNX"
                )
            if length > MAX_HEADER_BYTES:
                raise ModelError(f"{path}: engine header of {length} bytes is more than the {MAX_HEADER_BYTES} allowed")
            raw = stream.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    if size == 4 + length:
        raise ModelError(f"{path}: the engine header is there but no plan follows it; the file is cut short")
    try:
        header = json.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: the {length}-byte engine header is not valid JSON; the file is damaged") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the engine header is JSON but not an object; the file is damaged")
    metadata = {
        str(key): value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in header.items()
    }
    return metadata, 4 + length, size - 4 - length
