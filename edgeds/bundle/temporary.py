"""Temporary folders (unpacked bundles, work in progress): removed when done, after a kill by the next process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from edgeds.files import real_path

PREFIX = "edgeds-bundle-"
CONTENT = "content"
LOCK = "lock"


class TemporaryFolder:
    """A folder ``root`` under the system's temporary one. The lock beside it says that its process is alive."""

    def __init__(self) -> None:
        remove_abandoned()
        self._folder, self._lock = _locked_folder()
        self.root = self._folder / CONTENT
        self.root.mkdir()
        self._pid = os.getpid()

    def remove(self) -> None:
        """Remove it; a second call does nothing, nor does one in a forked child: its parent still reads there."""
        if os.getpid() != self._pid:
            return
        handle, self._lock = self._lock, -1
        if handle >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(handle)


def remove_abandoned() -> None:
    """Remove folders of this user whose process ended without doing so (SIGKILL, power loss)."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):  # another process was faster, or it is not ours to remove
                    _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
        return
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def _locked_folder() -> tuple[Path, int]:
    while True:
        folder = real_path(Path(tempfile.mkdtemp(prefix=PREFIX)))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(shutil.rmtree, folder, ignore_errors=True)
            handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            on_failure.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # taken for abandoned in the moment before the lock was held
            except OSError:
                pass  # a file system without locks: nobody else can take it for abandoned either
            if (folder / LOCK).exists():
                on_failure.pop_all()
                return folder, handle
