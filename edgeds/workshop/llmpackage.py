"""A language model in, bundle out: build the graph, round its weights, check, add the tokenizer, write."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto

from edgeds.bundle import Manifest, write_bundle
from edgeds.compress.llm_weights import (
    CPU_GROUP,
    INT4_OPSET,
    PER_CHANNEL,
    TENSORRT_GROUP,
    QuantizedWeights,
    Rounding,
    quantize_weights,
    to_cpu_form,
    to_tensorrt_form,
)
from edgeds.errors import ModelError, SpecError
from edgeds.graph.amplitude import find_amplitudes
from edgeds.graph.decoder import KV_DTYPES, OPSET, build_decoder
from edgeds.graph.decoder_feeds import prefill_feeds
from edgeds.graph.gguf_file import GgufFile
from edgeds.graph.io import save_model
from edgeds.graph.precision import convert_float16, verify_float16
from edgeds.graph.session import open_session
from edgeds.pipelines.llm.gguf_tokenizer import write_gguf_tokenizer
from edgeds.pipelines.llm.opening import TASK, TOKENIZER_FOLDER
from edgeds.pipelines.llm.text import LLM_TEXT_FILES, LlmText, open_text
from edgeds.progress import stage
from edgeds.workshop.describe import build_manifest
from edgeds.workshop.detector import model_metadata
from edgeds.workshop.llmcalib import TokenWindows, read_windows
from edgeds.workshop.llmcost import count_decode_step
from edgeds.workshop.llmplan import plan_language_model
from edgeds.workshop.outfolder import claim_folder, writing_errors
from edgeds.workshop.parts import BundleParts, bundle_entries, golden_bytes, json_bytes, with_side_file, work_folder
from edgeds.workshop.planning import PlannedParts, parse_target

log = logging.getLogger("edgeds.workshop")

WEIGHTS = ("float", "int8", "int4")
MAX_BATCH = 8
GOLDEN_TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog, which was not asleep, looks after it for a while."
)
GOLDEN_TOKENS = 16
WEIGHT_NAMES = ("model.safetensors", "model.safetensors.index.json")

Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class _Choices:
    weights: str
    kv: str | None
    page: int
    eviction: bool
    windows: Sequence[Sequence[int]]
    max_batch: int
    quiet: bool

    @property
    def kv_device(self) -> str:
        """A Jetson's memory is what long contexts cost. A float model is one file for both engines."""
        return self.kv or ("float32" if self.weights == "float" else "float16")

    @property
    def kv_cpu(self) -> str:
        """ONNX Runtime has to widen float16 at every step on a CPU."""
        return self.kv or "float32"

    def build(self, source: Path, *, kv: str) -> ModelProto:
        """The float model. Blocks of INT4 need the newer opset."""
        opset = INT4_OPSET if self.weights == "int4" else OPSET
        return build_decoder(source, page=self.page, kv=kv, attention_mass=self.eviction, opset=opset)

    def round(self, model: ModelProto) -> tuple[QuantizedWeights, QuantizedWeights]:
        """Weights of ``model`` for TensorRT and for CPUs; compensated where there are windows."""
        bits = 4 if self.weights == "int4" else 8
        group = TENSORRT_GROUP if bits == 4 else PER_CHANNEL
        device = Rounding(bits=bits, group=group, head_group=PER_CHANNEL)
        cpu = Rounding(bits=bits, group=CPU_GROUP, symmetric=bits == 8)
        samples = TokenWindows(model, self.windows) if self.windows else None
        first, second = quantize_weights(model, (device, cpu), samples=samples, quiet=self.quiet)
        return first, second


def create_llm_bundle(
    source: str | Path,
    *,
    out: str | Path,
    weights: str = "int4",
    kv: str | None = None,
    page: int = 64,
    eviction: bool = False,
    calib: str | Path | None = None,
    samples: int | None = None,
    compensate: bool = True,
    max_batch: int = MAX_BATCH,
    target: str | None = None,
    license: str | None = None,
    replace: bool = False,
    quiet: bool = False,
) -> Path:
    """Pack the decoder in ``source`` (a checkpoint's folder with its tokenizer, or a .gguf file); returns the folder.

    ``weights``: float, int8 or int4. ``kv``: float32, float16 or int8 cache (default: float16 on devices, float32 on
    CPUs). ``calib``: text that rounding to INT4 is compensated on (see ``read_windows``; without it, sentences that
    edgeds brings), ``compensate=False`` rounds to the nearest. ``eviction`` builds the output that a KV budget needs.
    ``target`` (NAME@MODE) stores predicted figures of that board.

    Raises SpecError for arguments that do not fit, ModelError for a checkpoint or tokenizer that is damaged or not
    supported, CalibrationError for calibration text, BundleError when ``out`` cannot be written; nothing is left
    behind on failure.
    """
    _check(weights, kv=kv, calib=calib, max_batch=max_batch)
    board, path, place = parse_target(target, budget=None), Path(source), Path(out)
    with claim_folder(place, replace=replace, ours=bundle_entries(place), what="a bundle"), work_folder() as folder:
        tokenizer = _tokenizer(path, folder / TOKENIZER_FOLDER)
        text = open_text(tokenizer)
        choices = _Choices(
            weights=weights,
            kv=kv,
            page=page,
            eviction=eviction,
            windows=read_windows(calib, text=text, samples=samples) if compensate and weights == "int4" else (),
            max_batch=max_batch,
            quiet=quiet,
        )
        parts = BundleParts(files={}, models={})
        model = _add_models(parts, path, folder, choices, text=text)
        cost = json_bytes(count_decode_step(model))
        parts.files["cost.json"] = cost
        planned = plan_language_model(board, cost=cost, weights=weights, kv=choices.kv_device)
        manifest = _manifest(model, parts, path, choices, planned=planned, license=license)
        present = [name for name in LLM_TEXT_FILES if (tokenizer / name).is_file()]
        parts.files |= {f"{TOKENIZER_FOLDER}/{name}": tokenizer / name for name in present}
        with writing_errors(place):
            return write_bundle(place, files=parts.files, manifest=manifest, replace=replace)


