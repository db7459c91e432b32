"""Run the stages of a recipe one after the other: one JSON line at the end, errors as one sentence, an exit code."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from edgeds.errors import EdgedsError, SpecError

INTERRUPTED = 130

Stage = Callable[[argparse.Namespace, dict[str, Any]], dict[str, Any]]
"""Takes the arguments and what the stages before gave; gives what it adds."""


def run_stages(recipe: str, stages: Mapping[str, Stage], args: argparse.Namespace) -> int:
    """Run ``stages`` up to ``args.stop_after`` and print what they gave. Exit codes as those of the commands: 0 done,
    1 the work failed or a limit was not met, 2 wrong arguments, 130 interrupted."""
    done: dict[str, Any] = {}
    try:
        for name, stage in stages.items():
            done |= {**stage(args, done), "stage": name}
            if name == args.stop_after:
                break
        print(json.dumps(done, allow_nan=False))
    except EdgedsError as error:
        print(f"{recipe}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SpecError) else 1
    except KeyboardInterrupt:
        print(f"{recipe}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0
