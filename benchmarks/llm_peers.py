"""Run the peers of the language-model benchmark: llama.cpp by Node.js, transformers by an interpreter that has it."""

from __future__ import annotations

import json
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

from edgeds.errors import EdgedsError

HERE = Path(__file__).resolve().parent
LLAMA, TRANSFORMERS = "llama.cpp, same file", "transformers, float32"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Medians over rounds: time to the first token, and tokens per second after it."""

    ttft_ms: float
    decode_tokens_per_s: float


def pace_of(rounds: list[dict[str, float]]) -> Pace:
    """Medians of what rounds gave."""
    return Pace(
        ttft_ms=statistics.median(one["ttft_ms"] for one in rounds),
        decode_tokens_per_s=statistics.median(one["decode_tokens_per_s"] for one in rounds),
    )


def run_llama(folder: Path, model: Path, *, threads: int, prompt: int, output: int, rounds: int) -> Pace:
    """``folder``: where ``npm install --ignore-scripts node-llama-cpp`` was run."""
    command = ["node", str(HERE / "llama_peer.mjs"), str(model), *map(str, (threads, prompt, output, rounds))]
    return pace_of(_run(command, folder))


def run_transformers(python: Path, model: Path, *, threads: int, prompt: int, output: int, rounds: int) -> Pace:
    """``python``: an interpreter with torch, transformers and gguf."""
    command = [
        str(python),
        str(HERE / "transformers_peer.py"),
        str(model),
        *map(str, (threads, prompt, output, rounds)),
    ]
    return pace_of(_run(command, HERE))


def _run(command: list[str], folder: Path) -> list[dict[str, float]]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EdgedsError(f"peer {command[0]}: {error}") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EdgedsError(f"peer {command[0]}: exit code {done.returncode}: {last}")
    found: list[dict[str, float]] = json.loads(lines[-1])
    return found
