"""Show a language-model bundle at work: an answer, perplexity, speed, one page. Used by the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeds.errors import InputError, SpecError
from edgeds.files import read_regular, write_json
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.report.llmbench import LlmBenchReport, LlmLoad, run_llm_bench
from edgeds.report.page import Table, write_page
from edgeds.report.perplexity import WINDOW, evaluate_language_model
from edgeds.specs import to_json
from edgeds.workshop.outfolder import writing_errors

QUESTION = "What is a bridge? Answer in one sentence."
LOADS = {"one": 1, "eight": 8}
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
TEXT_SUFFIXES = (".txt", ".text", ".raw", ".md")


def split_text(data: Path, folder: Path) -> tuple[Path, Path]:
    """(text to measure on, text to calibrate on): the ``*test*`` and ``*train*`` files of a folder that has both, else
    the first and the second half of the one text there is. Halves are written into ``folder``.

    Raises InputError for data that cannot be read.
    """
    files = (
        [data] if data.is_file() else sorted(item for item in data.glob("*") if item.suffix.lower() in TEXT_SUFFIXES)
    )
    test, train = (next((file for file in files if half in file.name), None) for half in ("test", "train"))
    if test is not None and train is not None:
        return test, train
    if not files:
        raise InputError(f"{data}: holds no text ({', '.join(TEXT_SUFFIXES)})")
    source = test or files[0]
    try:
        text = read_regular(source).decode()
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: byte {error.start} is not UTF-8 text") from error
    middle = text.find("\n", len(text) // 2)
    middle = len(text) // 2 if middle < 0 else middle
    paths = folder / "measured.txt", folder / "calibration.txt"
    with writing_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, part in zip(paths, (text[:middle], text[middle:]), strict=True):
            path.write_text(part, encoding="utf-8")
    return paths


def measure_perplexity_of(bundle: str | Path, text: Path, *, tokens: int, quiet: bool = False) -> float:
    """Perplexity on the first ``tokens`` tokens, in windows of 512."""
    return float(evaluate_language_model(bundle, text, limit=tokens, window=WINDOW, quiet=quiet)["perplexity"])


def ask(bundle: str | Path) -> str:
    """The greedy answer to one question; for a model without a chat template the text that follows it."""
    with LlmPipeline.from_bundle(bundle) as llm:
        prompt: Any = [{"role": "user", "content": QUESTION}] if llm.text.has_chat_template else QUESTION
        room = llm.context - len(llm.encode(prompt))
        return llm.generate(prompt, max_tokens=max(1, min(64, room))).text


def measure_language_speed(bundle: str | Path, *, seconds: float, quiet: bool = False) -> dict[str, LlmBenchReport]:
    """Speed of one request at a time and of eight at once, half of ``seconds`` each. Ctrl-C ends it."""
    if not 0 < seconds <= 3600:
        raise SpecError(f"seconds {seconds!r}: give a number above 0, up to 3600")
    found = {}
    with LlmPipeline.from_bundle(bundle, settings=LlmSettings(prefix_cache=False)) as llm:
        whole = min(llm.context, PROMPT_TOKENS + OUTPUT_TOKENS)
        output = min(OUTPUT_TOKENS, max(1, whole // 4))
        for name, count in LOADS.items():
            load = LlmLoad(
                prompt_tokens=whole - output,
                output_tokens=output,
                concurrency=count,
                seconds=seconds / len(LOADS),
                warmup_s=min(1.0, seconds / 4),
            )
            found[name] = run_llm_bench(llm, load, quiet=quiet)
            if found[name].interrupted:  # the bench ends its window early; here that means: stop
                raise KeyboardInterrupt
    return found


def write_language_report(
    folder: Path, reports: Mapping[str, LlmBenchReport], *, model: str, figures: Mapping[str, Any]
) -> Path:
    """Write ``report.html`` (self-contained) and ``report.json`` below ``folder``; returns the page's path.

    ``figures`` are what the recipe's stages gave: ``perplexity``, ``perplexity_float``, ``answer``, ``predicted``.
    """
    measured = reports["one"]
    columns = ["at once", "tokens/s", "first token ms (p50)", "between tokens ms (p50)", "KV cache used"]
    rows = [
        [
            str(report.load.concurrency),
            f"{report.tokens_per_s:.1f}",
            "-" if report.ttft_ms is None else f"{report.ttft_ms.p50:.0f}",
            "-" if report.itl_ms is None else f"{report.itl_ms.p50:.1f}",
            "-" if report.kv_peak_share is None else f"{report.kv_peak_share:.1%}",
        ]
        for report in reports.values()
    ]
    load = measured.load
    title = f"{load.prompt_tokens} prompt and {load.output_tokens} new tokens per request, measured"
    with writing_errors(folder):
        page = write_page(
            folder / "report.html",
            title=f"{model} on this machine's CPU",
            summary=_summary(model, measured, figures),
            tables=[Table(title=title, columns=columns, rows=rows)],
            facts={
                "device": measured.device,
                "backend": f"{measured.backend}, {measured.threads} threads",
                "date": measured.date,
                "versions": ", ".join(f"{name} {version}" for name, version in measured.versions.items()),
            },
        )
        write_json(folder / "report.json", {"bench": to_json(dict(reports)), **to_json(dict(figures))})
    return page


def _summary(model: str, measured: LlmBenchReport, figures: Mapping[str, Any]) -> list[str]:
    rate = measured.decode_tokens_per_s
    lines = [
        f"{model} with {measured.precision} weights decodes {rate:.1f} tokens per second for one request at a time."
        if rate is not None
        else f"{model} with {measured.precision} weights."
    ]
    value, before = figures.get("perplexity"), figures.get("perplexity_float")
    if value is not None and before is not None:
        lines.append(f"Perplexity, measured: {value:.2f}; {before:.2f} in float ({100 * (value / before - 1):+.1f} %).")
    elif value is not None:
        lines.append(f"Perplexity, measured: {value:.2f}.")
    predicted = figures.get("predicted")
    if predicted:
        lines.append(
            f"Predicted for {figures['target']}: {predicted['tokens_per_s']:.0f} tokens per second, first token after "
            f"{predicted['ttft_ms']:.0f} ms for {predicted['prompt_tokens']} tokens, {predicted['power_w']:.1f} W."
        )
    if figures.get("answer"):
        lines.append(f"“{QUESTION}” {figures['answer']}")
    lines.append("Speed is that of this CPU; it does not predict a Jetson's.")
    return lines
