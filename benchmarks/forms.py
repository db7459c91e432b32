"""The three forms of a detector that are compared: float, INT8 for TensorRT, INT8 for the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeds.compress.calibset import CalibrationSet, open_calibration
from edgeds.compress.quantize import DEFAULT_METHOD, QuantizeReport, quantize_model
from edgeds.graph.io import input_specs, load_model
from edgeds.preproc import ImagePreprocess
from edgeds.specs import Resolution

FLOAT, CPU_INT8, TRT_INT8 = "float", "INT8, CPU form", "INT8, TensorRT form"


def open_images(model: Path, source: Any, *, size: int, limit: int | None) -> CalibrationSet:
    """The calibration set that both our side and the peer read."""
    return open_calibration(
        source,
        model_inputs=input_specs(load_model(model)),
        preprocess=ImagePreprocess(),
        resolution=Resolution(size, size),
        limit=limit,
    )


def train_images(data: Path) -> Path:
    """Where the images to calibrate on are: those of the train split when there is one."""
    found = sorted(path for path in (data / "images").glob("train*") if path.is_dir())
    return found[0] if found else data


def quantize_forms(
    model: Path,
    images: CalibrationSet,
    folder: Path,
    *,
    method: str = DEFAULT_METHOD,
    threads: int | None = None,
    quiet: bool = False,
) -> tuple[dict[str, Path], QuantizeReport]:
    """Quantize with the product's defaults; the files by form, and the report."""
    files = {FLOAT: model, CPU_INT8: folder / f"{method}.cpu.onnx", TRT_INT8: folder / f"{method}.onnx"}
    report = quantize_model(
        model, images, out=files[TRT_INT8], cpu_out=files[CPU_INT8], method=method, threads=threads, quiet=quiet
    )
    return files, report
