"""``edgeds doctor``: what this machine has and what is missing."""

from __future__ import annotations

import argparse
import sys

from edgeds._version import __version__
from edgeds.cli.output import emit_json, emit_text
from edgeds.doctor import check_machine, is_healthy

SUMMARY = "Check what this machine has and what is missing. Exit 1 only when a required part fails."

EXAMPLES = """\
examples:
  edgeds doctor                 a line per part; missing optional parts say how to get them
  edgeds doctor --json          the same for scripts: checks with name, ok, required, message
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if not args.quiet:
        print("looking at this machine ...", file=sys.stderr)
    checks = check_machine()
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
