"""``edgeds models``: list, fetch and locate the models of the zoo."""

from __future__ import annotations

import argparse

from edgeds import zoo
from edgeds.cli.options import add_action
from edgeds.cli.output import emit_json, emit_text

SUMMARY = "List, fetch and locate known models. Each model has its own licence, shown when it is fetched."

EXAMPLES = """\
examples:
  edgeds models list                      what there is, its licence and size, what is cached
  edgeds models fetch yolo11n             download once, verify, print the path
  edgeds inspect "$(edgeds models path yolo11n)"
  EDGEDS_CACHE=/data/models edgeds models fetch minilm-l6
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|fetch|path")
    add_action(actions, "list", help="list all models", examples=EXAMPLES)
    fetch = add_action(actions, "fetch", help="download a model into the cache and print its path", examples=EXAMPLES)
    path = add_action(actions, "path", help="print the path of a model that is in the cache", examples=EXAMPLES)
    for action in (fetch, path):
        action.add_argument("name", metavar="NAME", help="a name from 'edgeds models list'")


def run(args: argparse.Namespace) -> int:
    if args.action == "list":
        return _list(args)
    path = zoo.fetch_model(args.name, quiet=args.quiet) if args.action == "fetch" else zoo.model_path(args.name)
    if args.json:
        entry = zoo.find_entry(args.name)
        emit_json({"name": entry.name, "path": path, "license": entry.license})
    else:
        emit_text(str(path))
    return 0


def _list(args: argparse.Namespace) -> int:
    rows = [
        {
            "name": entry.name,
            "summary": entry.summary,
            "license": entry.license,
            "bytes": entry.bytes,
            "cached": zoo.is_cached(entry),
            "files": {file.name: file.license or entry.license for file in entry.files},
        }
        for entry in zoo.list_models()
    ]
    if args.json:
        emit_json({"models": rows})
        return 0
    for row in rows:
        state = "cached" if row["cached"] else "not fetched"
        emit_text(f"{row['name']:<14}  {int(str(row['bytes'])) / 1e6:6.1f} MB  {state:<11}  {row['summary']}")
        emit_text(f"{'':<14}  licence: {row['license']}")
    return 0
