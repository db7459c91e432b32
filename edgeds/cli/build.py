"""``edgeds build``: a verified TensorRT engine from a bundle, built on this machine or ahead of time for RTX GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.cli.options import add_trust
from edgeds.cli.output import emit_json, emit_text
from edgeds.errors import SpecError

if TYPE_CHECKING:
    from edgeds.engines.install import BuildHost, InstalledEngine
    from edgeds.engines.installed import RemovedEngine

SUMMARY = "Build the TensorRT engine of a bundle, check it against the golden samples, and install it."

EXAMPLES = """\
examples:
  edgeds build yolo.bundle                          for the GPU of this machine; at once when it is there already
  edgeds build yolo.bundle --max-batch 4 --json     batches up to 4; the result as JSON
  edgeds build yolo.bundle --rtx 86                 with TensorRT-RTX for RTX 30 GPUs, on any machine, without a GPU
  edgeds build yolo.bundle --precision float        the float model, to compare with
  edgeds build yolo.bundle --prune                  and remove engines that an update of JetPack left behind

The engine goes to BUNDLE/engines/FINGERPRINT/, or to the user's cache where the bundle cannot be written. It belongs to
this GPU and this TensorRT version and is never used elsewhere: copy the bundle, not the engine.
"""

# Flag -> field of BuildOptions; only what is given is passed on.
BUILDER_OPTIONS = ("workspace_mib", "optimization_level", "dla_core", "sparsity")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle folder or zip")
    parser.add_argument(
        "--rtx", metavar="SM", help="build ahead of time for RTX GPUs of this compute capability (86, 89, 120, ...)"
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "int8", "int4", "float16", "float"),
        default="auto",
        help="what to build (default: what the bundle is made for)",
    )
    parser.add_argument("--max-batch", type=int, metavar="N", help="largest batch (default: the bundle's)")
    parser.add_argument("--sizes", metavar="HxW,HxW", help="resolutions to serve (default: the bundle's)")
    parser.add_argument("--workspace-mib", type=int, metavar="MIB", help="scratch memory the builder may use")
    parser.add_argument(
        "--optimization-level", type=int, metavar="0..5", help="more is slower to build and maybe faster to run"
    )
    parser.add_argument("--dla-core", type=int, metavar="N", help="build for this DLA core, where the module has one")
    parser.add_argument("--sparsity", action="store_true", default=None, help="use 2:4 sparse weights")
    parser.add_argument("--force", action="store_true", help="build even if the engine is there")
    parser.add_argument(
        "--prune", action="store_true", help="then remove this bundle's engines that do not fit this machine any more"
    )
    parser.add_argument("--no-measure", action="store_true", help="skip measuring latencies after the build")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    from edgeds.bundle import open_bundle
    from edgeds.engines.install import install_engine
    from edgeds.engines.installed import remove_unfit
    from edgeds.specs import Resolution

    for name, low, high in (("max_batch", 1, 4096), ("workspace_mib", 1, 1 << 20), ("optimization_level", 0, 5)):
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise SpecError(f"--{name.replace('_', '-')}: expected {low} to {high}, got {value}")
    buckets = None
    if args.sizes is not None:
        buckets = [Resolution.parse(part) for part in args.sizes.split(",")]
    removed: tuple[RemovedEngine, ...] = ()
    with open_bundle(args.bundle, quiet=args.quiet) as bundle:
        host = open_host(args)
        found = install_engine(
            bundle,
            host=host,
            precision=args.precision,
            max_batch=args.max_batch,
            buckets=buckets,
            options=given_options(args),
            force=args.force,
            measure_seconds=0.0 if args.no_measure else 5.0,
            quiet=args.quiet,
        )
        if args.prune:
            removed = remove_unfit(bundle, host=host, keep=found.manifest.fingerprint)
    if args.json:
        emit_json({**result_json(found), "removed": removed})
    else:
        emit_text("\n".join(describe(found)))
        for engine in removed:
            emit_text(f"removed {engine.folder} ({engine.size_bytes / 1e6:.1f} MB): {engine.reason}")
    return 0


def open_host(args: argparse.Namespace) -> BuildHost:
    """What builds here. Replaced in tests."""
    from edgeds.engines.install import find_host

    return find_host(rtx=args.rtx, quiet=args.quiet)


def given_options(args: argparse.Namespace) -> Mapping[str, Any]:
    """The builder options that were given."""
    return {name: value for name in BUILDER_OPTIONS if (value := getattr(args, name)) is not None}


def result_json(found: InstalledEngine) -> dict[str, Any]:
    """What ``--json`` prints. ``golden_max_error`` is null when no check was possible; ``notes`` say why."""
    manifest = found.manifest
    return {
        "engine": found.plan,
        "fingerprint": manifest.fingerprint,
        "cached": found.cached,
        "golden_max_error": found.golden_max_error,
        "golden": manifest.golden,
        "precision": manifest.precision,
        "product": manifest.product,
        "tensorrt": manifest.tensorrt,
        "device": manifest.device,
        "profiles": manifest.profiles,
        "plan_bytes": manifest.plan_bytes,
        "build_s": manifest.build_s,
        "latency_ms": manifest.latency_ms,
        "notes": found.notes,
    }


def describe(found: InstalledEngine) -> list[str]:
    """The result for people."""
    manifest = found.manifest
    how = "was there already" if found.cached else f"built in {manifest.build_s:.1f} s"
    lines = [
        f"{found.plan}",
        f"{how}: {manifest.precision}, {manifest.plan_bytes / 1e6:.1f} MB, for {manifest.device}, "
        f"{manifest.product} {manifest.tensorrt}",
    ]
    if manifest.golden is not None:
        lines.append(
            f"golden check: passed on {manifest.golden.samples} sample(s), largest error "
            f"{100 * (found.golden_max_error or 0.0):.2f} % of the output's range"
        )
    for key, row in manifest.latency_ms.items():
        lines.append(f"{key}: " + ", ".join(f"batch {batch} {value:.2f} ms" for batch, value in row.items()))
    return [*lines, *(f"note: {note}" for note in dict.fromkeys(found.notes))]
