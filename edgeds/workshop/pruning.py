"""Prune a detector with the preprocessing that it is served with, and an encoder with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeds.compress.heads import TransformerReport, prune_transformer
from edgeds.compress.prune import PruneOptions, prune_model
from edgeds.compress.prune_report import PruneReport
from edgeds.graph.encoder import build_encoder
from edgeds.graph.io import input_specs, load_model, save_model
from edgeds.pipelines.bert.encode import TextEncoder
from edgeds.pipelines.tokenizer_file import load_tokenizer
from edgeds.specs import Resolution
from edgeds.workshop.calibration import open_model_set
from edgeds.workshop.parts import work_folder
from edgeds.workshop.textcalib import open_text_set

DEFAULT_SAMPLES = 32
DEFAULT_TEXTS = 128
MAX_TOKENS = 128
"""Of a calibration text, for models that do not say how long theirs may be."""


def prune_detector(
    model: str | Path,
    *,
    out: str | Path,
    ratio: float,
    calib: Any = None,
    size: Resolution | None = None,
    samples: int = DEFAULT_SAMPLES,
    quiet: bool = False,
) -> PruneReport:
    """Remove the share ``ratio`` of the removable channels of a YOLO and fit what is left on ``samples`` unlabelled
    images of ``calib`` (what ``open_calibration`` takes; None: no images, only weights are looked at).

    Raises what ``prune_model`` and ``open_calibration`` raise.
    """
    calibration = None if calib is None else open_model_set(model, calib, size=size, limit=samples)
    options = PruneOptions(samples=samples)
    return prune_model(model, out=out, ratio=ratio, calibration=calibration, options=options, quiet=quiet)


def prune_encoder(
    model: str | Path,
    *,
    out: str | Path,
    heads: float = 0.0,
    ffn: float = 0.0,
    layers: int = 0,
    calib: Any = None,
    task: str = "embed",
    samples: int = DEFAULT_TEXTS,
    quiet: bool = False,
) -> TransformerReport:
    """Remove shares of the attention heads and of the feed-forward width, and layers, of an encoder: the folder of a
    checkpoint, or an ONNX beside its tokenizer. What is left is fitted on ``samples`` texts of ``calib`` (as
    ``open_text_set`` takes them; None: none).

    Raises what ``build_encoder``, ``prune_transformer`` and ``open_text_set`` raise.
    """
    source = Path(model)
    with work_folder() as folder:
        if source.is_dir():
            graph = build_encoder(source)
            dense = save_model(graph, folder / "dense.onnx")
        else:
            graph, dense = load_model(source), source
        feeds = None
        if calib is not None:
            facts = {item.key: item.value for item in graph.metadata_props}
            stated = facts.get("edgeds.max_length", "")
            place = source if source.is_dir() else source.parent
            encoder = TextEncoder(load_tokenizer(place), max_length=int(stated) if stated.isdecimal() else MAX_TOKENS)
            feeds, _ = open_text_set(calib, encoder=encoder, specs=input_specs(graph), task=task, limit=samples)
        options = PruneOptions(samples=samples)
        how: dict[str, Any] = {"heads": heads, "ffn": ffn, "layers": layers, "options": options, "quiet": quiet}
        return prune_transformer(dense, out=out, calibration=feeds, **how)
