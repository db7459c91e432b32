"""Time per layer on the CPU, by ONNX Runtime's own profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.engines.base import one_line
from edgeds.engines.onnxruntime import import_onnxruntime
from edgeds.errors import ModelError
from edgeds.files import read_json

MAX_TRACE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class OrtLayer:
    """One node that ONNX Runtime ran (nodes of the model may be fused into it): its mean time of one run."""

    name: str
    op: str
    time_us: float


def profile_onnx(
    path: Path, feeds: Mapping[str, np.ndarray], *, threads: int | None = None, runs: int = 10
) -> tuple[OrtLayer, ...]:
    """Run the model ``runs`` times after two to settle, and give each node's mean kernel time, in order of execution.

    Raises MissingDependency without onnxruntime, ModelError when the model does not load or run on ``feeds``.
    """
    ort = import_onnxruntime()
    with tempfile.TemporaryDirectory(prefix="edgeds-profile-") as folder:
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "trace")
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            for _ in range(2 + runs):
                session.run(None, dict(feeds))
            trace = read_json(Path(session.end_profiling()), max_bytes=MAX_TRACE_BYTES)
        except (RuntimeError, ValueError, TypeError) as error:  # the runtime's own errors derive from these
            raise ModelError(f"{path}: cannot be profiled: {one_line(error)}") from error
    return parse_trace(trace, skip=2)


def parse_trace(trace: Any, *, skip: int = 0) -> tuple[OrtLayer, ...]:
    """Nodes of a trace with their mean time; the first ``skip`` runs of each are left out. Raises ModelError."""
    if not isinstance(trace, list):
        raise ModelError("the trace of ONNX Runtime is not a list of events; is this another version?")
    times: dict[str, list[float]] = {}
    ops: dict[str, str] = {}
    for event in trace:
        if not isinstance(event, Mapping) or event.get("cat") != "Node":
            continue
        name = str(event.get("name", ""))
        if not name.endswith("_kernel_time"):
            continue
        name = name.removesuffix("_kernel_time")
        times.setdefault(name, []).append(float(event.get("dur", 0)))
        ops[name] = str((event.get("args") or {}).get("op_name", "?"))
    kept = {name: values[skip:] or values for name, values in times.items()}
    return tuple(OrtLayer(name=name, op=ops[name], time_us=sum(values) / len(values)) for name, values in kept.items())
