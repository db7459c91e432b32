"""What the batching session costs, and how long requests wait in it.

    python -m benchmarks.session

Throughput: requests of several resolutions, shuffled, through a Session, against calling ONNX Runtime directly with
the same requests already grouped into full batches (the best anyone could do who knew all requests beforehand). Both
use the same session options; rounds alternate. Stated limit: 0.95 of the direct throughput.

Waiting: requests arrive at random (exponential gaps) so that the engine is busy about 40 % of the time, one by one.
Stated limit: the 99th percentile of the queueing delay is at most max_delay plus the time of one full batch of the
largest resolution, measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    Limit,
    count,
    find_model,
    finish,
    make_parser,
    measure,
    measure_in_turns,
    ratio,
    run_main,
)
from edgeds.engines import open_engine
from edgeds.graph.io import input_specs, load_model
from edgeds.graph.session import open_session
from edgeds.progress import track
from edgeds.runtime import BatchPolicy, Session
from edgeds.specs import Resolution

THROUGHPUT_LIMIT = 0.95
UTILISATION = 0.4


def make_requests(name: str, sizes: Sequence[Resolution], *, each: int) -> list[dict[str, np.ndarray]]:
    """``each`` one-row requests per resolution, shuffled; the same ones every time."""
    random = np.random.default_rng(0)
    requests = [
        {name: random.random((1, 3, size.height_px, size.width_px), dtype=np.float32)}
        for size in sizes
        for _ in range(each)
    ]
    return [requests[index] for index in random.permutation(len(requests))]


def group_ideally(requests: Sequence[dict[str, np.ndarray]], *, max_batch: int) -> list[dict[str, np.ndarray]]:
    """The same rows in full batches of one shape each."""
    by_shape: dict[tuple[int, ...], list[np.ndarray]] = {}
    (name,) = requests[0]
    for request in requests:
        by_shape.setdefault(request[name].shape, []).append(request[name])
    return [
        {name: np.concatenate(rows[at : at + max_batch])}
        for rows in by_shape.values()
        for at in range(0, len(rows), max_batch)
    ]


def compare_throughput(
    session: Session, direct: Any, requests: Sequence[dict[str, np.ndarray]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Median times of all requests, both ways, and the batches that the session formed."""
    batches = group_ideally(requests, max_batch=arguments.batch)

    def call_directly() -> None:
        for batch in batches:
            direct.run(None, batch)

    def call_session() -> None:
        for future in [session.submit(request) for request in requests]:
            future.result()

    calls: dict[str, Callable[[], Any]] = {"direct": call_directly, "session": call_session}
    times = measure_in_turns(calls, rounds=arguments.rounds, what="throughput", quiet=arguments.quiet)
    return {"times": times, "ideal_batches": len(batches), "mean_batch_rows": session.stats().mean_batch_rows}


def measure_waiting(
    session: Session, requests: Sequence[dict[str, np.ndarray]], *, gap_s: float, quiet: bool
) -> list[float]:
    """Queueing delay of each request in ms when they arrive one by one, ``gap_s`` apart in the mean."""
    random = np.random.default_rng(1)
    futures = []
    due = time.perf_counter()
    for request in track(requests, what="waiting", total=len(requests), unit="request", quiet=quiet):
        due += random.exponential(gap_s)
        time.sleep(max(0.0, due - time.perf_counter()))
        futures.append(session.submit(request))
    return [future.result().queue_ms for future in futures]


