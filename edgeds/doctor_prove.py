"""``edgeds doctor --prove``: everything that needs a GPU, once: build, golden check, measure, capture a graph.

For the first minutes with a board. Each step is a Check; what cannot be proven here is told in words, never skipped
in silence.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeds.doctor import Check
from edgeds.errors import EdgedsError

if TYPE_CHECKING:
    from edgeds.bundle import Bundle
    from edgeds.engines.install import BuildHost, InstalledEngine

GRAPH_RUNS = 5
STEPS = ("prove-gpu", "prove-build", "prove-golden", "prove-bench", "prove-graph")


def prove(
    bundle: Path | None = None, *, host: BuildHost | None = None, seconds: float = 5.0, quiet: bool = False
) -> list[Check]:
    """Build an engine from ``bundle`` (default: a small INT8 model of our own) and prove that it runs right.

    All checks are required; after the first that fails the rest say that they were not reached. Nothing is left
    behind: the engine is built in a temporary folder. Raises BundleError for a bundle that cannot be opened.
    """
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="edgeds-prove-") as folder, _open(bundle, Path(folder)) as opened:
        try:
            for check in _steps(opened, Path(folder), host=host, seconds=seconds, quiet=quiet):
                checks.append(check)
                if not check.ok:
                    break
        except EdgedsError as error:
            checks.append(Check(name=STEPS[len(checks)], ok=False, required=True, message=str(error)))
    for name in STEPS[len(checks) :]:
        checks.append(Check(name=name, ok=False, required=True, message="not reached, since the step before failed"))
    return checks


@contextlib.contextmanager
def _open(bundle: Path | None, folder: Path) -> Iterator[Bundle]:
    from edgeds.bundle import open_bundle
    from edgeds.doctor_proof import write_proof_bundle

    with open_bundle(bundle if bundle is not None else write_proof_bundle(folder / "proof")) as opened:
        yield opened


def _steps(bundle: Bundle, folder: Path, *, host: BuildHost | None, seconds: float, quiet: bool) -> Iterator[Check]:
    from edgeds.engines.install import find_host, install_engine

    host = host or find_host(quiet=quiet)
    if host.open_plan is None:
        yield _check("prove-gpu", False, f"engines can be built here but not run: {host.cannot_run}")
        return
    yield _check("prove-gpu", True, f"{host.device}, {host.description}")
    found = install_engine(
        bundle, host=host, force=True, keep_in=folder / "engines", measure_seconds=seconds, quiet=quiet
    )
    manifest = found.manifest
    notes = f"; {'; '.join(found.notes)}" if found.notes else ""
    yield _check(
        "prove-build",
        True,
        f"{manifest.model_variant} in {manifest.build_s:.1f} s, {manifest.plan_bytes / 1e6:.2f} MB, "
        f"{len(manifest.profiles)} profile(s){notes}",
    )
    if manifest.golden is None:
        yield _check("prove-golden", False, "the bundle has no golden samples that fit the engine")
        return
    yield _check(
        "prove-golden",
        manifest.golden.ok,
        f"{manifest.golden.samples} sample(s), largest error {100 * (found.golden_max_error or 0):.3f} % of the range",
    )
    rows = [
        f"{key} batch {batch}: {value:.3f} ms"
        for key, row in manifest.latency_ms.items()
        for batch, value in row.items()
    ]
    yield _check("prove-bench", bool(rows), "; ".join(rows) or "nothing was measured")
    yield _graph_check(host, found, bundle)


def _graph_check(host: BuildHost, found: InstalledEngine, bundle: Bundle) -> Check:
    """Run one shape until its CUDA graph is captured and replayed, and compare a replay with the first run."""
    from edgeds.engines.golden_check import compare, golden_feeds

    assert host.open_plan is not None
    with host.open_plan(found.plan) as engine:
        fitting = (
            feeds
            for _, feeds in golden_feeds(bundle.golden())
            if found.manifest.fits({name: array.shape for name, array in feeds.items()})
        )
        feeds = next(fitting)
        first = engine.infer(feeds)
        times = []
        last = first
        for _ in range(GRAPH_RUNS):
            begin = time.perf_counter()
            last = engine.infer(feeds)
            times.append((time.perf_counter() - begin) * 1000)
        stats: Any = getattr(engine, "stats", lambda: None)()
    problem = getattr(stats, "graph_problem", "this engine captures no graphs")
    replays = getattr(stats, "graph_runs", 0)
    if not replays:
        return _check("prove-graph", False, f"no CUDA graph was captured: {problem or 'the reason is unknown'}")
    worst = max(compare(np.asarray(last[name]), np.asarray(array))[0] for name, array in first.items())
    message = f"{replays} replay(s), {statistics.median(times):.3f} ms; differs from the first run by {worst:.2e}"
    return _check("prove-graph", worst < 1e-3, message)


def _check(name: str, ok: bool, message: str) -> Check:
    return Check(name=name, ok=ok, required=True, message=message)