def _add_models(parts: BundleParts, source: Path, folder: Path, choices: _Choices, *, text: LlmText) -> ModelProto:
    """Fill ``parts`` with the models, costs and golden samples; returns the float model for the device."""
    quiet, weights = choices.quiet, choices.weights
    with stage("building the graph", quiet=quiet):
        model = choices.build(source, kv=choices.kv_device)
    text.check_vocab(int(model_metadata(model)["edgeds.vocab_size"]))
    feeds = [prefill_feeds(model, [text.encode(GOLDEN_TEXT)[:GOLDEN_TOKENS]])]
    device, label = model, "float"
    if weights != "float":
        rounded, cpu_rounded = choices.round(model)
        device, label = to_tensorrt_form(model, rounded), weights
    _save(parts, device, folder, variant=label, name="model.onnx")
    _add_half(parts, device, model, folder, variant="float16" if weights == "float" else f"{weights}_fp16", feeds=feeds)
    with stage("running golden samples", quiet=quiet):
        models = {"float": model, label: device}
        # As written: ONNX Runtime's own form of such products rounds activations as well.
        golden = golden_bytes(feeds, {name: open_session(one, optimize=False) for name, one in models.items()})
        if golden is not None:
            parts.files["golden.npz"] = golden
    if weights != "float":
        del device, models
        own = model if choices.kv_cpu == choices.kv_device else choices.build(source, kv=choices.kv_cpu)
        cpu = to_cpu_form(own, cpu_rounded)
        _save(parts, cpu, folder, variant=f"cpu_{weights}", name="model.cpu.onnx")
    return model


def _save(parts: BundleParts, model: ModelProto, folder: Path, *, variant: str, name: str) -> None:
    parts.models[variant] = name
    parts.files |= with_side_file(save_model(model, folder / name), name)


def _add_half(
    parts: BundleParts, model: ModelProto, dense: ModelProto, folder: Path, *, variant: str, feeds: Sequence[Feeds]
) -> None:
    """The form of ``model`` that computes in float16; left out with a note when it cannot be made."""
    try:
        report = convert_float16(model, ranges=find_amplitudes(dense, feeds), io="keep")
        errors = verify_float16(model, report.model, feeds)
    except ModelError as error:
        parts.notes.append(f"no {variant} model, so none can be built in FP16: {error}")
        log.warning("%s", parts.notes[-1])
        return
    _save(parts, report.model, folder, variant=variant, name=f"variants/{variant}.onnx")
    parts.accuracy[f"{variant}_max_abs"] = errors["logits"]
    parts.notes += [f"{variant}: {note}" for note in report.notes]


def _tokenizer(source: Path, folder: Path) -> Path:
    """The folder with the tokenizer's files; for a GGUF file they are written into ``folder``."""
    if source.suffix.lower() != ".gguf":
        return source
    with GgufFile(source) as file:
        write_gguf_tokenizer(file.metadata, out=folder, source=str(source))
    return folder


def _weights_file(source: Path) -> Path:
    found = (source / name for name in WEIGHT_NAMES if (source / name).is_file())
    return source if source.is_file() else next(found, source / "config.json")


def _manifest(
    model: ModelProto,
    parts: BundleParts,
    source: Path,
    choices: _Choices,
    *,
    planned: PlannedParts,
    license: str | None,
) -> Manifest:
    made = build_manifest(
        model,
        source=_weights_file(source),
        task=TASK,
        models=parts.models,
        setup=None,
        names={},
        max_batch=choices.max_batch,
        calibration=None,
        accuracy=parts.accuracy,
        planned=planned,
        speedup=None,
    )
    facts = model_metadata(model)
    head = {
        "weights": choices.weights,
        "kv": choices.kv_device,
        "kv_cpu": choices.kv_cpu,
        "compensated_on_tokens": sum(map(len, choices.windows)),
        "notes": parts.notes,
        "metadata": facts,  # a TensorRT plan does not keep it
        **{key: int(facts[f"edgeds.{key}"]) for key in ("max_length", "vocab_size", "page", "layers")},
    }
    return dataclasses.replace(made, head=head, precision=choices.weights, license=license or made.license)


def _check(weights: str, *, kv: str | None, calib: Any, max_batch: int) -> None:
    if weights not in WEIGHTS:
        raise SpecError(f"--weights {weights!r}: choose from {', '.join(WEIGHTS)}")
    if kv is not None and kv not in KV_DTYPES:
        raise SpecError(f"--kv {kv!r}: choose from {', '.join(KV_DTYPES)}")
    if calib is not None and weights != "int4":
        raise SpecError(f"--calib is for --weights int4; {weights} weights are rounded without samples")
    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or not 1 <= max_batch <= 4096:
        raise SpecError(f"--max-batch {max_batch!r}: need a whole number from 1 to 4096")
