"""The parts of a new bundle, gathered before anything is written: float and INT8 models, golden samples, costs."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from edgeds.bundle.manifest import MANIFEST_NAME
from edgeds.bundle.temporary import TemporaryFolder
from edgeds.compress.accuracy_limit import Limit
from edgeds.compress.calibset import CalibrationSet, Feeds
from edgeds.compress.quantize import QuantizeReport, quantize_model
from edgeds.graph.cost import count_cost
from edgeds.graph.io import load_model, save_model
from edgeds.graph.session import open_session
from edgeds.progress import stage
from edgeds.specs import to_json
from edgeds.workshop.halfmodels import NAMES as HALF_NAMES
from edgeds.workshop.halfmodels import make_half_models
from edgeds.workshop.measure import measure_speedup
from edgeds.workshop.outfolder import writing_errors

FLOAT_NAME = "variants/float.onnx"
MAX_GOLDEN_BYTES = 256 << 20
"""Golden samples are there to compare a device with; very large ones are left out."""

Files = dict[str, Path | bytes]


@dataclass
class BundleParts:
    """What goes into the bundle, gathered before anything is written."""

    files: Files
    models: dict[str, str]
    report: QuantizeReport | None = None
    notes: list[str] = field(default_factory=list)
    accuracy: dict[str, Any] = field(default_factory=dict)
    speedup: float | None = None

    def path(self, variant: str) -> Path:
        """Where the file of a model variant lies before it is packed."""
        content = self.files[self.models[variant]]
        assert isinstance(content, Path)
        return content


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """A temporary folder; what the file system refuses (it may be small) ends in one sentence that names it."""
    with writing_errors(Path(tempfile.gettempdir())), contextlib.ExitStack() as stack:
        folder = TemporaryFolder()  # its kind is removed by the next run when this one is killed
        stack.callback(folder.remove)
        yield folder.root


def bundle_entries(out: Path) -> set[str]:
    """What an older bundle at ``out`` may hold at its top; nothing when there is no manifest."""
    with writing_errors(out):
        return {item.name for item in out.iterdir()} if (out / MANIFEST_NAME).is_file() else set()


def float_parts(model: ModelProto, folder: Path, *, name: str) -> BundleParts:
    """A self-contained copy under its name in the bundle."""
    return BundleParts(files=with_side_file(save_model(model, folder / "copy" / name), name), models={"float": name})


def with_side_file(path: Path, name: str) -> Files:
    """The file under its name in the bundle, and what lies beside it."""
    side = path.with_name(f"{path.name}.data")
    return {name: path, **({f"{name}.data": side} if side.exists() else {})}  # weights above 1 GiB lie beside it


def quantize_parts(
    parts: BundleParts,
    source: Path,
    calibration: CalibrationSet,
    folder: Path,
    *,
    method: str,
    percentile: float,
    limit: Limit | None = None,
    target: str | None = None,
    quiet: bool = False,
) -> None:
    """Add the INT8 models, their ranges, golden samples and what was measured of them."""
    parts.models = {"int8": "model.onnx", "cpu_int8": "model.cpu.onnx", **parts.models}
    parts.report = quantize_model(
        source,
        calibration,
        out=folder / "model.onnx",
        cpu_out=folder / "model.cpu.onnx",
        method=method,
        percentile=percentile,
        limit=limit,
        target=target,
        quiet=quiet,
    )
    for name in ("model.onnx", "model.cpu.onnx"):
        parts.files |= with_side_file(folder / name, name)
    parts.files["ranges.json"] = Path(parts.report.ranges)
    parts.accuracy |= {"sqnr_db": parts.report.sqnr_db, "cpu_sqnr_db": parts.report.cpu_sqnr_db}
    feeds = parts.report.checked_feeds
    with stage("running golden samples", quiet=quiet):
        models = {label: open_session(parts.path(label)) for label in ("float", "int8")}
        golden = golden_bytes(feeds, models)
        if golden is not None:
            parts.files["golden.npz"] = golden
    with stage("timing INT8 against float", quiet=quiet):
        parts.speedup = measure_speedup(parts.path("float"), parts.path("cpu_int8"), feeds[0])
    half = make_half_models(
        parts.path("float"),
        parts.path("int8"),
        ranges=Path(parts.report.ranges),
        feeds=feeds,
        folder=folder / "half",
        quiet=quiet,
    )
    for variant, path in half.paths.items():
        parts.models[variant] = HALF_NAMES[variant]
        parts.files |= with_side_file(path, HALF_NAMES[variant])
    parts.accuracy |= half.accuracy
    parts.notes += half.notes


def golden_bytes(feeds: Sequence[Feeds], sessions: Mapping[str, Any]) -> bytes | None:
    """``golden.npz``: arrays ``input/<sample>/<name>`` and ``<label>/<sample>/<output>`` for the label of each ONNX
    Runtime session (float, int8, int4). None when not even one sample is small enough."""
    golden: dict[str, np.ndarray] = {}
    left = MAX_GOLDEN_BYTES
    for index, sample in enumerate(feeds):
        arrays = {f"input/{index}/{name}": array for name, array in sample.items()}
        for label, session in sessions.items():
            outputs = [value.name for value in session.get_outputs()]
            needed = {value.name for value in session.get_inputs()}
            values = session.run(outputs, {name: array for name, array in sample.items() if name in needed})
            arrays |= {f"{label}/{index}/{name}": value for name, value in zip(outputs, values, strict=True)}
        left -= sum(array.nbytes for array in arrays.values() if isinstance(array, np.ndarray))
        if left < 0:
            break
        # Only plain numbers are read back: text and sequences are left out.
        golden |= {name: a for name, a in arrays.items() if isinstance(a, np.ndarray) and a.dtype.kind in "biufc"}
    return _npz_bytes(golden) if golden else None


def count_parts(parts: BundleParts, *, shapes: Any) -> dict[str, Any]:
    """Per-layer costs of what the device runs, also put among the files."""
    model = load_model(parts.path("int8" if "int8" in parts.models else "float"))
    cost: dict[str, Any] = to_json(count_cost(model, shapes))
    parts.files["cost.json"] = json_bytes(cost)
    return cost


def json_bytes(data: Any) -> bytes:
    """A file of the bundle."""
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def _npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
