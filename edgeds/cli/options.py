"""Options that every verb has, and actions under a verb."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def given_path(text: str) -> Path:
    """A path for argparse. An empty text (a shell variable that is not set) would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def add_common(parser: argparse.ArgumentParser, *, inner: bool = False) -> None:
    """Add ``-v``, ``-q`` and ``--debug``. ``inner`` parsers leave values alone that were given before the action."""
    common = parser.add_argument_group("common options")

    def default(value: Any) -> Any:
        return argparse.SUPPRESS if inner else value

    common.add_argument(
        "-v", "--verbose", action="count", default=default(0), help="log more to stderr (-vv: everything)"
    )
    common.add_argument("-q", "--quiet", action="store_true", default=default(False), help="no progress, only errors")
    common.add_argument("--debug", action="store_true", default=default(False), help="show a traceback for every error")


def add_action(actions: Any, name: str, *, help: str, examples: str = "") -> argparse.ArgumentParser:
    """Add an action under a verb (``edgeds VERB ACTION``), with the common options and ``--json``.

    ``examples`` are those of the verb; the help of the action shows the ones that use it.
    """
    own = _examples_of(name, examples)
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog=f"examples:\n{own}" if own else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_common(parser, inner=True)
    return parser


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust`` and ``--require-signature``; ``trusting`` makes them hold."""
    group = parser.add_argument_group("who made the bundle")
    group.add_argument(
        "--trust",
        action="append",
        default=[],
        type=given_path,
        metavar="KEY.pub",
        help="the bundle must be signed with this key, or another one given, repeatable",
    )
    group.add_argument("--require-signature", action="store_true", help="refuse bundles that no trusted key signed")


@contextlib.contextmanager
def trusting(args: argparse.Namespace) -> Iterator[None]:
    """Make the options hold wherever this process, and those it starts, open a bundle: they become its environment.

    A missing or foreign key file is a SpecError here, before any work.
    """
    given = getattr(args, "trust", [])
    if not given and not getattr(args, "require_signature", False):
        yield
        return
    from edgeds.bundle.signature import KEYS_VARIABLE, REQUIRE_VARIABLE, find_trust

    before = {name: os.environ.get(name) for name in (KEYS_VARIABLE, REQUIRE_VARIABLE)}
    listed = [str(path.absolute()) for path in given] or [text for text in [before[KEYS_VARIABLE]] if text]
    os.environ[KEYS_VARIABLE] = os.pathsep.join(listed)
    os.environ[REQUIRE_VARIABLE] = "1"
    try:
        find_trust()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _examples_of(action: str, examples: str) -> str:
    """The example lines with ``edgeds VERB action``, with the lines that continue them."""
    kept, keeping = [], False
    for line in examples.splitlines():
        words = line.split()
        if "edgeds" in words:
            keeping = action in words[words.index("edgeds") + 1 :][1:2]
        if keeping:
            kept.append(line)
    return "\n".join(kept)
