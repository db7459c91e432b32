"""TensorRT's words turned into ours: which node, what is wrong, what to do.

TensorRT says most failures only in its log, in terms of its own sources. The patterns were collected from real
refusals of TensorRT-RTX 1.7 and from public reports for the others; what matches none is passed on in its own words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeds.engines.build_log import NOISE, LogTap, clean
from edgeds.engines.trt_module import TrtFacts
from edgeds.errors import BuildError, EdgedsError, OutOfMemory

MAX_NODES = 5
"""Parser errors told in one message; more are counted."""

QUANTIZE = "quantize it with `edgeds quantize`, which writes the form that every TensorRT takes"

PARSE_FIXES: tuple[tuple[str, str], ...] = (
    (
        r"Plugin not found|was not found in plugin registry|No importer registered",
        "this TensorRT has no such operator: replace it in the model, cut the graph before it, or keep it outside the "
        "engine (NMS and other post-processing belong there)",
    ),
    (r"Non-zero zero point", f"activations and weights must be symmetric int8 with zero point 0; {QUANTIZE}"),
    (r"input has type Int32 but must have type|zero_point with type int32", f"biases must stay float; {QUANTIZE}"),
    (r"[Ss]cale coefficients must all be positive|scale.*positive", f"every scale must be above 0; {QUANTIZE}"),
    (r"K == scaleSize|scaleSize", f"the scales do not fit the axis of the weights; {QUANTIZE}"),
    (r"UINT8|Defaulting to INT8", f"uint8 is not taken; {QUANTIZE}"),
    (
        r"same input types|must have the same type|element type \(\w+\) differs",
        "strongly typed networks mix no types in one operator: build the bundle's float16 or int8_fp16 variant, whose "
        "casts edgeds placed, or add the missing Cast",
    ),
    (
        r"Failed to import initializer",
        "a weight cannot be read; keep the model's side file beside it, whole and under its own name",
    ),
    (
        r"Failed to convert ONNX date? type|convertDtype|Unsupported ONNX data type",
        "an input has a type that TensorRT does not take (string, int16, complex); export it as float32 or int64",
    ),
    (r"does not support dynamic|must be (a )?build[- ]time constant", "make this value a constant, or fix the size"),
    (r"ParseFromCodedStream|MODEL_DESERIALIZE_FAILED", "the file is not an ONNX model or is damaged; export it again"),
)

BUILD_FIXES: tuple[tuple[str, str], ...] = (
    (
        r"not self-consistent",
        "the smallest or largest shape of a profile is impossible for this model: use sizes that are multiples of its "
        "stride and no larger than what it was exported for",
    ),
    (
        r"k?OPT values for profile \d+ violate|violate shape constraints",
        "the tuned shape of a profile is impossible for this model: use sizes that are multiples of its stride and the "
        "same batch for all inputs",
    ),
    (r"Defaulting to INT8 instead", f"the model is quantized to uint8, which would be computed as int8; {QUANTIZE}"),
    (r"MIN<=OPT<=MAX", "in every profile min, opt and max must not decrease"),
    (
        r"no optimization profile has been defined",
        "the model has dynamic inputs; give profiles (plan_profiles makes them from buckets)",
    ),
    (r"missing dimensions in profile|missing values for shape input", "give a range for every dynamic input"),
    (r"at least one output", "the model has no outputs, so it is empty or not an ONNX model; export it again"),
    (
        r"no runners that implement it",
        "this TensorRT has no kernel for that layer; keep it outside the engine, as edgeds does with NMS",
    ),
    (r"[Cc]ould not find any implementation for node", "no kernel fits: raise the workspace, or keep that node float"),
    (r"exceeds the maximum value allowed \(3840\)", "TopK takes at most 3840; lower it or do it outside the engine"),
    (
        r"Unable to load library: libnvinfer_lean|lean runtime",
        "a version-compatible engine carries the lean runtime, which is not installed; install libnvinfer-lean",
    ),
    (r"Cannot compile .*Turing|SM75", "SM75 (Turing) cannot run this model; build for SM80 or newer"),
    (r"cancel", "the build was cancelled"),
)
MEMORY = re.compile(
    r"OutOfMemory|out of memory|[Ww]orkspace|Requested size was \d+|no tactics to implement the operation within"
    r"|NvMapMem|allocat\w+ failed|failed to allocate"
)


def parser_error(onnx: Path, parser: Any, *, tap: LogTap, facts: TrtFacts) -> BuildError:
    """One sentence per refused node (five at most), with the fix that fits the first."""
    found: list[str] = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        text = _short(error.desc())
        node = _node_text(error, tap)
        line = f"{node}: {text}" if node else text
        if line not in found:
            found.append(line)
    if not found:
        found = tap.errors()[:1] or ["the parser gave no reason"]
    rest = f" (and {len(found) - MAX_NODES} more)" if len(found) > MAX_NODES else ""
    told = "; ".join(found[:MAX_NODES]) + rest
    return BuildError(f"{onnx}: {facts.product} cannot import it: {told}. {_capital(_fix(told, PARSE_FIXES))}")


def build_error(onnx: Path, tap: LogTap, *, facts: TrtFacts, workspace_mib: int, doing: str) -> EdgedsError:
    """Why the builder returned nothing, from its log."""
    errors = tap.errors()
    # Promoted warnings are the cause when there are any; what follows them is a consequence.
    told = tap.fatal_warnings() or errors[:3]
    if not told:
        return BuildError(
            f"{onnx}: {facts.product} failed while {doing} and gave no reason; run with -vv for its whole log"
        )
    text = "; ".join(_short(line) for line in told)
    fix = _fix(text, BUILD_FIXES, none="")
    if not fix and MEMORY.search(text):
        return OutOfMemory(
            f"{onnx}: {facts.product} ran out of memory while {doing} (workspace {workspace_mib} MiB): {text}. Raise "
            "the workspace if memory is free, else stop other programs, build fewer buckets or a smaller precision"
        )
    return BuildError(f"{onnx}: {facts.product} failed while {doing}: {text}. {_capital(fix or UNKNOWN)}")


UNKNOWN = "run with -vv for TensorRT's whole log"


def _fix(text: str, table: Sequence[tuple[str, str]], *, none: str = UNKNOWN) -> str:
    return next((fix for pattern, fix in table if re.search(pattern, text)), none)


def _node_text(error: Any, tap: LogTap) -> str:
    """``node 'conv1' (Conv)``; a nameless node is told by its first output, from the log line before."""
    index, name, operator = error.node(), error.node_name(), error.node_operator()
    if not operator and index < 0:
        return ""
    if name:
        return f"node {name!r} ({operator})"
    pattern = re.compile(rf'While parsing node number {index} \[\w+ -> "([^"]*)"')
    for _, line in tap.lines:
        match = pattern.search(line)
        if match:
            return f"node {index} ({operator}, output {match.group(1)!r})"
    return f"node {index} ({operator})"


def _short(text: str) -> str:
    """The lines of a message that say something, without source positions."""
    lines = [line for line in text.split("\n") if line.strip() and not NOISE.search(line)]
    useful = [line for line in lines if not line.startswith("Invalid Node - ")] or lines
    joined = clean(" ".join(useful))
    joined = re.sub(r"^\[?[\w./]+\.cpp(::?\w+)*\]? ?:? ?", "", joined)
    joined = re.sub(r"ITensor::getDimensions: ", "", joined)
    joined = re.sub(r",? ?\.? ?In \w+ at /?[\w./]+:\d+", "", joined)
    joined = re.sub(r"Error Code \d+: (?:[A-Z]\w+ ?){1,3}\((.*)\)$", r"\1", joined)
    joined = re.sub(r"Assertion failed: (?:\(.*?\)|\S+): |^Assertion \S+( [<>=!]+ \S+)? failed\. ", "", joined)
    joined = re.sub(r'^creator && "([^"]*)"', r"\1", joined)
    return joined.strip(" .;") or "no reason given"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
