"""A small language model on the CPU: speed against llama.cpp and transformers, sharing, guesses, and what paging costs.

    python -m benchmarks.llm --text wiki.txt [--llama FOLDER] [--transformers PYTHON]

``--text`` calibrates INT4 (its second half) and is quoted from. ``--llama`` is a folder where node-llama-cpp is
installed, ``--transformers`` an interpreter with torch, transformers and gguf; without them these rows are left out.
All run the same file with as many threads, taken in turns.

Stated limits: decoding at 1.3 x llama.cpp and 2 x transformers, the first token of 128 in half of llama.cpp's time;
eight requests together at 3 x the tokens of one; the second of two prompts that share 512 tokens in 20 % of the first's
time; text that is quoted at 1.5 x with guesses, in float the same text; pages of 64 tokens at most 10 % slower than one
page. With INT4 ONNX Runtime rounds activations to INT8, where the last bit of a sum, which differs between one token
and several, now and then moves a value by a step: of two nearly equally likely tokens the other one may come.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Limit, count, finish, make_parser, measure_in_turns, ratio, run_main
from benchmarks.llm_peers import LLAMA, TRANSFORMERS, Pace, pace_of, run_llama, run_transformers
from edgeds.engines import open_engine
from edgeds.pipelines.llm.model import LlmModel
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.pipelines.llm.runner import Chunk
from edgeds.pipelines.llm.settings import LlmSettings
from edgeds.report.llmbench import LlmLoad, run_llm_bench
from edgeds.workshop.llmpackage import create_llm_bundle
from edgeds.workshop.llmshow import split_text

MODEL = "smollm2-135m"
PROMPT, OUTPUT, SHORT_PROMPT = 128, 64, 32
SHARED, CONTEXT = 512, 512
OURS, FLOAT = "edgeds INT4", "edgeds float"


def find_model(given: str | None, *, quiet: bool) -> Path:
    """The checkpoint or GGUF to measure; SmolLM2 from the zoo when none is given."""
    if given is not None:
        return Path(given).absolute()
    from edgeds.zoo import fetch_model

    return fetch_model(MODEL, quiet=quiet)


def prompt_of(llm: LlmPipeline, length: int, *, number: int) -> list[int]:
    """Random ordinary tokens, the same for each ``number``."""
    return [int(token) for token in np.random.default_rng(number).choice(llm.text.ordinary_tokens, length)]


def pace(llm: LlmPipeline, *, prompt: int, output: int, rounds: int) -> Pace:
    """Of single requests."""
    found = []
    for number in range(rounds + 1):
        done = llm.generate(prompt_of(llm, prompt, number=number), max_tokens=output, ignore_eos=True)
        found.append({"ttft_ms": done.ttft_ms or 0.0, "decode_tokens_per_s": done.tokens_per_s or 0.0})
    return pace_of(found[1:])


def measure_pace(bundles: dict[str, Path], model: Path, arguments: argparse.Namespace) -> dict[str, Pace]:
    """Ours and the peers', the first of the second round again, so that a slow spell shows."""
    how: dict[str, Any] = {"prompt": arguments.prompt, "output": arguments.output, "rounds": arguments.rounds}
    found = {}
    for name in (OURS, FLOAT):
        with open_pipeline(bundles[name], arguments) as llm:
            found[name] = pace(llm, **how)
    if arguments.llama is not None:
        found[LLAMA] = run_llama(arguments.llama, model, threads=arguments.threads, **how)
    if arguments.transformers is not None:
        found[TRANSFORMERS] = run_transformers(arguments.transformers, model, threads=arguments.threads, **how)
    with open_pipeline(bundles[OURS], arguments) as llm:
        again = pace(llm, **how)
    found[OURS] = Pace(
        ttft_ms=statistics.mean((found[OURS].ttft_ms, again.ttft_ms)),
        decode_tokens_per_s=statistics.mean((found[OURS].decode_tokens_per_s, again.decode_tokens_per_s)),
    )
    return found


