"""Which published rows are fitted and scored, and why the others are not."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from edgeds.boards.catalogue import load_catalogue
from edgeds.boards.cost_file import ModelWork, read_cost
from edgeds.boards.spec import BoardSpec, PowerMode

COSTS = Path(__file__).parent / "costs"
RULES = """\
CNN rows: metric latency_ms, batch 1-8, a TensorRT runtime (no ONNX Runtime, PyTorch, DLA, HTTP server), precision
stated, a model with a cost file. Left out: BERT in MLPerf (padding removed, mean length not stated), rows whose notes
say WARNING or that run on a DLA too, boards whose mode is named but unknown.
A mode that is not stated is MAXN (15W for the Orin Nano without Super).
LLM rows: metric tokens_per_s of TensorRT-LLM and TensorRT-Edge-LLM at batch 1-8; other runtimes are not ours."""

NAMES = {
    "resnet-50 v1.5": "resnet50", "resnet-152": "resnet152", "retinanet resnext-50": "retinanet-resnext50",
    "vit-base-patch16-224": "vit-b16", "vit-base-patch32-224": "vit-b32",
    "clip-vit-base-patch16": "vit-b16", "clip-vit-base-patch32": "vit-b32", "qwen3-4b-instruct-2507": "qwen3-4b",
}  # fmt: skip
PRECISIONS = {"fp32": "fp32", "tf32": "fp32", "fp16": "fp16", "int8": "int8", "w4a16": "int4"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: what the predictor takes, and the value in milliseconds (per step, for LLMs) or watts."""

    source: str
    kind: str
    model: str
    work: ModelWork
    board: BoardSpec
    mode: PowerMode
    precision: str
    batch: int
    value: float
    px: int = 0


def read_rows(path: Path) -> list[Row]:
    """The rows that ``RULES`` keep."""
    works = {cost.stem: read_cost(cost) for cost in sorted(COSTS.glob("*.json"))}
    with path.open(encoding="utf-8", newline="") as stream:
        found = [_row(item, works) for item in csv.DictReader(stream)]
    return [row for row in found if row is not None]


def _row(item: dict[str, str], works: dict[str, ModelWork]) -> Row | None:
    runtime, metric, notes = item["runtime"], item["metric"], item["notes"]
    name = model_name(item["model"])
    precision = PRECISIONS.get(item["precision"])
    if name not in works or precision is None or not item["batch"] or "WARNING" in notes or "DLA together" in notes:
        return None
    batch = int(item["batch"])
    llm = runtime in ("tensorrt-llm", "tensorrt-edge-llm") and metric == "tokens_per_s"
    cnn = (
        name != "bert-large"
        and "tensorrt" in runtime
        and "inference" not in runtime
        and "llm" not in runtime
        and metric == "latency_ms"
    )
    placed = place_row(item)
    if not (llm or cnn) or batch > 8 or placed is None or (llm and precision == "int8" and "edge" in runtime):
        return None
    value = float(item["value"])
    side = re.search(r"x(\d+)x\d+$", item["input_shape"])
    return Row(
        source=item["source_id"].replace("_nvidia", ""),
        kind="llm" if llm else "cnn",
        model=name,
        work=works[name] if llm else _resized(works[name], int(side.group(1)) if side else 0),
        board=placed[0],
        mode=placed[1],
        precision=precision,
        batch=batch,
        value=batch / value * 1e3 if llm else value,
        px=int(side.group(1)) if side else 0,
    )


def _resized(work: ModelWork, px: int) -> ModelWork:
    shape = next(iter(work.inputs.values()))
    if not px or len(shape) != 4 or shape[2] == px:
        return work
    from edgeds.boards.predictor import resize_work

    return resize_work(work, {next(iter(work.inputs)): (shape[0], shape[1], px, px)})


def model_name(text: str) -> str:
    """The name of the cost file of a model as the table spells it."""
    name = text.lower().replace("llama3.2", "llama-3.2")
    return NAMES.get(name, name)


def place_row(item: dict[str, str]) -> tuple[BoardSpec, PowerMode] | None:
    """Board and mode of a row, at the clocks that it states; None when they are not known."""
    catalogue = load_catalogue()
    board = catalogue.find(item["device"])
    stated, notes = item["power_mode"], item["notes"]
    if board is None or "default" in stated:
        return None
    label = re.match(r"(MAXN_SUPER|\d+W)", stated)
    wanted = label.group(1) if label else ("15W" if board.name == "orin-nano-8gb" else "MAXN")
    mode = next((one for one in board.modes if one.label in (wanted, "MAXN_SUPER" if wanted == "MAXN" else "")), None)
    clocks = re.search(r"GPU (\d+) MHz, EMC (\d+) MHz", notes + stated)
    if mode is None or ("custom" in stated and not clocks):
        return None
    if clocks and mode.gpu_mhz and mode.dram_gb_s and mode.emc_mhz:
        emc = float(clocks.group(2)) or mode.emc_mhz
        mode = replace(mode, gpu_mhz=float(clocks.group(1)), emc_mhz=emc, dram_gb_s=mode.dram_gb_s * emc / mode.emc_mhz)
    return board, mode
