"""edgeds: prune, calibrate, pack and run models on embedded NVIDIA GPUs, inside a power budget.

Importing this package loads nothing heavy; public names load on first use.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from edgeds._version import __version__

# ONNX Runtime reports usage to its maker from 1.32 on: a device in the field must not call out, its identifier must not
# lie about in the temporary folder, and the reporting thread keeps forked children from ending. 0 switches it back on.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_MODULES = {
    "edgeds.errors": (
        "BudgetError",
        "BuildError",
        "BundleError",
        "CalibrationError",
        "CudaError",
        "DeadlineExceeded",
        "DeviceError",
        "EdgedsError",
        "EngineMismatch",
        "InputError",
        "MissingDependency",
        "ModelError",
        "OutOfMemory",
        "PoolExhausted",
        "QueueFull",
        "SensorUnavailable",
        "SessionClosed",
        "SpecError",
    ),
    "edgeds.specs": ("Budget", "Resolution", "ShapeRange", "TensorSpec"),
    "edgeds.zoo": ("fetch_model", "fetch_photos", "list_models", "model_path"),
    "edgeds.preproc": ("ImagePreprocess",),
    "edgeds.buckets": ("cover_resolutions", "pick_bucket"),
    "edgeds.boards": ("BoardSpec", "PowerMode", "load_catalogue", "probe_machine", "resolve_target"),
    "edgeds.power": ("PowerSampler", "open_sensor", "require_power"),
    "edgeds.bundle": ("Bundle", "Manifest", "open_bundle", "verify_bundle", "write_bundle"),
    "edgeds.engines": ("Engine", "available_backends", "open_engine"),
    "edgeds.runtime": ("BatchPolicy", "LatencyTable", "Session"),
    "edgeds.pipelines.bert": ("BertPipeline",),
    "edgeds.pipelines.llm.options": ("SamplingOptions",),
    "edgeds.pipelines.llm.pipeline": ("LlmPipeline",),
    "edgeds.pipelines.llm.settings": ("LlmSettings",),
    "edgeds.pipelines.yolo": ("Result", "YoloPipeline"),
    "edgeds.report.accuracy": ("evaluate_detector",),
    "edgeds.report.textaccuracy": ("evaluate_text",),
    "edgeds.report.bench": ("run_bench",),
    "edgeds.report.perplexity": ("evaluate_language_model",),
    "edgeds.report.monitor": ("EngineMonitor",),
    "edgeds.report.datasets": ("open_detection_dataset",),
    "edgeds.graph.io": ("load_model", "save_model"),
    "edgeds.graph.inspect": ("inspect_model",),
    "edgeds.compress.calibset": ("open_calibration",),
    "edgeds.compress.prune": ("PruneOptions", "PruneReport", "prune_model"),
    "edgeds.compress.recover": ("RecoverReport", "recover_model"),
    "edgeds.compress.recover_options": ("RecoverOptions",),
    "edgeds.compress.quantize": ("QuantizeReport", "quantize_model"),
    "edgeds.workshop.demo": ("run_demo",),
    "edgeds.workshop.package": ("create_bundle",),
    "edgeds.workshop.llmpackage": ("create_llm_bundle",),
    "edgeds.workshop.textpackage": ("create_text_bundle",),
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value  # the next look-up does not come here
        return value
    raise AttributeError(f"module 'edgeds' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
