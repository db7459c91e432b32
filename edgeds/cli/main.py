"""``edgeds VERB ...``: find the verb, parse, run, and turn every failure into one sentence and an exit code.

Exit codes: 0 done; 1 the work failed or a limit was not met; 2 the command was used wrongly; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from edgeds._version import __version__
from edgeds.cli.options import add_common, trusting
from edgeds.cli.output import StdoutError, flush_stdout, reserve_stdout
from edgeds.errors import EdgedsError, SpecError

# Verb -> summary. The module edgeds.cli.VERB is imported only when its verb is used, so --help stays fast.
VERBS = {
    "demo": "fetch a detector, calibrate, pack and run it on photographs, with a report",
    "models": "list, fetch and locate known models",
    "inspect": "show what a model is: inputs, operators, FLOPs, what can be INT8, problems",
    "quantize": "calibrate a model and write it with INT8 Q/DQ nodes",
    "prune": "remove channels from a model",
    "recover": "train a pruned or INT8 model against its original",
    "sparsify": "make weights 2:4 sparse for sparse tensor cores",
    "bundle": "create, show, verify, zip and unzip bundles",
    "build": "build and check the TensorRT engine of a bundle",
    "push": "copy a bundle to a device over SSH, build and check its engine there",
    "run": "run a bundle on images, videos or cameras",
    "embed": "turn texts into vectors",
    "classify": "classify texts",
    "tag": "find entities in texts",
    "answer": "answer questions with a part of their context",
    "generate": "write text after prompts",
    "chat": "talk to a language model",
    "eval": "measure the accuracy of a bundle on a labelled data set",
    "bench": "measure frames per second and latency of a bundle",
    "plan": "find power mode, precision, batch and size that meet a budget on a board",
    "tune": "measure power modes, batches and forms of a bundle on this board",
    "profile": "show where the time of a model goes, per layer and against the device's peaks",
    "predict": "predict latency, power and memory of a model on a board",
    "targets": "list boards and power modes with their sources",
    "monitor": "watch power, clocks, load and temperatures, live or from a tegrastats log",
    "report": "write a page and a picture about runs: speed, power, layers, comparison",
    "compare": "compare the outputs of two models, precisions or backends",
    "doctor": "check what this machine has and what is missing",
}

EXAMPLES = """\
examples:
  edgeds demo --out demo                                  everything once, from download to report
  edgeds models fetch yolo11n                             get a detector
  edgeds bundle create model.onnx --task detect --calib images/ --out model.bundle
  edgeds run model.bundle street.jpg --save out/
  edgeds VERB --help                                      options and examples of one verb
"""

_signals: list[signal.Signals] = []
"""What has asked this run to stop."""

_SYSTEM_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)

INTERRUPTED = 130
TERMINATED = 143
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _signals.clear()
    _open_closed_streams()
    _use_lenient_streams()
    verb = "edgeds"
    debug = "--debug" in arguments
    try:
        debug = debug or _debug_wanted()
        options, verb_name, rest = _split(arguments)
        if verb_name is None:
            return _run_without_verb(options)
        verb = f"edgeds {verb_name}"
        return _run_verb(verb_name, [*options, *rest])
    except SystemExit as error:  # argparse: --help, --version, usage errors
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        return _stopped(verb)
    except BrokenPipeError:
        _discard_stdout()  # its reader went away (| head)
        return BROKEN_PIPE
    except StdoutError as error:
        _discard_stdout()
        print(f"{verb}: error: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # the one place where everything ends up; nothing is swallowed silently
        # A library may have turned the interruption of its import into an error of its own.
        return _stopped(verb) if _signals else _report(error, verb=verb, debug=debug)


def _stopped(verb: str) -> int:
    if signal.SIGTERM in _signals:
        return TERMINATED
    print(f"{verb}: interrupted", file=sys.stderr)
    return INTERRUPTED


def build_parser(verb: str) -> argparse.ArgumentParser:
    """The argument parser of one verb; imports the verb's module."""
    module = importlib.import_module(f"edgeds.cli.{verb}")
    parser = argparse.ArgumentParser(
        prog=f"edgeds {verb}",
        description=module.SUMMARY,
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        conflict_handler="resolve",  # a verb may give its own meaning to -v or -q
    )
    add_common(parser)
    module.add_arguments(parser)
    parser.set_defaults(_run=module.run)
    return parser


