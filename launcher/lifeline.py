"""The child's end of the two pipes between the launcher and each process it starts.

*Lifeline*: the launcher holds the write end of a pipe and never writes. When the launcher ends, however it ends, the
read end in the child reports end of file, and the child leaves. *Ready*: the child writes lines while it loads, and
a last one when it can serve.
"""

from __future__ import annotations

import os
import signal
import threading

LOADING = "loading "
"""Begins the lines of the ready pipe that come before the last."""

_LAST_CHANCE_S = 3.0


def follow(lifeline: int | None) -> None:
    """Leave when the launcher does: first as on SIGTERM, and for certain a few seconds later."""
    if lifeline is None:
        return

    def watch() -> None:
        os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(_LAST_CHANCE_S, os._exit, (1,)).start()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


class Ready:
    """The child's end of its ready pipe, if a launcher has started it."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._percent = -1

    def loading(self, done: int, total: int) -> None:
        """Tell the launcher how far loading has come, in whole percents."""
        percent = 100 * done // max(total, 1)
        if self._descriptor is not None and percent != self._percent:
            self._percent = percent
            os.write(self._descriptor, f"{LOADING}{percent}\n".encode())

    def report(self, line: str) -> None:
        """Tell the launcher that this process can serve, the first time that it can."""
        if self._descriptor is not None:
            os.write(self._descriptor, f"{line}\n".encode())
            os.close(self._descriptor)
            self._descriptor = None
