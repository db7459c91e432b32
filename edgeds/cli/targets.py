"""``edgeds targets``: the boards and power modes we know, with their sources, and this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgeds.boards.catalogue import Catalogue, load_catalogue
from edgeds.boards.describe import board_json, page_lines, table_lines
from edgeds.boards.spec import Target
from edgeds.boards.targets import THIS_BOARD, normalize_name, resolve_target
from edgeds.cli.output import emit_json, emit_text
from edgeds.errors import SpecError

SUMMARY = "List boards and power modes with their sources; show one, or the machine this runs on."

EXAMPLES = """\
examples:
  edgeds targets                             all boards
  edgeds targets orin-nx-16gb                one board: modes, clocks, bandwidth, notes, sources
  edgeds targets agx-orin-64gb@30W --json    one mode, for scripts
  edgeds targets jetson                      this machine, with the modes of its own nvpmodel.conf
  edgeds targets jetson@15W --set            say what a switch to 15W would do; add --yes to do it (needs sudo)
  edgeds targets --boards lab.json           with boards and modes of your own (docs/boards.md)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME[@MODE]", help="board, with a mode if you like; default: all")
    parser.add_argument(
        "--boards", type=Path, metavar="FILE", help="own boards (default: ~/.config/edgeds/boards.json if it exists)"
    )
    parser.add_argument("--set", action="store_true", dest="set_mode", help="switch this machine to NAME@MODE: dry run")
    parser.add_argument("--yes", action="store_true", help="with --set: really switch, with sudo")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.yes and not args.set_mode:
        raise SpecError("--yes belongs to --set, as in: edgeds targets jetson@15W --set --yes")
    catalogue = load_catalogue(args.boards)
    if args.set_mode:
        return _set_mode(args, catalogue)
    if args.name is None:
        if args.json:
            emit_json({"targets": [board_json(Target(board=board), catalogue) for board in catalogue.boards]})
        else:
            emit_text("\n".join(table_lines(catalogue)))
        return 0
    if normalize_name(args.name.partition("@")[0]) in THIS_BOARD:
        return _show_this(args, catalogue)
    target = resolve_target(args.name, catalogue=catalogue)
    if args.json:
        emit_json(board_json(target, catalogue))
    else:
        emit_text("\n".join(page_lines(target, catalogue)))
    return 0


def _show_this(args: argparse.Namespace, catalogue: Catalogue) -> int:
    """This machine: all modes of its board, the one in use, and what could not be found out."""
    from edgeds.boards.probe import probe_machine

    target = resolve_target(args.name, catalogue=catalogue)  # says so when this is no Jetson
    probe = probe_machine(catalogue=catalogue)
    shown = target if "@" in args.name else Target(board=target.board)
    current = probe.current_mode
    if args.json:
        machine = {
            "model": probe.model,
            "part_number": probe.part_number,
            "l4t": probe.l4t,
            "mode": probe.mode,
            "current_mode": current.name if current else None,
            "live": probe.live,
            "notes": probe.notes,
        }
        emit_json({**board_json(shown, catalogue), "machine": machine})
        return 0
    emit_text("\n".join(page_lines(shown, catalogue)))
    release = probe.l4t.l4t if probe.l4t else None
    emit_text(f"\nthis machine: {probe.model or 'model unknown'}, L4T {release or 'unknown'}")
    emit_text(f"  mode in use: {current.label if current else 'unknown'}")
    for note in probe.notes:
        emit_text(f"  note: {note}")
    return 0


def _set_mode(args: argparse.Namespace, catalogue: Catalogue) -> int:
    from edgeds.power.modes import apply_mode_change, plan_mode_change

    if args.name is None or normalize_name(args.name.partition("@")[0]) not in THIS_BOARD or "@" not in args.name:
        raise SpecError("--set changes the machine this runs on: name it as jetson@MODE")
    change = plan_mode_change(args.name.partition("@")[2], catalogue=catalogue)
    lines = [change.summary, *(f"  note: {note}" for note in change.notes)]
    if args.yes:
        print("\n".join(lines), file=sys.stderr)
        apply_mode_change(change)
    if args.json:
        emit_json({"change": change, "applied": args.yes})
    elif args.yes:
        emit_text(f"switched to {change.mode.label}")
    else:
        emit_text("\n".join([*lines, "dry run: nothing was changed; add --yes to do it"]))
    return 0
