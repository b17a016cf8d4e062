"""What each kind of worker process does: load, join the gateway, serve. Heavy imports happen here, in the child."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from launcher.errors import LaunchError
from launcher.lifeline import Ready, follow
from models.errors import ModelError
from models.serving import Served, ServingConfig
from pools.errors import PlanRefused
from pools.sizing import MemoryPlan, Phase
from wire.messages import Incarnation


@dataclass(frozen=True, slots=True)
class Child:
    """One worker process: its name, where it belongs, and the pipes to the launcher, if one has started it."""

    name: str
    incarnation: Incarnation
    gateway: str
    lifeline_fd: int | None
    ready_fd: int | None


class Worker(Protocol):
    """A prefill, decode or colocated worker."""

    def run(self, on_welcome: Callable[[], None]) -> None:
        """Serve until told to stop."""
        ...


def set_up_logging(name: str) -> None:
    """One line an event on standard error, each with the process's name."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name:<12} %(levelname)-7s %(message)s")


def run_prefill(child: Child, serving: ServingConfig, chunk_size: int, transfer: str) -> None:
    """A prefill worker, until it is told to stop."""

    def build() -> tuple[Served, Worker]:
        from models.serving import load
        from prefill.config import PrefillConfig
        from prefill.worker import PrefillWorker

        # Twice the requests it can compute at once: the next ones' memory on decode is ready when theirs here is.
        ask_ahead = 2 * serving.max_running_requests
        config = PrefillConfig(child.name, child.gateway, chunk_size, ask_ahead, transfer)
        served = load(serving, Phase.PREFILL)
        return served, PrefillWorker(config, served, child.incarnation)

    _run(child, build)


def run_decode(child: Child, serving: ServingConfig, peer_endpoint: str, data_endpoint: str, transfer: str) -> None:
    """A decode worker, until it is told to stop. Its pools lie in shared memory where `transfer` allows that."""

    def build() -> tuple[Served, Worker]:
        import torch
        import zmq

        from decode.config import DecodeConfig
        from decode.worker import DecodeWorker
        from models.serving import load
        from transfer.media import media_of
        from transfer.medium import Landing
        from transfer.segment import Segment
        from transfer.shm import ShmLanding
        from transfer.tcp import TcpLanding

        media = media_of(transfer)
        landings: dict[str, Landing] = {}

        def shared_block(nbytes: int) -> torch.Tensor:
            segment = Segment.create(f"{child.name}-{child.incarnation}", nbytes)
            landings["shm"] = ShmLanding(segment)
            return torch.frombuffer(segment.memory, dtype=torch.uint8)[:nbytes]

        served = load(serving, Phase.DECODE, shared_block if "shm" in media else None)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if "tcp" in media:
            landings["tcp"] = TcpLanding(context, served.storage.block.numpy(), data_endpoint)
        config = DecodeConfig(child.name, child.gateway, peer_endpoint)
        return served, DecodeWorker(config, served, child.incarnation, context, landings)

    _run(child, build)


def run_colocated(child: Child, serving: ServingConfig, chunk_size: int) -> None:
    """A worker that does both, until it is told to stop."""

    def build() -> tuple[Served, Worker]:
        from colocated.config import ColocatedConfig
        from colocated.worker import ColocatedWorker
        from models.serving import load

        served = load(serving, Phase.COLOCATED)
        return served, ColocatedWorker(
            ColocatedConfig(child.name, child.gateway, chunk_size), served, child.incarnation
        )

    _run(child, build)


def _run(child: Child, build: Callable[[], tuple[Served, Worker]]) -> None:
    """Load and bind, where what the user can mend becomes one line; then serve."""
    import zmq

    from transfer.errors import TransferError

    follow(child.lifeline_fd)
    set_up_logging(child.name)
    try:
        served, worker = build()
    except (ModelError, PlanRefused, TransferError) as error:
        raise LaunchError(f"{child.name}: {error}") from error
    except zmq.ZMQError as error:
        raise LaunchError(f"{child.name}: cannot use one of its endpoints: {error}") from error
    except MemoryError as error:
        raise LaunchError(f"{child.name}: not enough memory for the planned pools; lower --memory") from error
    ready = Ready(child.ready_fd)
    worker.run(lambda: ready.report(summary(served.plan)))


def summary(plan: MemoryPlan) -> str:
    """The plan in one line."""
    return (
        f"{plan.max_running_requests} running requests, {plan.num_pages} pages of {plan.page_size} tokens, "
        f"{plan.num_slots} slots, {plan.total_bytes / 2**20:.0f} MiB"
    )
