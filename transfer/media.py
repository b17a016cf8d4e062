"""Which back ends there are, and which one joins two workers."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import zmq

from transfer import collective, nixl, shm, tcp
from transfer.errors import MediumUnusable
from transfer.medium import Channel, Landing
from transfer.reshard import Reshard
from transfer.segment import Segment
from wire.messages import PeerHello

Context = zmq.Context[zmq.Socket[bytes]]

MEDIA = ("shm", "nixl", "tcp", "collective")
"""Best first; each is the module of its name."""

AUTOMATIC = ("shm", "tcp")
"""What `auto` chooses from: the back ends that need nothing but what is always installed."""


def media_of(choice: str) -> tuple[str, ...]:
    """The back ends that `--transfer choice` allows, best first. Raises MediumUnusable when it cannot be used."""
    if choice == "auto":
        return AUTOMATIC
    if choice not in MEDIA:
        raise MediumUnusable(f"there is no transfer back end {choice!r}; choose auto, {' or '.join(MEDIA)}")
    if reason := unusable(choice):
        raise MediumUnusable(f"the transfer back end {choice} cannot be used: {reason}")
    return (choice,)


def unusable(medium: str) -> str | None:
    """Why a back end cannot be used in this process; None when it can."""
    probes = {"shm": shm.unusable, "nixl": nixl.unusable, "tcp": tcp.unusable, "collective": collective.unusable}
    return probes[medium]()


def host_id() -> str:
    """Equal for processes that can share memory: the same boot of the same kernel, in the same PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return platform.node()
    namespace = Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()}/{namespace.readlink() if namespace.is_symlink() else ''}"


def choose_medium(hello: PeerHello, offered: Sequence[str], host: str) -> str:
    """The best back end both sides allow. Raises MediumUnusable naming both sides' choices when there is none."""
    for medium in MEDIA:
        if medium in hello.media and medium in offered and (medium != "shm" or hello.host == host):
            return medium
    raise MediumUnusable(
        f"no common transfer back end: prefill allows {', '.join(hello.media)}, decode {', '.join(offered)}"
        + ("" if hello.host == host else ", and they are not on one host")
    )


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A decode rank's pools: `block` is uint8, `(nbytes,)`; `segment` is under it where it is shared memory."""

    block: torch.Tensor
    segment: Segment | None


def open_landing(medium: str, memory: PoolMemory, context: Context, endpoint: str) -> Landing:
    """The decode side of a back end. `endpoint`: where one with a port listens (tcp, may end in `:*`).

    Raises MediumUnusable.
    """
    if medium == "shm":
        if memory.segment is None:
            raise MediumUnusable("the pools do not lie in shared memory")
        return shm.ShmLanding(memory.segment)
    openers: Mapping[str, Callable[[], Landing]] = {
        "nixl": lambda: nixl.NixlLanding(memory.block.numpy()),
        "tcp": lambda: tcp.TcpLanding(context, memory.block.numpy(), endpoint),
        "collective": lambda: collective.CollectiveLanding(context, memory.block, endpoint),
    }
    return openers[medium]()


def open_channel(medium: str, reach: str, context: Context, source: torch.Tensor, reshard: Reshard) -> Channel:
    """The prefill side: connect to one decode rank's pools. Raises MediumUnusable when that cannot be."""
    openers: Mapping[str, Callable[[], Channel]] = {
        "shm": lambda: shm.ShmChannel(source.numpy(), reach, reshard.target.nbytes),
        "nixl": lambda: nixl.NixlChannel(source.numpy(), reach, reshard.source, reshard.target),
        "tcp": lambda: tcp.TcpChannel(context, source.numpy(), reach),
        "collective": lambda: collective.CollectiveChannel(context, source, reach),
    }
    if medium not in openers:
        raise MediumUnusable(f"the decode worker wants transfer back end {medium!r}, unknown here")
    return openers[medium]()