def run_times_s(direct: Any, feeds: dict[str, np.ndarray], *, rounds: int = 5) -> list[float]:
    """Wall times of direct runs in seconds, after one that is not counted."""
    direct.run(None, feeds)
    return [measure(lambda: direct.run(None, feeds)).wall_s for _ in range(rounds)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("session", about="Throughput and queueing delay of the batching session.", data=False)
    parser.add_argument("--data", type=Path, metavar="DIR", help="not needed; taken so that all benchmarks look alike")
    parser.add_argument(
        "--sizes",
        type=Resolution.parse,
        nargs="+",
        default=[Resolution(192, 320), Resolution(256, 320), Resolution(320, 320), Resolution(320, 256)],
        metavar="HxW",
        help="resolutions in the mix (default 192x320 256x320 320x320 320x256)",
    )
    parser.add_argument("--batch", type=count, default=4, help="rows per batch (default 4)")
    parser.add_argument("--each", type=count, default=8, help="requests per resolution and round (default 8)")
    parser.add_argument("--rounds", type=count, default=30, help="timed rounds of each kind (default 30)")
    parser.add_argument("--arrivals", type=count, default=400, help="requests whose waiting is measured (default 400)")
    parser.add_argument("--max-delay-ms", type=float, default=10.0, help="the policy's max_delay_ms (default 10)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    model = find_model(arguments.model, quiet=arguments.quiet)
    name = input_specs(load_model(model))[0].name
    requests = make_requests(name, arguments.sizes, each=arguments.each)
    policy = BatchPolicy(max_batch=arguments.batch, max_delay_ms=arguments.max_delay_ms, max_queue=1 << 16)
    direct = open_session(model, threads=arguments.threads)
    with (
        open_engine(model, backend="onnxruntime", threads=arguments.threads) as engine,
        Session(engine, policy=policy) as session,
    ):
        session.warm_up(arguments.sizes, quiet=arguments.quiet)
        found = compare_throughput(session, direct, requests, arguments)
        singles = [statistics.median(run_times_s(direct, request)) for request in requests[:8]]
        (row,) = max(requests, key=lambda item: item[name].size).values()
        full = {name: np.repeat(row, arguments.batch, axis=0)}
        batch_s = run_times_s(direct, full)
        arriving = [requests[index % len(requests)] for index in range(arguments.arrivals)]
        gap_s = statistics.mean(singles) / UTILISATION
        before, began = session.stats(), time.perf_counter()
        waits = measure_waiting(session, arriving, gap_s=gap_s, quiet=arguments.quiet)
        elapsed_ms = 1000 * (time.perf_counter() - began)
        after = session.stats()
        # Before and after the waiting: on a shared machine the load may have changed meanwhile.
        batch_ms = 1000 * statistics.median([*batch_s, *run_times_s(direct, full)])
    found["busy_share"] = (after.compute_ms - before.compute_ms) / elapsed_ms
    found["rows_waiting"] = (after.rows - before.rows) / max(1, after.batches - before.batches)
    return report(found, waits, batch_ms=batch_ms, gap_s=gap_s, arguments=arguments, count_requests=len(requests))


def report(
    found: dict[str, Any],
    waits: Sequence[float],
    *,
    batch_ms: float,
    gap_s: float,
    arguments: argparse.Namespace,
    count_requests: int,
) -> int:
    """Print the table and judge the limits."""
    times = found["times"]
    plain, ours = times["direct"], times["session"]
    p50, p99 = (float(value) for value in np.percentile(waits, (50, 99)))
    bound_ms = arguments.max_delay_ms + batch_ms
    throughput = {
        "wall": ratio(plain.wall_s, ours.wall_s),
        "CPU": ratio(plain.cpu_s, ours.cpu_s),
    }
    rows: list[list[Any]] = [
        ["direct, ideal batches: requests/s", count_requests / plain.wall_s, None],
        ["session: requests/s", count_requests / ours.wall_s, throughput["wall"]],
        ["direct, ideal batches: requests per CPU s", count_requests / plain.cpu_s, None],
        ["session: requests per CPU s", count_requests / ours.cpu_s, throughput["CPU"]],
        ["session: mean rows per batch", found["mean_batch_rows"], found["mean_batch_rows"] / arguments.batch],
        [f"arrivals, {len(waits)} at {1 / gap_s:.1f}/s: mean rows per batch", found["rows_waiting"], None],
        ["arrivals: share of the time the engine was busy", found["busy_share"], found["busy_share"] / UTILISATION],
        ["one full batch of the largest resolution, ms", batch_ms, None],
        ["queueing delay p50, ms", p50, ratio(p50, bound_ms)],
        ["queueing delay p99, ms", p99, ratio(p99, bound_ms)],
    ]
    limits = [
        *(
            Limit(name=f"session / direct throughput, {kind}", value=value, limit=THROUGHPUT_LIMIT, at_most=False)
            for kind, value in throughput.items()
        ),
        Limit(name="queueing delay p99, ms, against max_delay + one batch", value=p99, limit=bound_ms),
    ]
    figures = {
        "throughput": throughput,
        "queue_p50_ms": p50,
        "queue_p99_ms": p99,
        "batch_ms": batch_ms,
        "busy_share": found["busy_share"],
        "mean_batch_rows": found["mean_batch_rows"],
    }
    header = ["what", "value", "ratio"]
    return finish("session", header=header, rows=rows, limits=limits, arguments=arguments, figures=figures)


if __name__ == "__main__":
    run_main(main)
