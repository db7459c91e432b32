"""Bring a bundle to a device over SSH: look, copy what changed, build and check the engine there, measure briefly.

Every step can be repeated: what is there is not sent again, a copy that broke goes on, and a build that still runs on
the device is waited for, not started twice.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeds._version import __version__
from edgeds.bundle import Bundle
from edgeds.bundle.keys import key_id
from edgeds.bundle.manifest import SIGNATURE_NAME
from edgeds.bundle.signature import find_trust
from edgeds.engines.push_device import (
    Facts,
    PushCheck,
    check_device,
    check_folder,
    check_remote_dir,
    last_line,
    probe,
    run_script,
)
from edgeds.engines.push_scripts import INSTALL
from edgeds.engines.push_ssh import Remote, Target, explain_rsync, local_environment, open_remote
from edgeds.engines.push_wheel import pack_wheel
from edgeds.errors import BuildError, DeviceError
from edgeds.progress import byte_bar

PARTIAL_DIR = ".edgeds-partial"


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """What was done. ``build`` and ``bench`` are the JSON of those verbs on the device, None when they did not run."""

    host: str
    remote_dir: str
    sent: tuple[str, ...]
    sent_bytes: int
    installed: bool
    checks: tuple[PushCheck, ...]
    build: Mapping[str, Any] | None = None
    bench: Mapping[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks if check.required)


@dataclass(kw_only=True)
class _Push:
    """State of one push."""

    remote: Remote
    bundle: Bundle
    quiet: bool
    checks: list[PushCheck] = field(default_factory=list)

    def note(self, name: str, message: str, *, ok: bool = True, required: bool = True) -> None:
        self.checks.append(PushCheck(name=name, ok=ok, required=required, message=message))


def push_bundle(
    bundle: Bundle,
    host: str,
    *,
    port: int | None = None,
    identity: Path | None = None,
    remote_dir: str | None = None,
    build: bool = True,
    build_options: Sequence[str] = (),
    bench_seconds: float = 3.0,
    ssh_options: Sequence[str] = (),
    quiet: bool = False,
) -> PushReport:
    """Copy ``bundle`` to ``host`` (``user@host``) and make it ready to run there.

    ``remote_dir`` is absolute or relative to the home directory (default: ``edgeds/BUNDLE``). ``build_options`` are
    passed to ``edgeds build`` on the device, ``ssh_options`` (``KEY=VALUE``) to ssh. ``bench_seconds`` of 0 skips the
    measurement. On a machine that is no Jetson and has no TensorRT, nothing is built and the bundle runs on the CPU.

    Raises SpecError for bad arguments, DeviceError when the device cannot be reached, has too little room or the
    wrong JetPack, BuildError when the build or the golden check fails there.
    """
    target = Target.parse(host, port=port)
    check_remote_dir(remote_dir)
    if shutil.which("rsync") is None:
        raise DeviceError("the program 'rsync' is not installed here; sudo apt install rsync")
    name = bundle.source.name.removesuffix(".zip") or "bundle"
    with open_remote(target, identity=identity, options=ssh_options) as remote:
        push = _Push(remote=remote, bundle=bundle, quiet=quiet)
        facts = probe(remote, remote_dir=remote_dir, name=name, make=False)
        push.checks += check_device(facts, target=target, bundle=bundle, build=build)
        interpreter, installed = _ensure_edgeds(push, facts)
        facts = probe(remote, remote_dir=remote_dir, name=name, make=True)
        check_folder(facts, target)
        sent, sent_bytes = _copy(push, bundle.root, facts.folder)
        files = len(bundle.manifest.files) + 1 + (bundle.root / SIGNATURE_NAME).is_file()
        push.note("copy", f"{len(sent)} of {files} files sent to {facts.folder}")
        trust = _copy_trust(push, facts.folder)
        built = measured = None
        if build and (facts.tensorrt is not None or facts.jetson is not None):
            built = _build(push, interpreter, facts.folder, options=[*build_options, *trust])
        if bench_seconds > 0:
            measured = _bench(push, interpreter, facts.folder, seconds=bench_seconds, options=trust)
    return PushReport(
        host=str(target),
        remote_dir=facts.folder,
        sent=sent,
        sent_bytes=sent_bytes,
        installed=installed,
        checks=tuple(push.checks),
        build=built,
        bench=measured,
    )


def _ensure_edgeds(push: _Push, facts: Facts) -> tuple[str, bool]:
    """(interpreter that has this edgeds, whether it was installed now)."""
    if facts.same_code:
        push.note("edgeds", f"{facts.edgeds} is there ({facts.interpreter})")
        return facts.interpreter, False
    target = push.remote.target
    folder = f"{facts.home}/.edgeds"
    with tempfile.TemporaryDirectory(prefix="edgeds-") as local:
        pack_wheel(Path(local))
        made = push.remote.run(["mkdir", "-p", f"{folder}/wheels"])
        if made.returncode:
            raise DeviceError(f"{target}: {folder} cannot be made: {last_line(made.stderr)}")
        _copy(push, Path(local), f"{folder}/wheels")
        wheel = f"{folder}/wheels/edgeds-{__version__}-py3-none-any.whl"
        answer = run_script(
            push.remote, ["python3", "-", wheel, f"{folder}/venv"], script=INSTALL, what="installing edgeds"
        )
    if answer["error"] is not None:
        raise DeviceError(f"{target}: edgeds could not be installed in {folder}/venv: {answer['error']}")
    before = f", in place of {facts.edgeds}" if facts.edgeds else ""
    push.note("edgeds", f"{__version__} installed in {folder}/venv{before}")
    return str(answer["python"]), True


def _copy(push: _Push, source: Path, folder: str) -> tuple[tuple[str, ...], int]:
    """Make ``folder`` on the device equal to ``source``, except engines/; (files sent, bytes sent)."""
    command = [
        *(
            "rsync",
            "--recursive",
            "--times",
            "--checksum",
            "--delete",
            "--delay-updates",
            f"--partial-dir={PARTIAL_DIR}",
        ),
        *("--exclude=/engines/", "--protect-args", "--info=progress2", "--out-format=SENT %l %n"),
        *("-e", str(push.remote.wrapper), f"{source}/", f"{push.remote.target.for_rsync}:{folder}/"),
    ]
    total = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    sent: list[str] = []
    sent_bytes = 0
    with tempfile.TemporaryFile() as log, byte_bar(what="copying", total=total, quiet=push.quiet) as advance:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=local_environment()
        )
        with process:
            assert process.stdout is not None
            done = 0
            for line in _lines(process.stdout):
                if match := re.match(r"SENT (\d+) (.+)", line):
                    if not match.group(2).endswith("/"):
                        sent.append(match.group(2))
                        sent_bytes += int(match.group(1))
                elif match := re.match(r"\s*([\d,.]+)\s+\d+%", line):
                    now = int(re.sub(r"\D", "", match.group(1)))
                    advance(max(0, now - done))
                    done = max(done, now)
        if process.returncode:
            log.seek(0)
            text = log.read().decode("utf-8", "replace")
            code = process.returncode
            raise DeviceError(explain_rsync(text, code=code, target=push.remote.target, folder=folder))
    return tuple(sent), sent_bytes


def _copy_trust(push: _Push, folder: str) -> list[str]:
    """Where a signature is required here, it is there too: send the trusted public keys; the options that name them."""
    trust = find_trust()
    if not trust.required:
        return []
    with tempfile.TemporaryDirectory() as local:
        names = [f"{key_id(raw)}.pub" for raw in trust.keys.values()]
        for name, path in zip(names, trust.keys, strict=True):
            shutil.copyfile(path, Path(local) / name)
        _copy(push, Path(local), f"{folder}.trusted")
    push.note("signature", f"{push.bundle.signature.message}; its {len(names)} trusted key(s) are on the device")
    return [option for name in names for option in ("--trust", f"{folder}.trusted/{name}")]


def _lines(stream: Any) -> Any:
    """Text between carriage returns or newlines, as it comes: rsync redraws its progress with carriage returns."""
    rest = b""
    while block := stream.read1(4096):
        *lines, rest = re.split(rb"[\r\n]", rest + block)
        yield from (line.decode("utf-8", "replace") for line in lines)
    yield rest.decode("utf-8", "replace")


def _build(push: _Push, interpreter: str, folder: str, *, options: Sequence[str]) -> Mapping[str, Any]:
    quiet = ["--quiet"] if push.quiet else []
    command = [interpreter, "-m", "edgeds", "build", folder, "--json", *quiet, *options]
    done = push.remote.run(command, show=not push.quiet)
    data = find_json(done.stdout)
    if done.returncode or data is None:
        raise BuildError(f"{push.remote.target}: the build failed: {_failure(done)}")
    error = data.get("golden_max_error")
    push.note("engine", f"{data.get('engine')} ({'was there' if data.get('cached') else 'built'})")
    if error is None:
        push.note("golden", "; ".join(data.get("notes") or ["no check was possible"]), ok=False, required=False)
    else:
        push.note("golden", f"passed on the device, largest error {100 * float(error):.2f} % of the output's range")
    return data


def _bench(
    push: _Push, interpreter: str, folder: str, *, seconds: float, options: Sequence[str]
) -> Mapping[str, Any] | None:
    """A short measurement. Its failure is noted and does not undo the push: images may need OpenCV there."""
    command = [interpreter, "-m", "edgeds", "bench", folder, "--json", "--quiet", "--warmup", "1"]
    done = push.remote.run([*command, "--seconds", f"{seconds:g}", *options])
    data = find_json(done.stdout)
    if done.returncode or data is None:
        push.note("bench", f"could not be measured: {_failure(done)}", ok=False, required=False)
        return None
    push.note("bench", f"{data.get('fps')} frames/s on {data.get('backend')}", required=False)
    return data


def find_json(text: str) -> dict[str, Any] | None:
    """The JSON object in a verb's output; a login shell may have printed lines before it."""
    for match in re.finditer(r"^\{", text, re.MULTILINE):
        try:
            data, _ = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            continue
        return data if isinstance(data, dict) else None
    return None


def _failure(done: subprocess.CompletedProcess[str]) -> str:
    text = last_line(done.stderr or "")
    return re.sub(r"^edgeds \w+: error: ", "", text) or f"exit code {done.returncode}, see the lines above"
