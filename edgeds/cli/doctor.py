"""``edgeds doctor``: what this machine has and what is missing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgeds._version import __version__
from edgeds.cli.output import emit_json, emit_text
from edgeds.doctor import check_machine, is_healthy

SUMMARY = "Check what this machine has and what is missing. Exit 1 only when a required part fails."

HELP_PROVE = "also build an engine, check it, measure it and capture a CUDA graph (of BUNDLE, or of a small model)"

EXAMPLES = """\
examples:
  edgeds doctor                 a line per part; missing optional parts say how to get them
  edgeds doctor --json          the same for scripts: checks with name, ok, required, message
  edgeds doctor --prove         on a board: build, golden check, measurement and CUDA graph of a small INT8 model
  edgeds doctor --prove yolo.bundle
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prove", nargs="?", const=True, metavar="BUNDLE", help=HELP_PROVE)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if not args.quiet:
        print("looking at this machine ...", file=sys.stderr)
    checks = check_machine()
    if args.prove is not None:
        from edgeds.doctor_prove import prove

        checks += prove(None if args.prove is True else Path(args.prove), quiet=args.quiet)
    healthy = is_healthy(checks)
    if args.json:
        emit_json({"version": __version__, "ok": healthy, "checks": checks})
        return 0 if healthy else 1
    for check in checks:
        state = "ok" if check.ok else "FAILED" if check.required else "missing"
        kind = "required" if check.required else "optional"
        emit_text(f"{state:<8} {check.name:<12} ({kind})  {check.message}")
    failed = [check.name for check in checks if check.required and not check.ok]
    missing = [check.name for check in checks if not check.required and not check.ok]
    emit_text(f"required: {'FAILED: ' + ', '.join(failed) if failed else 'all fine'}")
    emit_text(f"optional: {'missing: ' + ', '.join(missing) if missing else 'all there'}")
    return 0 if healthy else 1