def _run_verb(verb: str, arguments: list[str]) -> int:
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(VERBS)}"
        raise SpecError(f"unknown verb {verb!r}; {hint}")
    args = build_parser(verb).parse_args(arguments)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_logging(verbose=getattr(args, "verbose", 0), quiet=getattr(args, "quiet", False)))
        stack.enter_context(_signals_clean_up())
        if getattr(args, "json", False):
            stack.enter_context(reserve_stdout())
        stack.enter_context(trusting(args))
        code: int = args._run(args)
    flush_stdout()
    return code


def _split(arguments: list[str]) -> tuple[list[str], str | None, list[str]]:
    """Options before the verb, the verb, the rest."""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-"):
            return arguments[:index], argument, arguments[index + 1 :]
    return arguments, None, []


def _run_without_verb(options: list[str]) -> int:
    width = max(map(len, VERBS))
    table = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="edgeds",
        usage="edgeds [--version] [--help] VERB ...",
        description="Prune, calibrate, pack and run models on embedded NVIDIA GPUs.",
        epilog=f"verbs:\n{table}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"edgeds {__version__}")
    add_common(parser)
    parser.parse_args(options)
    parser.print_help(sys.stderr)
    return 2


def _report(error: Exception, *, verb: str, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, EdgedsError):
        print(f"{verb}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SpecError) else 1
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _SYSTEM_ERRORS):
        # The system of the user (a disk full, read-only, no permission), not a fault of the program.
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"{verb}: error: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    if isinstance(error, ImportError):
        text = " ".join(str(error).split())
        print(f"{verb}: error: a package cannot be imported ({text}); see: edgeds doctor", file=sys.stderr)
        return 1
    if isinstance(error, MemoryError):
        print(f"{verb}: error: not enough memory ({error or 'no details'}); use smaller inputs", file=sys.stderr)
        return 1
    hint = "" if debug else "; run it again with --debug for the traceback to report"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"{verb}: error: this is a bug in edgeds ({text}){hint}", file=sys.stderr)
    return 1


def _debug_wanted() -> bool:
    value = os.environ.get("EDGEDS_DEBUG", "0")
    if value not in ("", "0", "1"):
        raise SpecError(f"EDGEDS_DEBUG is {value!r}; use 0 or 1")
    return value == "1"


def _open_closed_streams() -> None:
    """Point streams that the caller closed (``>&-``) at the null device.

    Python has None in their place, and the next file that anything opens would get their number and, with it, what a
    native library prints.
    """
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                handle = os.open(os.devnull, flags)
                if handle != number:
                    os.dup2(handle, number)
                    os.close(handle)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _discard_stdout() -> None:
    """Point stdout at the null device, so that the flush at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _use_lenient_streams() -> None:
    """Let file names that are not UTF-8 pass through stdout unchanged instead of failing in print."""
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None and stream.errors == "strict":
            reconfigure(errors=errors)


@contextlib.contextmanager
def _logging(*, verbose: int, quiet: bool) -> Iterator[None]:
    """Log to stderr while a verb runs: warnings by default, more with -v and -vv, errors only with -q."""
    logger = logging.getLogger("edgeds")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    level = logging.ERROR if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextlib.contextmanager
def _signals_clean_up() -> Iterator[None]:
    """Make ``kill PID`` unwind like Ctrl-C, so that temporary files are removed, and note both."""

    def stop(number: int, _frame: object) -> None:
        _signals.append(signal.Signals(number))
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watched = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        watched.append(signal.SIGINT)  # not where it is ignored, as in a background job of a shell
    before = {number: signal.signal(number, stop) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
