"""``edgeds bundle``: create, show, verify, zip and unzip bundles."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.boards.stored_plan import read_stored_plan
from edgeds.bundle import Manifest, open_bundle, unzip_bundle, verify_bundle, zip_bundle
from edgeds.cli import llmbundle
from edgeds.cli.llmbundle import add_language_options, refuse_language_options, wants_language_bundle
from edgeds.cli.options import add_action, add_trust, given_path
from edgeds.cli.output import emit_json, emit_text
from edgeds.cli.textbundle import add_text_options, create, refuse_text_options, wants_text_bundle
from edgeds.errors import BundleError, SpecError
from edgeds.files import read_json, read_regular
from edgeds.specs import Budget, Resolution, from_json

SUMMARY = "Create, show, verify, zip and unzip bundles: the folder that holds a model and all a device needs to run it."

EXAMPLES = """\
examples:
  edgeds bundle create yolo11n.onnx --task detect --calib images/ --size 640 --out yolo.bundle
  edgeds bundle create yolo11n.onnx --task detect --calib coco/images/train --size 384x640 --size 640x384 \\
      --eval coco/ --max-drop 0.5 --target orin-nano-8gb@15W --out yolo.bundle
  edgeds bundle create model.onnx --task embed --calib feeds.npz --out model.bundle    not a YOLO: fed arrays
  edgeds bundle create minilm/ --task embed --calib sentences.txt --eval sts-dev.csv --out minilm.bundle
  edgeds bundle create smollm.gguf --task generate --weights int4 --calib texts.txt --out smollm.bundle
  edgeds bundle create model.onnx --task detect --float-only --out float.bundle
  edgeds bundle show yolo.bundle
  edgeds bundle verify yolo.bundle.zip --json
  edgeds bundle zip yolo.bundle yolo.zip      then copy yolo.zip to the device
  edgeds bundle unzip yolo.zip yolo.bundle
  edgeds bundle keygen team.key                        team.key stays here, team.key.pub goes to the devices
  edgeds bundle sign yolo.bundle --key team.key
  edgeds bundle verify yolo.bundle --trust team.key.pub
