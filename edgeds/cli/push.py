"""``edgeds push``: copy a bundle to a device over SSH, build and check its engine there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeds.cli.options import add_trust
from edgeds.cli.output import emit_json, emit_text
from edgeds.errors import SpecError

if TYPE_CHECKING:
    from edgeds.engines.push import PushReport

SUMMARY = "Copy a bundle to a device over SSH, install edgeds if needed, build and check the engine there."

EXAMPLES = """\
examples:
  edgeds push yolo.bundle jetson@192.168.1.20                       copy, build, golden check, short bench
  edgeds push yolo.bundle jetson@orin --identity ~/.ssh/orin --json
  edgeds push yolo.bundle jetson@orin --remote-dir /data/yolo --no-build
  edgeds push yolo.bundle jetson@orin --ssh-option ProxyJump=gateway

Only what changed is sent, and a push that was interrupted goes on where it stopped.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle folder or zip")
    parser.add_argument("host", metavar="USER@HOST", help="the device, as for ssh")
    parser.add_argument("--port", type=int, metavar="N", help="port of its ssh server (default: ssh's own)")
    parser.add_argument("--identity", type=Path, metavar="FILE", help="private key file")
    parser.add_argument(
        "--remote-dir", metavar="DIR", help="the bundle's folder there (default: edgeds/BUNDLE in the home directory)"
    )
    parser.add_argument("--no-build", action="store_true", help="copy only; the engine is built later")
    parser.add_argument(
        "--precision",
        choices=("auto", "int8", "int4", "float16", "float"),
        help="what to build (default: the bundle's)",
    )
    parser.add_argument("--max-batch", type=int, metavar="N", help="largest batch to build for")
    parser.add_argument("--bench-seconds", type=float, default=3.0, metavar="S", help="0 skips it (default: 3)")
    parser.add_argument(
        "--ssh-option", action="append", default=[], metavar="KEY=VALUE", help="passed to ssh as -o, repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    from edgeds.bundle import open_bundle
    from edgeds.engines.push import push_bundle

    if not 0 <= args.bench_seconds <= 3600:
        raise SpecError(f"--bench-seconds: expected 0 to 3600, got {args.bench_seconds}")
    build_options: list[str] = []
    for name in ("precision", "max_batch"):
        value = getattr(args, name)
        if value is not None:
            build_options += [f"--{name.replace('_', '-')}", str(value)]
    with open_bundle(args.bundle, quiet=args.quiet) as bundle:
        report = push_bundle(
            bundle,
            args.host,
            port=args.port,
            identity=args.identity,
            remote_dir=args.remote_dir,
            build=not args.no_build,
            build_options=build_options,
            bench_seconds=args.bench_seconds,
            ssh_options=args.ssh_option,
            quiet=args.quiet,
        )
    if args.json:
        emit_json(result_json(report))
    else:
        emit_text("\n".join(describe(report)))
    return 0 if report.ok else 1


def result_json(report: PushReport) -> dict[str, Any]:
    """What ``--json`` prints; the keys of ``edgeds build`` stand at the top, null where nothing was built."""
    build = dict(report.build or {})
    return {
        "host": report.host,
        "remote_dir": report.remote_dir,
        "sent": report.sent,
        "sent_bytes": report.sent_bytes,
        "installed": report.installed,
        **{key: build.get(key) for key in ("engine", "fingerprint", "cached", "golden_max_error")},
        "build": report.build,
        "bench": report.bench,
        "checks": report.checks,
        "ok": report.ok,
    }


def describe(report: PushReport) -> list[str]:
    """The result for people: one line per check."""
    lines = []
    for check in report.checks:
        state = "ok" if check.ok else "FAILED" if check.required else "note"
        lines.append(f"{state:<7} {check.name:<9} {check.message}")
    return [*lines, f"{report.host}:{report.remote_dir} is ready ({report.sent_bytes / 1e6:.1f} MB sent)"]