def open_pipeline(bundle: Path, arguments: argparse.Namespace, **settings: Any) -> LlmPipeline:
    """On the CPU with the threads asked for."""
    return LlmPipeline.from_bundle(
        bundle, backend="onnxruntime", threads=arguments.threads, settings=LlmSettings(**settings)
    )


def measure_together(bundle: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of one request at a time and of eight."""
    found = {}
    with open_pipeline(bundle, arguments, prefix_cache=False) as llm:
        for callers in (1, 8):
            load = LlmLoad(
                prompt_tokens=min(SHORT_PROMPT, arguments.prompt),
                output_tokens=arguments.output,
                concurrency=callers,
                seconds=arguments.seconds,
                warmup_s=arguments.seconds / 4,
            )
            found[str(callers)] = run_llm_bench(llm, load, quiet=arguments.quiet).tokens_per_s
    return found


def measure_prefix(bundle: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Medians of the time to the first token of a prompt, and of the next one with the same beginning."""
    first, second = [], []
    shared = min(SHARED, arguments.prompt * 4)
    with open_pipeline(bundle, arguments) as llm:
        llm.generate(prompt_of(llm, shared, number=99), max_tokens=1)
        for number in range(arguments.rounds):
            start = prompt_of(llm, shared, number=100 + number)
            for times, tail in ((first, 1000), (second, 2000)):
                prompt = [*start, *prompt_of(llm, 8, number=tail + number)]
                times.append(llm.generate(prompt, max_tokens=1).ttft_ms or 0.0)
    return {"first_ms": statistics.median(first), "second_ms": statistics.median(second)}


def measure_guesses(bundle: Path, text: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of quoting with and without guesses from the text, in turns."""
    found: dict[str, list[float]] = {"off": [], "lookup": []}
    drafted = accepted = same = 0
    words = text.read_text(encoding="utf-8").split()
    with open_pipeline(bundle, arguments) as llm:
        for number in range(arguments.rounds):
            start = 90 * number % max(1, len(words) - 90)
            passage = llm.encode(" ".join(words[start : start + 90]))[: arguments.prompt]
            prompt = [*passage, *llm.encode("\n\n"), *passage[: max(1, len(passage) // 4)]]
            said = {}
            for kind in found:
                done = llm.generate(prompt, max_tokens=arguments.output, ignore_eos=True, speculate=kind == "lookup")
                found[kind].append(done.tokens_per_s or 0.0)
                said[kind] = done.tokens
                drafted, accepted = drafted + done.drafted, accepted + done.accepted
            same += said["off"] == said["lookup"]
    medians = {kind: statistics.median(rates) for kind, rates in found.items()}
    return {**medians, "same": same / arguments.rounds, "accepted": accepted / drafted if drafted else 0.0}


def measure_paging(bundles: dict[str, Path], arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a decode step with ``CONTEXT`` cached tokens, in pages of 64 and in one page."""
    calls, engines = {}, []
    try:
        for name, path in bundles.items():
            engine = open_engine(path, backend="onnxruntime", threads=arguments.threads)
            engines.append(engine)
            model = LlmModel(engine, LlmSettings(kv_tokens=2 * CONTEXT, prefix_cache=False))
            tokens = [1 + number % (model.vocab - 1) for number in range(min(CONTEXT, model.context - 1))]
            sequence = model.pool.open(tokens)
            model.pool.reserve(sequence, len(tokens))
            model.runner.run([Chunk(kv=sequence, tokens=tokens, picks=[0])]).keep([len(tokens)])
            model.pool.commit(sequence, tokens)
            model.pool.reserve(sequence, 1)
            chunk = Chunk(kv=sequence, tokens=[1], picks=[0])
            calls[name] = lambda model=model, chunk=chunk: [model.runner.run([chunk]) for _ in range(20)]
        times = measure_in_turns(calls, rounds=arguments.rounds, what="decoding", quiet=arguments.quiet)
    finally:
        for engine in engines:
            engine.close()
    return {name: 1e3 * item.wall_s / 20 for name, item in times.items()}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("llm", about="A small language model: speed against peers, sharing, guesses.", data=False)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="text to calibrate on and quote")
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="where node-llama-cpp is installed")
    parser.add_argument("--transformers", type=Path, metavar="PYTHON", help="interpreter that has transformers")
    parser.add_argument("--rounds", type=count, default=5, help="requests of each kind (default 5)")
    parser.add_argument("--prompt", type=count, default=PROMPT, help=f"prompt tokens (default {PROMPT})")
    parser.add_argument("--output", type=count, default=OUTPUT, help=f"generated tokens (default {OUTPUT})")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load (default 8)")
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="INT4 bundle to measure instead of making one")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    model = find_model(arguments.model, quiet=arguments.quiet)
    with tempfile.TemporaryDirectory() as name:
        folder, quiet = Path(name), arguments.quiet
        measured, calib = split_text(arguments.text, folder / "text")

        def pack(label: str, **how: Any) -> Path:
            return create_llm_bundle(model, out=folder / label, quiet=quiet, **how)

        bundles = {FLOAT: pack("float", weights="float")}
        bundles[OURS] = arguments.bundle or pack("int4", weights="int4", calib=calib)
        paged = {"pages of 64": pack("p64", weights="int8"), "one page": pack("p1", weights="int8", page=1024)}
        paces = measure_pace(bundles, model, arguments)
        together = measure_together(bundles[OURS], arguments)
        prefix = measure_prefix(bundles[OURS], arguments)
        guesses = measure_guesses(bundles[OURS], measured, arguments)
        exact = measure_guesses(bundles[FLOAT], measured, arguments)
        paging = measure_paging(paged, arguments)
    return report(arguments, paces=paces, together=together, prefix=prefix, guesses=guesses, exact=exact, paging=paging)


