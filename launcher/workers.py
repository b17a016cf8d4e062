"""What each kind of worker process does: load, join the gateway, serve. Heavy imports happen here, in the child."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from launcher.child import Child
from launcher.errors import LaunchError
from launcher.lifeline import Ready, follow
from launcher.ranks import LandingConfig, make_team
from models.errors import ModelError
from models.serving import Served, ServingConfig
from pools.errors import PlanRefused
from pools.sizing import MemoryPlan, Phase

Progress = Callable[[int, int], None]


class Worker(Protocol):
    """A prefill, decode or colocated worker."""

    def run(self, on_welcome: Callable[[], None]) -> None:
        """Serve until told to stop."""
        ...


def set_up_logging(name: str) -> None:
    """One line an event on standard error, each with the process's name."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name:<12} %(levelname)-7s %(message)s")


def run_prefill(child: Child, serving: ServingConfig, chunk_size: int, transfer: str, verify_transfers: bool) -> None:
    """A prefill worker, until it is told to stop."""

    def build(stack: ExitStack, progress: Progress) -> tuple[Served, Worker]:
        from prefill.config import PrefillConfig
        from prefill.worker import PrefillWorker

        # Twice the requests it can compute at once: the next ones' memory on decode is ready when theirs here is.
        ask_ahead = 2 * serving.max_running_requests
        config = PrefillConfig(child.name, child.gateway, chunk_size, ask_ahead, transfer, verify_transfers)
        team, _ = make_team(child, serving, Phase.PREFILL, None, stack, progress)
        return team.served, PrefillWorker(config, team, child.incarnation)

    _run(child, build)


def run_decode(child: Child, serving: ServingConfig, peer_endpoint: str, landing: LandingConfig) -> None:
    """A decode worker, until it is told to stop."""

    def build(stack: ExitStack, progress: Progress) -> tuple[Served, Worker]:
        import zmq

        from decode.config import DecodeConfig
        from decode.worker import DecodeWorker

        config = DecodeConfig(child.name, child.gateway, peer_endpoint)
        team, landings = make_team(child, serving, Phase.DECODE, landing, stack, progress)
        return team.served, DecodeWorker(config, team, child.incarnation, zmq.Context(), landings)

    _run(child, build)


def run_colocated(child: Child, serving: ServingConfig, chunk_size: int) -> None:
    """A worker that does both, until it is told to stop."""

    def build(stack: ExitStack, progress: Progress) -> tuple[Served, Worker]:
        from colocated.config import ColocatedConfig
        from colocated.worker import ColocatedWorker

        config = ColocatedConfig(child.name, child.gateway, chunk_size)
        team, _ = make_team(child, serving, Phase.COLOCATED, None, stack, progress)
        return team.served, ColocatedWorker(config, team, child.incarnation)

    _run(child, build)


def _run(child: Child, build: Callable[[ExitStack, Progress], tuple[Served, Worker]]) -> None:
    """Load and bind, where what the user can mend becomes one line; then serve."""
    import zmq

    from ranks.errors import RankLostError
    from transfer.errors import TransferError

    follow(child.lifeline_fd)
    set_up_logging(child.name)
    ready = Ready(child.ready_fd)
    with ExitStack() as stack:
        try:
            served, worker = build(stack, ready.loading)
        except (ModelError, PlanRefused, TransferError) as error:
            raise LaunchError(f"{child.name}: {error}") from error
        except zmq.ZMQError as error:
            raise LaunchError(f"{child.name}: cannot use one of its endpoints: {error}") from error
        except MemoryError as error:
            raise LaunchError(f"{child.name}: not enough memory for the planned pools; lower --memory") from error
        except RankLostError as error:
            raise LaunchError(f"{child.name}: {error}") from error
        try:
            worker.run(lambda: ready.report(summary(served.plan)))
        except RankLostError as error:
            raise LaunchError(f"{child.name} must start anew: {error}") from error


def summary(plan: MemoryPlan) -> str:
    """The plan in one line."""
    return (
        f"{plan.max_running_requests} running requests, {plan.num_pages} pages of {plan.page_size} tokens, "
        f"{plan.num_slots} slots, {plan.total_bytes / 2**20:.0f} MiB"
    )
