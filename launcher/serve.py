"""`tandem serve`: check everything that can be checked at once, then start one process for each part of the fleet."""

from __future__ import annotations

import os
import shlex
import socket
from contextlib import suppress
from dataclasses import dataclass, replace

import click
import zmq

from launcher.errors import LaunchError
from launcher.options import API_KEY
from launcher.processes import ProcessSpec, Supervisor
from launcher.run_directory import RunDirectory
from launcher.settings import Settings
from models.errors import ModelError
from models.serving import ServingConfig, plan_worker
from pools.errors import PlanRefused
from pools.sizing import MemoryPlan, Phase
from wire.errors import LinkFull
from wire.links import DialLink
from wire.messages import Bye, Incarnation


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many workers of which kind, and the tensor-parallel ranks of each."""

    prefill: int
    decode: int
    prefill_tp: int
    decode_tp: int
    colocated: bool

    def tp(self, phase: Phase) -> int:
        """Ranks of a worker of this kind."""
        return self.prefill_tp if phase is Phase.PREFILL else self.decode_tp

    @property
    def processes(self) -> int:
        """Ranks of all workers."""
        return sum(self.tp(phase) for phase in self.phases.values())

    @property
    def phases(self) -> dict[str, Phase]:
        """The workers' names and phases."""
        if self.colocated:
            return {"colocated-0": Phase.COLOCATED}
        return {
            **{f"prefill-{index}": Phase.PREFILL for index in range(self.prefill)},
            **{f"decode-{index}": Phase.DECODE for index in range(self.decode)},
        }


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Where the gateway listens, and its limits."""

    host: str
    port: int
    request_timeout_s: float
    api_key: str | None
    retries: int
    silence_s: float
    max_queue: int


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """How prompts are computed and handed over."""

    chunk_size: int
    transfer: str
    verify_transfers: bool


def checked_plan(serving: ServingConfig, phase: Phase) -> MemoryPlan:
    """One worker's plan; what the user can mend becomes one line."""
    try:
        return plan_worker(serving, phase)
    except (ModelError, PlanRefused) as error:
        raise LaunchError(str(error)) from error


def run_fleet(settings: Settings, fleet: Fleet, http: HttpOptions, prefill: PrefillOptions) -> None:
    """Serve until a signal. Raises LaunchError when something is wrong with the model, the memory or the port."""
    servings = {
        name: replace(settings, tp=fleet.tp(phase)).serving(phase, fleet.processes)
        for name, phase in fleet.phases.items()
    }
    shown: set[Phase] = set()
    for name, phase in fleet.phases.items():
        plan = checked_plan(servings[name], phase)
        for warning in plan.warnings if phase not in shown else ():
            click.echo(f"warning: {phase.value}: {warning}", err=True)
        shown.add(phase)
    _check_port(http)
    if http.api_key is not None:
        os.environ[API_KEY] = http.api_key  # for the gateway's process
    with RunDirectory() as run:
        control = run.socket("gateway")
        specs = [
            ProcessSpec("gateway", _gateway_arguments(settings, http, control)),
            *(
                ProcessSpec(name, _worker_arguments(settings, name, phase, servings[name], run, prefill), worker=True)
                for name, phase in fleet.phases.items()
            ),
        ]
        click.echo(f"starting {', '.join(spec.name for spec in specs)} …")
        with Herald(control) as herald:
            Supervisor(specs, herald.tell_of_death).run(lambda lines: _announce(lines, settings))


class Herald:
    """Tells the gateway at once of workers that have died: it would otherwise learn from their silence."""

    def __init__(self, control: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = DialLink(self._context, control)

    def __enter__(self) -> Herald:
        return self

    def tell_of_death(self, worker: str, incarnation: str) -> None:
        """Say goodbye in its place."""
        with suppress(LinkFull):  # a gateway that does not read hears of it when it expires the worker
            self._link.send(Bye(worker, Incarnation(incarnation)))

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._context.term()


def _check_port(http: HttpOptions) -> None:
    """Say that a port is taken before minutes are spent on loading."""
    try:
        family, _, _, _, address = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {http.host}:{http.port}: {error.strerror or error}; choose another --port or --host"
        ) from error


def _gateway_arguments(settings: Settings, http: HttpOptions, control: str) -> tuple[str, ...]:
    name = ("--served-model-name", settings.served_model_name) if settings.served_model_name else ()
    return (
        "gateway", str(settings.model_path()), "--control", control, *name, "--host", http.host,
        "--port", str(http.port), "--request-timeout", str(http.request_timeout_s),
        "--retries", str(http.retries), "--silence", str(http.silence_s), "--max-queue", str(http.max_queue),
    )  # fmt: skip


def _worker_arguments(
    settings: Settings,
    name: str,
    phase: Phase,
    serving: ServingConfig,
    run: RunDirectory,
    prefill: PrefillOptions,
) -> tuple[str, ...]:
    own: tuple[str, ...] = ()
    if phase is not Phase.DECODE:
        own += ("--chunk-size", str(prefill.chunk_size))
    if phase is not Phase.COLOCATED:
        own += ("--transfer", prefill.transfer)
    if phase is Phase.PREFILL and prefill.verify_transfers:
        own += ("--verify-transfers",)
    if phase is Phase.DECODE:
        own += ("--peers", run.socket(f"{name}.peers"))
    return (
        phase.value, str(serving.model_path), "--gateway", run.socket("gateway"), "--name", name,
        *settings.arguments(serving), *own,
    )  # fmt: skip


def _announce(lines: dict[str, str], settings: Settings) -> None:
    """The address, and a request to copy."""
    url = lines.pop("gateway")
    for name, line in lines.items():
        click.echo(f"{name}: {line}")
    model = settings.served_model_name or settings.model_path().name
    body = '{"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 60, "temperature": 0}'
    click.echo(f"\nTandem serves {model} on {url}\n")
    click.echo(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}\n")
