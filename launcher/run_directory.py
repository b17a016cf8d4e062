"""The private directory of one running `tandem serve`: its sockets, and a lock that says whether it is alive.

`BASE/run-XXXXXXXX/` with mode 0700, where BASE is under `XDG_RUNTIME_DIR`, or the temporary directory where that is
not set or too long a path for sockets. A directory whose lock nobody holds belongs to a launcher that was killed; the
next start removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from launcher.errors import LaunchError

_LOCK = "lock"
_LONGEST_PATH = 107 - len("/decode-255.peers")
"""A unix socket's path has at most 107 bytes, and this is the longest name that we give one."""


def _base() -> Path:
    places = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")
    bases = [Path(place) / f"tandem-{os.getuid()}" for place in places if place and Path(place).is_dir()]
    for base in bases:
        if len(str(base)) + len("/run-12345678") <= _LONGEST_PATH:
            return base
    raise LaunchError(f"{bases[0]} is too long a path for sockets; set XDG_RUNTIME_DIR to a shorter one")


class RunDirectory:
    """A context manager: makes the directory, and removes it with everything in it."""

    def __init__(self) -> None:
        base = _base()
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise LaunchError(f"{base} must be a directory that only you can enter; remove it or set XDG_RUNTIME_DIR")
        _remove_stale(base)
        self.path = Path(tempfile.mkdtemp(prefix="run-", dir=base))
        self._lock = _locked(self.path)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def socket(self, name: str) -> str:
        """The ZMQ endpoint of a socket in the directory."""
        return f"ipc://{self.path / name}"


def _locked(path: Path) -> int | None:
    """Take the lock of a run directory; None when a living launcher has it."""
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_stale(base: Path) -> None:
    for path in base.glob("run-*"):
        lock = _locked(path) if (path / _LOCK).exists() else None
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
