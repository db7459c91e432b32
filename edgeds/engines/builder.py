"""Build a TensorRT engine from an ONNX file: checks first, then the build with progress, then one rename into place.

The same code serves TensorRT 10.3 to 11.4 and TensorRT-RTX (which builds without a GPU); the module is a value.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeds.engines.build_memory import plan_memory, read_free_memory
from edgeds.engines.build_monitor import BuildProgress
from edgeds.engines.build_options import BuildOptions, BuildReport
from edgeds.engines.build_run import BuildTask, Plan, disk_error, run_build, write_plan
from edgeds.engines.dla import check_dla, dla_support, split_layers
from edgeds.engines.known_bugs import BuildFacts, find_known_bugs
from edgeds.engines.onnx_scan import OnnxScan, scan_onnx
from edgeds.engines.trt_module import TrtFacts, describe_tensorrt, load_tensorrt, resolve_typing
from edgeds.errors import BuildError, SpecError
from edgeds.files import atomic_path
from edgeds.progress import track

__all__ = ["BuildOptions", "BuildReport", "build_plan"]

LOGGER = logging.getLogger(__name__)
NVDLA_COMPILER = "usr/lib/aarch64-linux-gnu/nvidia/libnvdla_compiler.so"


def build_plan(
    onnx: str | Path,
    out: str | Path,
    options: BuildOptions | None = None,
    *,
    trt: ModuleType | None = None,
    layers: Sequence[Mapping[str, Any]] | None = None,
    quiet: bool = False,
    isolate: bool = False,
    root: Path = Path("/"),
) -> BuildReport:
    """Build ``onnx`` into the plan file ``out`` and say what was done.

    ``trt`` is a TensorRT module (default: the installed one). ``layers`` is the layer list of ``cost.json``, used to
    tell the split of a DLA build. ``isolate`` builds in a process of its own: a build that the kernel kills or that
    crashes then ends in an error instead of ending this program, and Ctrl-C stops it at once; without it Ctrl-C takes
    effect at TensorRT's next step. ``root`` is where files of the system are read (``/``).

    ``out`` appears only when it is complete; an existing file stays untouched until then and after every failure.
    Raises SpecError for options and profiles that do not fit the model, ModelError for a file that is not a model,
    OutOfMemory with needed and free MiB, BuildError with the node and what to do for everything TensorRT refuses.
    """
    onnx, out = Path(onnx), Path(out)
    options = BuildOptions() if options is None else options
    scan = scan_onnx(onnx)
    trt = load_tensorrt() if trt is None else trt
    task, dla, notes = prepare(scan, options, facts=describe_tensorrt(trt), layers=layers, root=root)
    for note in notes:
        LOGGER.warning("%s", note)
    started = time.monotonic()
    with _output(out) as temporary:
        if isolate:
            from edgeds.engines.build_parent import build_in_child

            plan = build_in_child(trt, task, temporary, quiet=quiet)
        else:
            plan = build_in_thread(trt, task, quiet=quiet)
            write_plan(plan.data, temporary)
        size = temporary.stat().st_size
    for name, reason in plan.settings.skipped.items():
        LOGGER.warning("option %s was not applied: %s", name, reason)
    return BuildReport(
        plan=str(out),
        plan_bytes=size,
        product=task.facts.product,
        tensorrt=task.facts.version_text,
        typing=task.typing,
        precision=task.precision,
        seconds=round(time.monotonic() - started, 3),
        inputs=plan.inputs,
        outputs=plan.outputs,
        profiles=options.profiles,
        applied=plan.settings.applied,
        skipped=plan.settings.skipped,
        warnings=(*notes, *plan.warnings),
        layers=plan.layers,
        memory_mib=plan.memory_mib,
        needed_mib=task.memory.needed_mib,
        free_mib=task.memory.free_mib,
        dla=dla,
    )


def prepare(
    scan: OnnxScan,
    options: BuildOptions,
    *,
    facts: TrtFacts,
    layers: Sequence[Mapping[str, Any]] | None = None,
    root: Path = Path("/"),
) -> tuple[BuildTask, str | None, list[str]]:
    """Decide everything before the build: typing, precision, memory. Also the DLA split in words, and warnings."""
    from edgeds.engines.jetson import read_jetson

    jetson = read_jetson(root)
    typing = resolve_typing(facts, typing=options.typing)
    precision = options.precision
    if precision == "auto":
        precision = "int8" if scan.is_quantized else "float32"
    if options.hardware_compatibility is not None and jetson is not None:
        raise SpecError("hardware_compatibility is for PCs with several kinds of GPU; on a Jetson leave it out")
    known = BuildFacts(
        tensorrt=facts.version,
        is_rtx=facts.is_rtx,
        l4t=jetson.l4t if jetson else None,
        module=jetson.module if jetson else None,
        precision=precision,
        typing=typing,
        uses_dla=options.dla_core is not None,
        is_jetson=jetson is not None,
    )
    notes: list[str] = []
    dla = None
    if options.dla_core is not None:
        dla, notes = _prepare_dla(scan, options, facts=facts, module=known.module, layers=layers, root=root)
    for bug in find_known_bugs(known, severities=("refuse", "warn")):
        if bug.severity == "refuse":
            raise BuildError(f"{scan.path}: {bug.describe()}")
        notes.append(bug.describe())
    memory = plan_memory(
        weight_bytes=scan.weight_bytes,
        free=read_free_memory(root),
        profiles=max(len(options.profiles), 1),
        workspace_mib=options.workspace_mib,
    )
    LOGGER.info("memory: %s", memory.describe())
    task = BuildTask(onnx=scan.path, options=options, facts=facts, typing=typing, precision=precision, memory=memory)
    return task, dla, notes


def _prepare_dla(
    scan: OnnxScan,
    options: BuildOptions,
    *,
    facts: TrtFacts,
    module: str | None,
    layers: Sequence[Mapping[str, Any]] | None,
    root: Path,
) -> tuple[str, list[str]]:
    """The expected split in words, and warnings. Raises BuildError where there is no DLA for this build."""
    split = split_layers(layers) if layers else None
    # Only a Jetson has that library's folder; everywhere else the module table already says no.
    support = dla_support(
        facts.version,
        module=module,
        is_rtx=facts.is_rtx,
        libraries_present=module is None or (root / NVDLA_COMPILER).exists(),
    )
    notes = check_dla(
        options.dla_core or 0,
        support,
        profiles=options.profiles,
        is_quantized=scan.is_quantized,
        version=facts.version,
        split=split,
    )
    text = split.describe() if split else "unknown: no layer list (cost.json) was given"
    LOGGER.info("DLA core %d: %s", options.dla_core or 0, text)
    return text, notes


def build_in_thread(trt: ModuleType, task: BuildTask, *, quiet: bool) -> Plan:
    """Build in a worker thread, so that this one stays free to draw progress and to hear Ctrl-C."""
    progress = BuildProgress()
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="edgeds-build")
    future = worker.submit(run_build, trt, task, progress=progress)
    try:
        for _ in track(percents(future, progress), what=title(task), total=100, unit="%", quiet=quiet):
            pass
        return future.result()
    finally:
        if not future.done():
            progress.cancel()
            # What is left of the current step; a second Ctrl-C leaves the step to finish on its own.
            with contextlib.suppress(BuildError):
                future.exception()
        worker.shutdown(wait=False)


def percents(future: Future[Plan], progress: BuildProgress) -> Iterator[int]:
    """One item per percent that is done, until the future is."""
    shown = 0
    while not future.done():
        with contextlib.suppress(NotYet):
            future.exception(timeout=0.1)
        reached = int(100 * progress.fraction)
        while shown < reached:
            shown += 1
            yield shown


def title(task: BuildTask) -> str:
    count = len(task.options.profiles)
    return f"Building {task.onnx.name}{f' ({count} profiles)' if count > 1 else ''}"


@contextlib.contextmanager
def _output(out: Path) -> Iterator[Path]:
    """A temporary file beside ``out``, made before the build: a folder that cannot be written fails now, not later."""
    if out.is_dir():
        raise SpecError(f"{out} is a folder; name the file the engine is to be written to")
    with contextlib.ExitStack() as stack:
        try:
            temporary = stack.enter_context(atomic_path(out))
        except OSError as error:
            raise BuildError(
                f"{out.parent}: engines cannot be written here ({error.strerror or error}); choose a folder that "
                "can be written, or every start would build again"
            ) from error
        try:
            yield temporary
        except OSError as error:
            raise disk_error(error, out.parent, needed_bytes=0) from error
