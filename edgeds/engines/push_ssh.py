"""The system's ssh and rsync, as argument lists: where to, what to run, and what their failures mean.

One connection is opened and shared by all commands, so that a password or a token is asked for once. What runs on the
device is one quoted word list; nothing a user types reaches a shell unquoted.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeds.errors import DeviceError, SpecError

CONNECT_TIMEOUT_S = 15
CONNECTION_LOST = 255
"""What ssh exits with when the connection, not the command, failed."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """``user@host`` of the command line, checked. ``user`` may be missing: ssh then decides."""

    user: str | None
    host: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str, *, port: int | None = None) -> Target:
        """Read ``user@host``, ``host`` or ``user@[IPv6]``. Raises SpecError for anything else."""
        match = re.fullmatch(r"(?:([A-Za-z0-9_][\w.\-]*)@)?(?:\[([0-9A-Fa-f:.%\w]+)\]|([A-Za-z0-9][\w.\-]*))", text)
        if match is None:
            raise SpecError(f"{text!r}: expected USER@HOST, as in jetson@192.168.1.20")
        if port is not None and not 1 <= port <= 65535:
            raise SpecError(f"--port {port}: expected 1 to 65535")
        return cls(user=match.group(1), host=match.group(2) or match.group(3), port=port)

    @property
    def for_ssh(self) -> str:
        return f"{self.user}@{self.host}" if self.user else self.host

    @property
    def for_rsync(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user}@{host}" if self.user else host

    def __str__(self) -> str:
        return self.for_rsync if self.port is None else f"{self.for_rsync} port {self.port}"


@dataclass(frozen=True, kw_only=True)
class Remote:
    """An open way to a device. ``command`` is ssh with its options, ``wrapper`` the same as a program for rsync."""

    target: Target
    command: tuple[str, ...]
    wrapper: Path

    def run(
        self, arguments: Sequence[str], *, text_in: str | None = None, show: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the device. ``show`` lets its stderr (progress) through as it comes.

        A connection that cannot be made or breaks is a DeviceError; the program's own failure is in ``returncode``.
        """
        done = subprocess.run(
            [*self.command, self.target.for_ssh, shlex.join(arguments)],
            input=text_in if text_in is not None else "",
            stdout=subprocess.PIPE,
            stderr=None if show else subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=local_environment(),
        )
        if done.returncode == CONNECTION_LOST:
            raise DeviceError(explain_ssh(done.stderr or "", self.target))
        return done


@contextlib.contextmanager
def open_remote(target: Target, *, identity: Path | None = None, options: Sequence[str] = ()) -> Iterator[Remote]:
    """Share one ssh connection for the time of the block. ``options`` are ssh's own ``KEY=VALUE`` (as for ``-o``).

    Raises DeviceError when ssh is not installed, SpecError for a key file that is not there.
    """
    if shutil.which("ssh") is None:
        raise DeviceError("the program 'ssh' is not installed here; sudo apt install openssh-client")
    if identity is not None and not identity.is_file():
        raise SpecError(f"--identity {identity}: no such key file")
    for option in options:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*=.*", option):
            raise SpecError(f"--ssh-option {option!r}: expected KEY=VALUE, as in ProxyJump=gateway")
    # Short: the path of a socket is limited to about a hundred characters.
    with tempfile.TemporaryDirectory(prefix="eds-") as folder:
        command = [
            "ssh",
            *("-o", f"ControlPath={folder}/%C", "-o", "ControlMaster=auto", "-o", "ControlPersist=60"),
            *("-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-o", "ServerAliveInterval=15"),
            # Without a terminal nobody can answer a question: fail instead of waiting for ever.
            *(() if sys.stdin is not None and sys.stdin.isatty() else ("-o", "BatchMode=yes")),
            *(("-p", str(target.port)) if target.port is not None else ()),
            *(("-i", str(identity)) if identity is not None else ()),
            *(part for option in options for part in ("-o", option)),
        ]
        wrapper = Path(folder) / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
        wrapper.chmod(0o700)
        try:
            yield Remote(target=target, command=tuple(command), wrapper=wrapper)
        finally:
            subprocess.run(
                [*command, "-O", "exit", target.for_ssh],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )


_SSH_FAILURES = (
    (
        r"Permission denied|Too many authentication failures",
        "the device refused the login; check the user name and the key (ssh-copy-id {target}, or --identity)",
    ),
    (r"Could not resolve|Name or service not known", "the name of the device is unknown; use its address"),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the device's host key is not known or has changed; log in once with ssh and check the fingerprint",
    ),
    (r"Connection refused", "the device answers, but no ssh server listens there; check --port and that sshd runs"),
    (
        r"timed out|No route to host|Network is unreachable|Host is down|Connection closed by",
        "the device cannot be reached; check that it is on, its address, and the network",
    ),
)


def explain_ssh(stderr: str, target: Target) -> str:
    """One sentence for a connection that failed, from what ssh wrote."""
    for pattern, text in _SSH_FAILURES:
        if re.search(pattern, stderr, re.IGNORECASE):
            return f"{target}: {text.format(target=target.for_ssh)}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"{target}: the connection broke{f' ({lines[-1]})' if lines else ''}; run the command again, it resumes"


def explain_rsync(stderr: str, *, code: int, target: Target, folder: str) -> str:
    """One sentence for a copy that failed. Exit codes as in rsync(1)."""
    if code == CONNECTION_LOST or re.search(r"Permission denied \(|Connection refused", stderr):
        return explain_ssh(stderr, target)
    if "No space left" in stderr or "Disk quota" in stderr:
        return f"{target}: the disk of {folder} is full; free some and push again, it resumes"
    if re.search(r"rsync: (command )?not found|rsync: No such file", stderr):
        return f"{target}: rsync is not installed there; sudo apt install rsync"
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith("rsync error")]
    reason = lines[-1] if lines else f"rsync exit code {code}"
    if code in (10, 12, 30, 35):
        return f"{target}: the connection broke while copying ({reason}); push again, it resumes"
    return f"{target}: copying to {folder} failed ({reason})"


def local_environment() -> dict[str, str]:
    """The environment for ssh and rsync: messages in English, since they are searched."""
    return {**os.environ, "LC_ALL": "C", "LANGUAGE": "C"}