def report(arguments: argparse.Namespace, *, paces: dict[str, Pace], **parts: dict[str, float]) -> int:
    """The table, the limits, and all figures."""
    rows: list[list[Any]] = [[name, one.decode_tokens_per_s, one.ttft_ms] for name, one in paces.items()]
    together, prefix, paging = (parts[key] for key in ("together", "prefix", "paging"))
    guesses, exact = parts["guesses"], parts["exact"]
    rows += [
        [f"{OURS}, one request at a time, short prompts", together["1"], None],
        [f"{OURS}, eight at once", together["8"], None],
        [f"{OURS}, prompt with a new beginning of {SHARED}", None, prefix["first_ms"]],
        [f"{OURS}, prompt with a known beginning", None, prefix["second_ms"]],
        [f"{OURS}, quoting", guesses["off"], None],
        [f"{OURS}, quoting with guesses", guesses["lookup"], None],
        [f"{FLOAT}, quoting", exact["off"], None],
        [f"{FLOAT}, quoting with guesses", exact["lookup"], None],
        *([f"decode step, {name}, ms", value, None] for name, value in paging.items()),
    ]
    ours = paces[OURS]
    limits = [
        Limit(name="eight / one", value=ratio(together["8"], together["1"]), limit=3.0, at_most=False),
        Limit(name="known / new beginning", value=ratio(prefix["second_ms"], prefix["first_ms"]), limit=0.2),
        Limit(name="guesses / none", value=ratio(guesses["lookup"], guesses["off"]), limit=1.5, at_most=False),
        Limit(name="texts equal with guesses, float", value=exact["same"], limit=1.0, at_most=False),
        Limit(name="pages of 64 / one page", value=ratio(paging["pages of 64"], paging["one page"]), limit=1.1),
    ]
    for peer, least in ((LLAMA, 1.3), (TRANSFORMERS, 2.0)):
        if peer in paces:
            rate = ratio(ours.decode_tokens_per_s, paces[peer].decode_tokens_per_s)
            limits.append(Limit(name=f"decoding / {peer}", value=rate, limit=least, at_most=False))
    if LLAMA in paces:
        limits.append(Limit(name=f"first token / {LLAMA}", value=ratio(ours.ttft_ms, paces[LLAMA].ttft_ms), limit=0.5))
    figures = {"paces": {name: vars(one) for name, one in paces.items()}, **parts}
    header = ["what", "tokens/s", "first token ms"]
    return finish("llm", header=header, rows=rows, limits=limits, arguments=arguments, figures=figures)


if __name__ == "__main__":
    run_main(main)
