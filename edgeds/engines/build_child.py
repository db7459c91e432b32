"""The build's own process: one request on stdin, messages as JSON lines on the file descriptor named by argument 1.

Started by ``build_parent``; not a command for people.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from edgeds.engines.build_log import LOGGER
from edgeds.engines.build_memory import BuildMemory
from edgeds.engines.build_monitor import BuildProgress
from edgeds.engines.build_options import BuildOptions
from edgeds.engines.build_run import BuildTask, run_build, write_plan
from edgeds.engines.trt_module import describe_tensorrt
from edgeds.errors import EdgedsError
from edgeds.specs import from_json, to_json


class Messages(logging.Handler):
    """Writes messages for the parent, one line each; also a handler, so that log records reach it as they come."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._stream = stream
        self._write_lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        with self._write_lock:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()

    def emit(self, record: logging.LogRecord) -> None:
        self.send({"log": [record.levelno, record.getMessage()]})


def main() -> int:
    request = json.load(sys.stdin)
    with contextlib.suppress(OSError):
        # When memory runs out the kernel is to take this process, not the service beside it.
        Path("/proc/self/oom_score_adj").write_text("900", encoding="ascii")
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as stream:
        messages = Messages(stream)
        LOGGER.addHandler(messages)
        LOGGER.setLevel(logging.DEBUG if request["verbose"] else logging.WARNING)
        LOGGER.propagate = False
        try:
            messages.send({"report": _build(request, messages)})
        except EdgedsError as error:
            messages.send({"error": type(error).__name__, "message": str(error)})
            return 1
    return 0


def _build(request: dict[str, Any], messages: Messages) -> dict[str, Any]:
    # Found through the parent's module search path, which it handed over.
    trt = importlib.import_module(request["module"])
    task = BuildTask(
        onnx=Path(request["onnx"]),
        options=from_json(BuildOptions, request["task"]["options"], where="options"),
        facts=describe_tensorrt(trt),
        typing=request["task"]["typing"],
        precision=request["task"]["precision"],
        memory=from_json(BuildMemory, request["memory"], where="memory"),
    )
    progress = BuildProgress()
    watcher = threading.Thread(target=_watch, args=(progress, messages, request["parent"]), daemon=True)
    watcher.start()
    plan = run_build(trt, task, progress=progress)
    write_plan(plan.data, Path(request["plan"]))
    return {
        "inputs": to_json(plan.inputs),
        "outputs": to_json(plan.outputs),
        "applied": plan.settings.applied,
        "skipped": plan.settings.skipped,
        "warnings": list(plan.warnings),
        "layers": to_json(plan.layers),
        "memory_mib": plan.memory_mib,
    }


def _watch(progress: BuildProgress, messages: Messages, parent: int) -> None:
    """Report percents; end this process when the parent is gone, since nobody would take its plan."""
    sent = 0
    while True:
        time.sleep(0.2)
        if os.getppid() != parent:
            os._exit(1)
        percent = int(100 * progress.fraction)
        if percent > sent:
            sent = percent
            with contextlib.suppress(OSError):
                messages.send({"percent": percent})


if __name__ == "__main__":
    sys.exit(main())
