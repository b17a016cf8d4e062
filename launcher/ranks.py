"""The processes of one worker's tensor-parallel ranks: the leader starts the others, and they leave with it.

leader (rank 0) ── spawns ──▶ tandem rank …    model and pools: each its share
                ◀── ipc ───▶                   what to do, see `ranks`
                ◀── torch.distributed ──▶      sums during forward steps
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.child import Child
from models.serving import ServingConfig
from pools.sizing import Phase
from pools.spec import DType

if TYPE_CHECKING:
    import torch
    import zmq

    from models.layers.ranks import Ranks
    from models.serving import Served
    from ranks.team import Team
    from transfer.medium import Landing

_LOAD_S = 600.0
_STEP_S = 120.0
_LEAVE_S = 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LandingConfig:
    """How a decode worker takes hand-offs: the choice of back ends, and where tcp listens (every rank, with `:*`)."""

    transfer: str
    data_endpoint: str


@dataclass(frozen=True, slots=True)
class FollowerConfig:
    """What a follower process must know; passed as JSON."""

    name: str
    rank: int
    leader: str
    store_port: int
    phase: Phase
    serving: ServingConfig
    landing: LandingConfig | None

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self), default=lambda value: getattr(value, "value", None) or str(value))

    @classmethod
    def from_json(cls, text: str) -> FollowerConfig:
        """What `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        serving: dict[str, Any] = fields["serving"]
        serving |= {"model_path": Path(serving["model_path"]), "dtype": DType(serving["dtype"])}
        fields |= {"phase": Phase(fields["phase"]), "serving": ServingConfig(**serving)}
        if fields["landing"]:
            fields["landing"] = LandingConfig(**fields["landing"])
        return cls(**fields)


def make_team(
    child: Child,
    serving: ServingConfig,
    phase: Phase,
    landing: LandingConfig | None,
    stack: ExitStack,
    progress: Callable[[int, int], None],
) -> tuple[Team, dict[str, Landing]]:
    """Load this worker's model on all of its ranks. Returns rank 0's landings, of a decode worker, with the team.

    `stack` ends the other ranks; `progress` hears of rank 0's weights. Raises what
    `models.serving.load` raises, and RankLostError.
    """
    import zmq

    from ranks.team import Team

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if serving.tp == 1:
        served, landings = load_rank(child.name, serving, phase, landing, context, None, progress)
        return Team(served), landings

    import torch.distributed as dist

    from models.serving import plan_worker
    from ranks.followers import Followers
    from wire.links import ListenLink

    plan_worker(serving, phase)  # what is wrong with the model or the memory is said once, before there are processes
    # An own port for each worker: the kernel picks one that is free.
    store = dist.TCPStore("127.0.0.1", 0, serving.tp, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    link = ListenLink(context, f"ipc://{_directory(child, stack)}/{child.name}.ranks")
    config = FollowerConfig(child.name, 0, link.endpoint, store.port, phase, serving, landing)
    processes = [_start(replace(config, rank=rank), stack) for rank in range(1, serving.tp)]
    followers = Followers(link, len(processes), lambda: _check(processes))
    served, landings = load_rank(child.name, serving, phase, landing, context, join(store, 0, serving.tp), progress)
    followers.wait_ready(_LOAD_S)
    return Team(served, followers), landings


def _directory(child: Child, stack: ExitStack) -> str:
    """A private one for the ranks' socket: the run directory, or a new one for a worker started by hand."""
    if child.gateway.startswith("ipc://"):
        return str(Path(child.gateway.removeprefix("ipc://")).parent)
    return stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-", ignore_cleanup_errors=True))


def join(store: Any, rank: int, size: int) -> Ranks:
    """Meet the other ranks. NCCL where the model is on GPUs; Gloo on CPUs."""
    import socket

    import torch.distributed as dist

    from models.layers.ranks import Ranks

    loopbacks = {"lo", "lo0"} & {interface for _, interface in socket.if_nameindex()}
    if loopbacks:  # ranks of one host; Gloo would otherwise look for an address that the host's name stands for
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopbacks.pop())
    timeout = timedelta(seconds=_STEP_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return Ranks(rank, size, dist.group.WORLD)


def load_rank(
    name: str,
    serving: ServingConfig,
    phase: Phase,
    landing: LandingConfig | None,
    context: zmq.Context[zmq.Socket[bytes]],
    ranks: Ranks | None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Served, dict[str, Landing]]:
    """One rank's model, pools and, on decode, back ends. Its pools lie in shared memory where that is allowed."""
    import torch

    from models.serving import load
    from transfer.media import PoolMemory, media_of, open_landing
    from transfer.segment import Segment

    media = media_of(landing.transfer) if landing else ()
    segments: list[Segment] = []

    def shared_block(nbytes: int) -> torch.Tensor:
        segments.append(Segment.create(name, nbytes))
        return torch.frombuffer(segments[0].memory, dtype=torch.uint8)[:nbytes]

    served = load(serving, phase, shared_block if "shm" in media else None, ranks, progress)
    memory = PoolMemory(served.storage.block, segments[0] if segments else None)
    endpoint = landing.data_endpoint if landing else ""
    return served, {medium: open_landing(medium, memory, context, endpoint) for medium in media}


def run_follower(config: FollowerConfig, lifeline_fd: int) -> None:
    """A rank other than the first, until its leader ends."""
    import torch.distributed as dist
    import zmq

    from launcher.lifeline import follow
    from ranks.follower import Follower

    follow(lifeline_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the leader too, which ends this rank
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    store = dist.TCPStore("127.0.0.1", config.store_port, config.serving.tp, is_master=False)  # type: ignore[attr-defined]
    ranks = join(store, config.rank, config.serving.tp)
    served, landings = load_rank(config.name, config.serving, config.phase, config.landing, context, ranks)
    follower = Follower(served, config.leader, context, landings)
    follower.say_ready()
    while True:  # the lifeline ends it
        follower.turn(1000)


def _start(config: FollowerConfig, stack: ExitStack) -> subprocess.Popen[bytes]:
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", "rank", config.to_json(), "--lifeline-fd", str(reader)],
            pass_fds=(reader,), stdin=subprocess.DEVNULL,
        )  # fmt: skip
    finally:
        os.close(reader)
    stack.callback(_end, process)
    stack.callback(os.close, writer)  # first: this is what tells it to leave
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _check(processes: list[subprocess.Popen[bytes]]) -> None:
    from ranks.errors import RankLostError

    for rank, process in enumerate(processes, start=1):
        if process.poll() is not None:
            raise RankLostError(f"the process of rank {rank} has ended with code {process.returncode}")
