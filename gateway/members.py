"""Who is here: the workers that have said `Hello` and keep beating. Pure: the time is passed in.

A worker is known by its name and lives as one incarnation at a time: a `Hello` with another incarnation under the
same name means that the former process is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wire.messages import Bye, Hello, Incarnation, Load


@dataclass(frozen=True, slots=True)
class Member:
    """One worker. `peer`: its address on the control socket; `heard_at`: seconds, monotonic."""

    hello: Hello
    peer: bytes
    heard_at: float
    load: Load | None = None

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.hello.worker

    @property
    def incarnation(self) -> Incarnation:
        """Which start of the worker this is."""
        return self.hello.incarnation


class Members:
    """The workers by name. Methods that lose one return it, so that its attempts can be ended."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._by_name: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_name.values())

    def find(self, worker: str, incarnation: Incarnation) -> Member | None:
        """The worker, if it is here and still the same process."""
        member = self._by_name.get(worker)
        return member if member is not None and member.incarnation == incarnation else None

    def on_hello(self, hello: Hello, peer: bytes, now: float) -> Member | None:
        """Take a worker in, or note that it has dialled again. Returns the former incarnation, if any."""
        former = self._by_name.get(hello.worker)
        self._by_name[hello.worker] = Member(hello, peer, now)
        return former if former is not None and former.incarnation != hello.incarnation else None

    def on_load(self, load: Load, peer: bytes, now: float) -> bool:
        """Note a heartbeat. False when the sender is not a member: it has to say `Hello` first."""
        member = self.find(load.worker, load.incarnation)
        if member is None:
            return False
        self._by_name[load.worker] = replace(member, peer=peer, heard_at=now, load=load)
        return True

    def on_bye(self, bye: Bye) -> Member | None:
        """Let a worker go. Returns it, unless it was no member."""
        member = self.find(bye.worker, bye.incarnation)
        return self._by_name.pop(bye.worker) if member is not None else None

    def forget(self, member: Member) -> bool:
        """Let this worker go, at this address. False when it is not here, or no longer there."""
        now = self._by_name.get(member.name)
        if now is None or (now.incarnation, now.peer) != (member.incarnation, member.peer):
            return False
        del self._by_name[member.name]
        return True

    def expire(self, now: float) -> list[Member]:
        """Let go of, and return, those that have been silent for `silence_s` seconds."""
        silent = [member for member in self if now - member.heard_at > self._silence_s]
        for member in silent:
            del self._by_name[member.name]
        return silent
