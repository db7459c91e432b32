"""Run a build in a process of its own: killed, crashed or cancelled, it takes nothing else with it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from edgeds import errors
from edgeds.engines.build_config import Settings
from edgeds.engines.build_log import LOGGER as TENSORRT_LOGGER
from edgeds.engines.build_memory import killed_message
from edgeds.engines.build_run import BuildTask, Plan
from edgeds.engines.layer_log import EngineLayer
from edgeds.errors import BuildError, EdgedsError, OutOfMemory
from edgeds.progress import track
from edgeds.specs import TensorSpec, from_json, to_json

CHILD_MODULE = "edgeds.engines.build_child"
LAST_LINES = 20


def build_in_child(trt: ModuleType, task: BuildTask, plan: Path, *, quiet: bool) -> Plan:
    """Build into the file ``plan``, which must exist; its content is undefined after an error.

    Raises what ``run_build`` raises, OutOfMemory for a child that was killed (signal 9), BuildError for one that
    crashed. Ctrl-C kills the child at once.
    """
    request = {
        "module": trt.__name__,
        "plan": str(plan.resolve()),
        "onnx": str(task.onnx.resolve()),
        "task": to_json({"options": task.options, "typing": task.typing, "precision": task.precision}),
        "memory": to_json(task.memory),
        "verbose": TENSORRT_LOGGER.isEnabledFor(logging.DEBUG),
        "parent": os.getpid(),
    }
    answer: dict[str, Any] = {}
    with tempfile.TemporaryFile() as output:
        child, messages = _start(json.dumps(request), output=output)
        try:
            for _ in track(_listen(messages, answer), what=_title(task), total=100, unit="%", quiet=quiet):
                pass
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            messages.close()
        if "report" not in answer:
            raise _failure(answer, code, task=task, output=output)
    return _plan(answer["report"], plan)


def _start(request: str, *, output: IO[bytes]) -> tuple[subprocess.Popen[bytes], IO[str]]:
    # Messages have a pipe of their own: TensorRT's libraries print to stdout and stderr as they like.
    read_end, write_end = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", CHILD_MODULE, str(write_end)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(write_end,),
            env=environment,
            # Ctrl-C in a terminal reaches the whole group; this process alone decides what it means.
            start_new_session=True,
        )
    except OSError as error:
        os.close(read_end)
        raise BuildError(f"the build's own process cannot be started: {error.strerror or error}") from error
    finally:
        os.close(write_end)
    messages = os.fdopen(read_end, encoding="utf-8")
    stdin = child.stdin
    if stdin is not None:
        try:
            stdin.write(request.encode())
            stdin.close()
        except BrokenPipeError:
            pass  # it died at once; its exit code tells
    return child, messages


def _listen(messages: IO[str], answer: dict[str, Any]) -> Iterator[int]:
    """Percents as they come; everything else goes to ``answer`` or to the log. Ends when the child does."""
    shown = 0
    for line in messages:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # the last line of a child that was killed while writing
        if "percent" in message:
            while shown < min(message["percent"], 100):
                shown += 1
                yield shown
        elif "log" in message:
            level, text = message["log"]
            TENSORRT_LOGGER.log(level, "%s", text)
        else:
            answer.update(message)


def _failure(answer: dict[str, Any], code: int, *, task: BuildTask, output: IO[bytes]) -> EdgedsError:
    if "error" in answer:
        kind = getattr(errors, answer["error"], BuildError)
        if isinstance(kind, type) and issubclass(kind, EdgedsError) and kind is not errors.MissingDependency:
            return kind(answer["message"])
        return BuildError(answer["message"])
    if code == -signal.SIGKILL:
        memory = task.memory
        return OutOfMemory(f"{task.onnx}: {killed_message(needed_mib=memory.needed_mib, free_mib=memory.free_mib)}")
    tail = _tail(output)
    how = f"crashed (signal {-code}, {signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    return BuildError(
        f"{task.onnx}: the build {how} inside {task.facts.product} and gave no reason; its last lines were: {tail}. "
        "The previous engine is untouched; run with -vv, and report it to NVIDIA if it happens again"
    )


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - 8192))
    lines = [line.strip() for line in output.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return " | ".join(lines[-LAST_LINES:])[-1500:] or "none"


def _plan(report: dict[str, Any], path: Path) -> Plan:
    where = "answer of the build's process"
    return Plan(
        data=path,
        inputs=tuple(from_json(TensorSpec, item, where=where) for item in report["inputs"]),
        outputs=tuple(from_json(TensorSpec, item, where=where) for item in report["outputs"]),
        settings=Settings(applied=report["applied"], skipped=report["skipped"]),
        warnings=tuple(report["warnings"]),
        layers=tuple(from_json(EngineLayer, item, where=where) for item in report["layers"]),
        memory_mib=report["memory_mib"],
    )


def _title(task: BuildTask) -> str:
    return f"Building {task.onnx.name}"
