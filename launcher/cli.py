"""The `tandem` command. Each command parses its options into frozen configurations and calls one function.

Heavy modules (torch, transformers, FastAPI) are imported by what runs, never here: `tandem plan` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from launcher.child import Child
from launcher.errors import LaunchError
from launcher.options import (
    child_options,
    chunk_option,
    compute_options,
    http_options,
    model_options,
    pool_options,
    tp_option,
    transfer_option,
    verify_option,
    worker_options,
)
from launcher.ranks import FollowerConfig, LandingConfig, run_follower
from launcher.settings import Settings, new_incarnation
from launcher.workers import run_colocated, run_decode, run_prefill, set_up_logging
from pools.sizing import Phase
from wire.messages import Incarnation


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="tandem-serve", prog_name="tandem")
def main() -> None:
    """Serve hybrid language models with prefill and decode in separate processes."""


@main.command()
@model_options
@click.option("--prefill", "prefill_workers", type=click.IntRange(1, 256), default=1, show_default=True,
              help="Prefill workers.")  # fmt: skip
@click.option("--decode", "decode_workers", type=click.IntRange(1, 256), default=1, show_default=True,
              help="Decode workers.")  # fmt: skip
@click.option("--prefill-tp", type=click.IntRange(1, 64), default=1, show_default=True,
              help="Tensor-parallel ranks of each prefill worker.")  # fmt: skip
@click.option("--decode-tp", type=click.IntRange(1, 64), default=1, show_default=True,
              help="Tensor-parallel ranks of each decode or colocated worker.")  # fmt: skip
@click.option("--mode", type=click.Choice(["disaggregated", "colocated"]), default="disaggregated", show_default=True,
              help="colocated: one worker does both phases, as a reference.")  # fmt: skip
@http_options
@pool_options
@chunk_option
@transfer_option
@verify_option
@compute_options
def serve(
    prefill_workers: int,
    decode_workers: int,
    prefill_tp: int,
    decode_tp: int,
    mode: str,
    host: str,
    port: int,
    request_timeout: float,
    api_key: str | None,
    retries: int,
    silence: float,
    max_queue: int,
    chunk_size: int,
    transfer: str,
    verify_transfers: bool,
    **values: Any,
) -> None:
    """Start a gateway and workers for MODEL, a Hugging Face checkpoint folder, and serve until Ctrl-C."""
    from launcher.serve import Fleet, HttpOptions, PrefillOptions, run_fleet

    run_fleet(
        Settings(**values),
        Fleet(prefill_workers, decode_workers, prefill_tp, decode_tp, colocated=mode == "colocated"),
        HttpOptions(host, port, request_timeout, api_key, retries, silence, max_queue),
        PrefillOptions(chunk_size, transfer, verify_transfers),
    )


@main.command()
@model_options
@click.option("--role", type=click.Choice(["prefill", "decode", "colocated"]), default=None,
              help="Plan one kind of worker only. [default: prefill and decode]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@tp_option
@pool_options
def plan(role: str | None, as_json: bool, **values: Any) -> None:
    """Show the memory that workers for MODEL would allocate, to the byte, without loading anything."""
    import json

    from rich.console import Console

    from launcher.plan import as_json as plan_as_json
    from launcher.plan import render
    from launcher.serve import checked_plan

    settings = Settings(**values)
    phases = [Phase(role)] if role else [Phase.PREFILL, Phase.DECODE]
    processes = settings.tp * (1 if role == "colocated" else 2)
    plans = [checked_plan(settings.serving(phase, processes), phase) for phase in phases]
    if as_json:
        bodies = [json.loads(plan_as_json(item)) for item in plans]
        click.echo(json.dumps(bodies[0] if role else bodies, indent=2))
    else:
        for item in plans:
            render(item, Console())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Show what this machine offers and which transfer back ends work here, and why others do not."""
    from rich.console import Console

    from launcher.doctor import run

    run(as_json, Console())


