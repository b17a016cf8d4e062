"""Bad networks: a ZMQ proxy that drops, repeats and delays messages, and one for plain TCP that cuts connections."""

from __future__ import annotations

import random
import selectors
import socket
import threading
import time
from collections.abc import Callable

import zmq

Fate = Callable[[], str]
"""What becomes of the next message: pass, drop, repeat or delay."""


def seeded_fate(seed: int, bad: float) -> Fate:
    """A share `bad` of messages meets with an accident, of each kind alike."""
    source = random.Random(seed)
    return lambda: source.choice(["drop", "repeat", "delay"]) if source.random() < bad else "pass"


class MessageProxy:
    """Stands between DEALERs that dial `endpoint` and the ROUTER at `target`; fates strike in both directions."""

    def __init__(self, target: str, fate: Fate) -> None:
        self._fate = fate
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._target = target
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._late: list[tuple[float, zmq.Socket[bytes], list[bytes]]] = []
        self.accidents = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._closing.is_set():
            for ready, _ in poller.poll(10):
                frames = ready.recv_multipart()
                if ready is self._front:
                    back = self._backs.get(frames[0])
                    if back is None:
                        back = self._backs[frames[0]] = self._context.socket(zmq.DEALER)
                        back.setsockopt(zmq.LINGER, 0)
                        back.connect(self._target)
                        poller.register(back, zmq.POLLIN)
                    self._pass(back, frames[1:])
                else:
                    (client,) = (name for name, back in self._backs.items() if back is ready)
                    self._pass(self._front, [client, *frames])
            now = time.monotonic()
            due = [item for item in self._late if item[0] <= now]
            self._late = [item for item in self._late if item[0] > now]
            for _, where, frames in due:
                where.send_multipart(frames)

    def _pass(self, where: zmq.Socket[bytes], frames: list[bytes]) -> None:
        fate = self._fate()
        self.accidents += fate != "pass"
        if fate == "delay":
            self._late.append((time.monotonic() + 0.05, where, frames))
        for _ in range({"drop": 0, "repeat": 2, "delay": 0, "pass": 1}[fate]):
            where.send_multipart(frames)

    def close(self) -> None:
        """End it, and every connection through it."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)


class CuttingProxy:
    """Forwards TCP, and cuts every connection after so many bytes, `cuts` times in all."""

    def __init__(self, target: str, after: int, cuts: int) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._after, self.cuts_left = after, cuts
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._server, selectors.EVENT_READ)
        others: dict[socket.socket, socket.socket] = {}
        passed: dict[socket.socket, int] = {}
        while not self._closing.is_set():
            for key, _ in selector.select(0.05):
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if ready is self._server:
                    near, _ = self._server.accept()
                    far = socket.create_connection(self._target)
                    for one, other in ((near, far), (far, near)):
                        others[one], passed[one] = other, 0
                        selector.register(one, selectors.EVENT_READ)
                    continue
                if ready not in others:
                    continue
                try:
                    data = ready.recv(1 << 16)
                    if data:
                        others[ready].sendall(data)
                except OSError:
                    data = b""
                passed[ready] += len(data)
                cut = self.cuts_left > 0 and passed[ready] > self._after
                self.cuts_left -= cut
                if cut or not data:
                    for end in (ready, others[ready]):
                        selector.unregister(end)
                        others.pop(end)
                        end.close()
        for end in others:
            end.close()
        self._server.close()

    def close(self) -> None:
        """End it, and every connection through it."""
        self._closing.set()
        self._thread.join()
