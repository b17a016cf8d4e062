"""Which back ends there are, and which one joins two workers."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import zmq

from transfer.errors import MediumUnusable
from transfer.medium import Channel
from transfer.shm import ShmChannel
from transfer.tcp import TcpChannel
from wire.messages import PeerHello

MEDIA = ("shm", "tcp")
"""Best first."""


def media_of(choice: str) -> tuple[str, ...]:
    """The back ends that `--transfer choice` allows, best first; `auto` allows all."""
    if choice == "auto":
        return MEDIA
    if choice not in MEDIA:
        raise MediumUnusable(f"there is no transfer back end {choice!r}; choose auto, {' or '.join(MEDIA)}")
    return (choice,)


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


def open_channel(
    medium: str, reach: str, context: zmq.Context[zmq.Socket[bytes]], source: np.ndarray, target_nbytes: int
) -> Channel:
    """Connect to one decode rank's pools. Raises MediumUnusable when that cannot be."""
    openers: Mapping[str, Callable[[], Channel]] = {
        "shm": lambda: ShmChannel(source, reach, target_nbytes),
        "tcp": lambda: TcpChannel(context, source, reach),
    }
    if medium not in openers:
        raise MediumUnusable(f"the decode worker wants transfer back end {medium!r}, unknown here")
    return openers[medium]()
