"""A worker's one thread: sleep until a socket, a sender thread or a signal has something, then take a turn."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import zmq

_LONGEST_SLEEP_S = 1.0


class Loop:
    """Runs until SIGTERM or SIGINT arrives."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._stopping = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self.watch(self._wake_reader)

    def watch(self, source: object) -> None:
        """Wake up when this ZMQ socket, or anything with a `fileno`, becomes readable."""
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: object) -> None:
        """Undo `watch`."""
        self._poller.unregister(source)

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def run(self, turn: Callable[[float], float]) -> None:
        """Call `turn(now)` again and again; it returns for how many seconds nothing is due (0: go on at once).

        Takes over the process's signals, so it must run in the main thread.
        """
        # Python runs signal handlers only between byte codes; the file descriptor ends the poll.
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        sleep_s = 0.0
        while not self._stopping:
            self._poller.poll(int(1000 * min(sleep_s, _LONGEST_SLEEP_S)))
            with suppress(BlockingIOError):
                self._wake_reader.recv(64)
            if not self._stopping:
                sleep_s = turn(time.monotonic())
