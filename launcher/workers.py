"""What each kind of child process does: load, say that it is ready, serve. Heavy imports happen here, in children."""

from __future__ import annotations

import logging
from collections.abc import Callable

from launcher.errors import LaunchError
from launcher.lifeline import follow, report_ready
from models.errors import ModelError
from models.serving import ServingConfig
from pools.errors import PlanRefused
from pools.sizing import MemoryPlan, Phase
from wire.messages import Incarnation


def set_up_logging(name: str) -> None:
    """One line an event on standard error, each with the process's name."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name:<12} %(levelname)-7s %(message)s")


def run_prefill(
    name: str,
    serving: ServingConfig,
    gateway: str,
    chunk_size: int,
    transfer: str,
    incarnation: Incarnation,
    lifeline: int | None,
    ready: int | None,
) -> None:
    """A prefill worker, until it is told to stop."""
    follow(lifeline)
    set_up_logging(name)

    def serve() -> Callable[[], None]:
        from models.serving import load
        from prefill.config import PrefillConfig
        from prefill.worker import PrefillWorker

        # Twice the requests it can compute at once: the next ones' memory on decode is ready when theirs here is.
        config = PrefillConfig(name, gateway, chunk_size, 2 * serving.max_running_requests, transfer)
        served = load(serving, Phase.PREFILL)
        worker = PrefillWorker(config, served, incarnation)
        report_ready(ready, summary(served.plan))
        return worker.run

    _start(serve)()


def run_decode(
    name: str,
    serving: ServingConfig,
    gateway: str,
    peer_endpoint: str,
    data_endpoint: str,
    transfer: str,
    incarnation: Incarnation,
    lifeline: int | None,
    ready: int | None,
) -> None:
    """A decode worker, until it is told to stop. Its pools lie in shared memory where `transfer` allows that."""
    follow(lifeline)
    set_up_logging(name)

    def serve() -> Callable[[], None]:
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
        segments: list[Segment] = []

        def shared_block(nbytes: int) -> torch.Tensor:
            segments.append(Segment.create(f"{name}-{incarnation}", nbytes))
            return torch.frombuffer(segments[0].memory, dtype=torch.uint8)[:nbytes]

        served = load(serving, Phase.DECODE, shared_block if "shm" in media else None)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        landings: dict[str, Landing] = {}
        if segments:
            landings["shm"] = ShmLanding(segments[0])
        if "tcp" in media:
            landings["tcp"] = TcpLanding(context, served.storage.block.numpy(), data_endpoint)
        config = DecodeConfig(name, gateway, peer_endpoint)
        worker = DecodeWorker(config, served, incarnation, context, landings)
        report_ready(ready, summary(served.plan))
        return worker.run

    _start(serve)()


def run_colocated(
    name: str,
    serving: ServingConfig,
    gateway: str,
    chunk_size: int,
    incarnation: Incarnation,
    lifeline: int | None,
    ready: int | None,
) -> None:
    """A worker that does both, until it is told to stop."""
    follow(lifeline)
    set_up_logging(name)

    def serve() -> Callable[[], None]:
        from colocated.config import ColocatedConfig
        from colocated.worker import ColocatedWorker
        from models.serving import load

        served = load(serving, Phase.COLOCATED)
        worker = ColocatedWorker(ColocatedConfig(name, gateway, chunk_size), served, incarnation)
        report_ready(ready, summary(served.plan))
        return worker.run

    _start(serve)()


def _start(serve: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Load and bind; what the user can mend becomes one line."""
    from transfer.errors import TransferError

    try:
        return serve()
    except (ModelError, PlanRefused, TransferError) as error:
        raise LaunchError(str(error)) from error
    except MemoryError as error:
        raise LaunchError("the system has not enough memory for the planned pools; lower --memory") from error


def summary(plan: MemoryPlan) -> str:
    """The plan in one line."""
    return (
        f"{plan.max_running_requests} running requests, {plan.num_pages} pages of {plan.request.page_size} tokens, "
        f"{plan.num_slots} slots, {plan.total_bytes / 2**20:.0f} MiB"
    )