@main.command()
@click.argument("gguf", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def convert(gguf: Path, folder: Path) -> None:
    """Turn a GGUF file into a checkpoint FOLDER that `tandem serve` takes."""
    from models.convert import convert as convert_gguf
    from models.errors import ModelError

    try:
        convert_gguf(gguf, folder)
    except ModelError as error:
        raise LaunchError(str(error)) from error
    click.echo(f"wrote {folder}; serve it with: tandem serve {folder}")


@main.command()
@click.argument("model", type=click.Path())
@click.option("--control", required=True, help="ZMQ endpoint where workers dial in, e.g. tcp://127.0.0.1:7000.")
@click.option("--served-model-name", default=None, help="Name in the API. [default: the folder's name]")
@http_options
@child_options
def gateway(
    model: str,
    control: str,
    served_model_name: str | None,
    host: str,
    port: int,
    request_timeout: float,
    api_key: str | None,
    retries: int,
    silence: float,
    max_queue: int,
    lifeline_fd: int | None,
    ready_fd: int | None,
) -> None:
    """Run a gateway on its own, for workers that are started by hand."""
    from launcher.lifeline import Ready, follow
    from launcher.settings import model_folder

    follow(lifeline_fd)
    set_up_logging("gateway")
    from gateway.config import GatewayConfig
    from gateway.errors import StartError
    from gateway.server import run

    path = model_folder(model)
    config = GatewayConfig(
        model_path=path,
        served_model_name=served_model_name or path.name,
        control_endpoint=control,
        host=host,
        port=port,
        request_timeout_s=request_timeout,
        retries=retries,
        api_key=api_key,
        silence_s=silence,
        max_queue=max_queue,
    )
    try:
        run(config, Ready(ready_fd).report)
    except StartError as error:
        raise LaunchError(str(error)) from error


@main.command()
@model_options
@worker_options
@tp_option
@pool_options
@chunk_option
@transfer_option
@verify_option
@compute_options
@child_options
def prefill(
    name: str,
    gateway: str,
    incarnation: str | None,
    chunk_size: int,
    transfer: str,
    verify_transfers: bool,
    lifeline_fd: int | None,
    ready_fd: int | None,
    **values: Any,
) -> None:
    """Run one prefill worker on its own; it dials the gateway."""
    settings = Settings(**values)
    serving = settings.serving(Phase.PREFILL, processes=2 * settings.tp)
    run_prefill(
        _child(name, gateway, incarnation, lifeline_fd, ready_fd), serving, chunk_size, transfer, verify_transfers
    )


@main.command()
@model_options
@worker_options
@tp_option
@click.option("--peers", required=True, help="ZMQ endpoint where prefill workers dial in.")
@click.option("--data", default="tcp://127.0.0.1:*", show_default=True,
              help="ZMQ endpoint where the tcp back end receives.")  # fmt: skip
@pool_options
@transfer_option
@compute_options
@child_options
def decode(
    name: str,
    gateway: str,
    incarnation: str | None,
    peers: str,
    data: str,
    transfer: str,
    lifeline_fd: int | None,
    ready_fd: int | None,
    **values: Any,
) -> None:
    """Run one decode worker on its own; it dials the gateway, and prefill workers dial it."""
    settings = Settings(**values)
    serving = settings.serving(Phase.DECODE, processes=2 * settings.tp)
    run_decode(
        _child(name, gateway, incarnation, lifeline_fd, ready_fd), serving, peers, LandingConfig(transfer, data)
    )


@main.command()
@model_options
@worker_options
@tp_option
@pool_options
@chunk_option
@compute_options
@child_options
def colocated(
    name: str,
    gateway: str,
    incarnation: str | None,
    chunk_size: int,
    lifeline_fd: int | None,
    ready_fd: int | None,
    **values: Any,
) -> None:
    """Run one worker that does both phases."""
    settings = Settings(**values)
    serving = settings.serving(Phase.COLOCATED, processes=settings.tp)
    run_colocated(_child(name, gateway, incarnation, lifeline_fd, ready_fd), serving, chunk_size)


@main.command(hidden=True)
@click.argument("config")
@click.option("--lifeline-fd", type=int, required=True)
def rank(config: str, lifeline_fd: int) -> None:
    """One of a worker's tensor-parallel ranks, which its first rank starts; for its own use."""
    parsed = FollowerConfig.from_json(config)
    set_up_logging(f"{parsed.name}.{parsed.rank}")
    run_follower(parsed, lifeline_fd)


def _child(name: str, gateway: str, incarnation: str | None, lifeline_fd: int | None, ready_fd: int | None) -> Child:
    return Child(name, Incarnation(incarnation or new_incarnation()), gateway, lifeline_fd, ready_fd)