"""

MAX_BATCH = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="create|show|verify|zip|unzip|keygen|sign")
    _add_create(add_action(actions, "create", help="quantize a model and pack it", examples=EXAMPLES))
    for name, text in (("show", "print what a bundle holds"), ("verify", "check every file; exit 1 when not sound")):
        action = add_action(actions, name, help=text, examples=EXAMPLES)
        action.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle folder or zip")
        add_trust(action)
    keygen = add_action(actions, "keygen", help="make a key pair to sign bundles with", examples=EXAMPLES)
    keygen.add_argument("out", metavar="FILE", type=given_path, help="private key to write; the public one is FILE.pub")
    sign = add_action(
        actions, "sign", help="sign a bundle folder, so that devices can tell who made it", examples=EXAMPLES
    )
    sign.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle folder")
    sign.add_argument("--key", metavar="FILE", type=given_path, required=True, help="private key")
    for name, first, second in (("zip", "BUNDLE", "OUT.zip"), ("unzip", "BUNDLE.zip", "OUT")):
        action = add_action(actions, name, help=f"{name} a bundle, checking it", examples=EXAMPLES)
        action.add_argument("source", metavar=first, type=Path)
        action.add_argument("target", metavar=second, type=Path)
        add_trust(action)


def _add_create(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="ONNX file, or a text model's folder")
    parser.add_argument(
        "--task",
        required=True,
        help="what the model does: detect, segment, pose, obb or classify (YOLO); embed, classify, tag or answer "
        "(text); generate (language models); or another word (fed arrays)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="bundle folder to write")
    parser.add_argument("--calib", type=Path, metavar="PATH", help="folder of images, .npz, folder of .npz, or texts")
    parser.add_argument(
        "--size", action="append", default=[], metavar="HxW", help="resolution to serve, repeatable (640, 480x640)"
    )
    parser.add_argument("--max-batch", type=int, metavar="N", help=f"largest batch (default {MAX_BATCH}, texts 64)")
    parser.add_argument(
        "--method",
        choices=("minmax", "percentile", "entropy", "mse", "auto"),
        default="mse",
        help="how ranges are chosen (default %(default)s); auto compares them on held-out samples",
    )
    parser.add_argument(
        "--percentile", type=float, default=None, metavar="P", help="of the percentile method (default 99.999)"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="use N evenly spaced samples (default: all)")
    parser.add_argument("--eval", type=Path, metavar="PATH", help="labelled images or texts: measure float and INT8")
    parser.add_argument(
        "--split", metavar="NAME", help="of --eval: train, val or test (default: val if there are several)"
    )
    parser.add_argument(
        "--max-drop",
        type=float,
        metavar="POINTS",
        help="write nothing when INT8 loses more mAP50-95 (0.5: half a point)",
    )
    parser.add_argument("--target", metavar="NAME[@MODE]", help="board the bundle is meant for: a plan is stored in it")
    parser.add_argument("--fps", type=float, metavar="F", help="of the plan: frames per second, at least")
    parser.add_argument("--watts", type=float, metavar="W", help="of the plan: power of the module, at most")
    parser.add_argument("--latency-ms", type=float, metavar="L", help="of the plan: response, at most")
    parser.add_argument("--names", type=Path, metavar="FILE", help="class names: one per line, or JSON list or object")
    parser.add_argument(
        "--head", metavar="FAMILY", help="output layout when the model does not say it: v8, v5, end2end, yolox, ..."
    )
    parser.add_argument("--float-only", action="store_true", help="pack the float model without quantizing")
    parser.add_argument(
        "--replace", action="store_true", help="replace an older bundle at --out when the new one is ready"
    )
    add_text_options(parser)
    add_language_options(parser)


def run(args: argparse.Namespace) -> int:
    actions = {
        **{"create": _create, "show": _show, "verify": _verify, "zip": _zip, "unzip": _unzip},
        **{"keygen": _keygen, "sign": _sign},
    }
    return actions[args.action](args)


def _create(args: argparse.Namespace) -> int:
    if wants_language_bundle(args):
        return _created(args, llmbundle.create(args))
    refuse_language_options(args)
    # What is cheap to see is refused before the heavy imports.
    if args.calib is None and not args.float_only:
        raise SpecError("calibration samples are needed for INT8; give --calib PATH, or --float-only to pack without")
    if args.max_batch is not None and args.max_batch < 1:
        raise SpecError(f"--max-batch is {args.max_batch}; need at least 1")
    if args.percentile is not None and args.method != "percentile":
        raise SpecError(f"--percentile belongs to --method percentile, not {args.method}")
    from edgeds.compress.quantize import DEFAULT_PERCENTILE
    from edgeds.workshop.package import create_bundle

    percentile = args.percentile if args.percentile is not None else DEFAULT_PERCENTILE
    names = None if args.names is None else read_names(args.names)
    if wants_text_bundle(args):
        return _created(args, create(args, percentile=percentile, names=names, budget=_budget(args)))
    refuse_text_options(args)
    path = create_bundle(
        args.model,
        out=args.out,
        task=args.task,
        calib=args.calib,
        sizes=tuple(Resolution.parse(text) for text in args.size),
        max_batch=MAX_BATCH if args.max_batch is None else args.max_batch,
        method=args.method,
        percentile=percentile,
        samples=args.samples,
        names=names,
        head=args.head,
        float_only=args.float_only,
        evaluate=args.eval,
        split=args.split,
        max_drop=args.max_drop,
        target=args.target,
        budget=_budget(args),
        replace=args.replace,
        quiet=args.quiet,
    )
    return _created(args, path)


def _created(args: argparse.Namespace, path: Path) -> int:
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
    if args.json:
        report = {"accuracy": manifest.accuracy, "calibration": manifest.calibration, "manifest": manifest}
        emit_json({"bundle": path, **_summary(manifest), **report, "ok": True})
    else:
        emit_text(str(path))
    return 0


def _budget(args: argparse.Namespace) -> Budget | None:
    if args.fps is None and args.watts is None and args.latency_ms is None:
        return None
    return Budget(fps=args.fps, watts=args.watts, latency_ms=args.latency_ms)


def _show(args: argparse.Namespace) -> int:
    with open_bundle(args.bundle, quiet=args.quiet) as bundle:
        manifest = bundle.manifest
        if args.json:
            state = {"signature": bundle.signature, "ok": True}
            emit_json({"bundle": args.bundle, **_summary(manifest), "manifest": manifest, **state})
            return 0
        signature = bundle.signature.message
    emit_text(f"task        {manifest.task}   precision {manifest.precision}   max batch {manifest.max_batch}")
    emit_text(f"models      {', '.join(f'{key}: {name}' for key, name in manifest.models.items())}")
    for label, specs in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        emit_text(f"{label:<11} {'; '.join(map(str, specs)) or '-'}")
    emit_text(f"sizes       {', '.join(map(str, manifest.buckets)) or '-'}")
    emit_text(f"classes     {len(manifest.names)}")
    for label, values in (("calibration", manifest.calibration), ("accuracy", manifest.accuracy)):
        parts = [f"{key} {_short(value)}" for key, value in (values or {}).items() if key != "notes"]
        emit_text(f"{label:<11} {', '.join(parts) or '-'}")
    for note in (manifest.calibration or {}).get("notes") or ():
        emit_text(f"note        {note}")
    plan = read_stored_plan(manifest.plan, where=f"{args.bundle}: plan")
    if plan is not None:
        power = "power unknown" if plan.power_w is None else f"{plan.power_w:.3g} W"
        emit_text(
            f"plan        {plan.target}@{plan.mode}, {plan.precision}, batch {plan.batch}: {plan.fps:.4g} FPS, "
            f"{plan.latency_ms:.3g} ms, {power} ({plan.status})"
        )
    for label, text in (("target", manifest.target), ("licence", manifest.license), ("signature", signature)):
        if text:
            emit_text(f"{label:<11} {_short(text)}")
    for name, entry in sorted(manifest.files.items()):
        emit_text(f"  {entry.sha256[:12]}  {entry.bytes:>13,}  {name}")
    return 0


def _short(value: Any) -> str:
    """A value of the manifest for one line: four digits, digests cut, lists counted; ``--json`` has all of it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{key} {_short(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return str(len(value)) if value else "none"
    return str(value)[:12] if re.fullmatch("[0-9a-f]{64}", str(value)) else str(value)


def _verify(args: argparse.Namespace) -> int:
    problems = verify_bundle(args.bundle, quiet=args.quiet)
    if args.json:
        emit_json({"bundle": args.bundle, **_summary_if_readable(args), "problems": problems, "ok": not problems})
    else:
        for problem in problems:
            emit_text(str(problem))
        emit_text(f"{args.bundle}: {f'{len(problems)} problem(s)' if problems else 'ok'}")
    return 1 if problems else 0


def _zip(args: argparse.Namespace) -> int:
    zip_bundle(args.source, args.target, quiet=args.quiet)
    return _written(args)


def _unzip(args: argparse.Namespace) -> int:
    unzip_bundle(args.source, args.target, quiet=args.quiet)
    return _written(args)


def _keygen(args: argparse.Namespace) -> int:
    from edgeds.bundle.keys import make_keys

    made = make_keys(args.out)
    if args.json:
        emit_json(made)
    else:
        emit_text(f"{made.private}   private: keep it where bundles are made")
        emit_text(f"{made.public}   public, key {made.key_id}: for the devices (--trust, or ~/.config/edgeds/trusted/)")
    return 0


def _sign(args: argparse.Namespace) -> int:
    from edgeds.bundle.signature import sign_bundle

    signature = sign_bundle(args.bundle, key=args.key)
    if args.json:
        emit_json({"bundle": args.bundle, "key_id": signature.key_id, "ok": True})
    else:
        emit_text(f"{args.bundle}: signed by key {signature.key_id}")
    return 0


def _written(args: argparse.Namespace) -> int:
    if args.json:
        with open_bundle(args.target) as bundle:
            emit_json({"bundle": args.target, **_summary(bundle.manifest), "ok": True})
    else:
        emit_text(str(args.target))
    return 0


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {"task": manifest.task, "files": manifest.files}


def _summary_if_readable(args: argparse.Namespace) -> dict[str, Any]:
    from edgeds.bundle.archive import peek_manifest
    from edgeds.bundle.manifest import read_manifest

    try:
        manifest = read_manifest(args.bundle) if args.bundle.is_dir() else peek_manifest(args.bundle)[0]
    except BundleError:
        return {"task": None, "files": {}}  # the manifest itself is the problem; 'problems' says how
    return _summary(manifest)


@dataclass(frozen=True, kw_only=True)
class _Names:
    names: dict[int, str]


def read_names(path: Path) -> dict[int, str]:
    """Class names from a text file (one per line) or JSON (a list, or an object with class numbers as keys).

    Raises SpecError naming the file and line.
    """
    if path.suffix.lower() == ".json":
        data = read_json(path)
        listed = {str(number): name for number, name in enumerate(data)} if isinstance(data, list) else data
        names = from_json(_Names, {"names": listed}, where=str(path)).names
    else:
        try:
            lines = read_regular(path).decode("utf-8-sig").splitlines()
        except OSError as error:
            raise SpecError(f"{path}: class names cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise SpecError(f"{path}: class names: is not UTF-8 text (byte {error.start})") from error
        names = dict(enumerate(line.strip() for line in lines))
        while names and not names[len(names) - 1]:
            del names[len(names) - 1]
    for number, name in names.items():
        if number < 0 or not name.strip():
            raise SpecError(f"{path}: class {number} has the name {name!r}; every class needs a text")
    if not names:
        raise SpecError(f"{path}: holds no class names")
    return names
