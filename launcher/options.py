"""The command line's options, grouped by what they are about, each defined once and shared by the commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
import psutil

from pools.sizing import (
    DEFAULT_MAX_RUNNING_REQUESTS,
    DEFAULT_PAGE_SIZE,
    DEFAULT_PRE_ALLOC_SIZE,
    DEFAULT_RESERVE_BYTES,
)

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
DEFAULT_CHUNK_SIZE = 512
API_KEY = "TANDEM_API_KEY"
"""The environment variable of the API key: on a command line, every user of the machine could read it."""
DEFAULT_PREFILL_RUNNING = 4


class Bytes(click.ParamType[int]):
    """An amount of memory: `2GiB`, `512MB`, `1.5g`, or plain bytes."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is no amount of memory; write for example 2GiB or 512MiB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2] or ""])


def default_memory(processes: int) -> int:
    """A process's budget when none is given: its share of four fifths of the memory that is available now."""
    return int(psutil.virtual_memory().available * 0.8) // processes


def _all(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def apply(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


def model_options(command: Command) -> Command:
    """What is served, and how its numbers are kept."""
    return _all(
        click.argument("model", type=click.Path()),
        click.option(
            "--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True,
            help="Type of weights and KV pages. auto: float32, which a CPU computes fastest.",
        ),
        click.option(
            "--served-model-name", default=None, help="Name in the API. [default: the folder's name]"
        ),
    )(command)  # fmt: skip


def pool_options(command: Command) -> Command:
    """Sizes of the pools."""
    return _all(
        click.option(
            "--max-running-requests", type=click.IntRange(1, 65536), default=None,
            help=f"Requests that run at once. [default: {DEFAULT_MAX_RUNNING_REQUESTS} on decode and colocated, "
            f"{DEFAULT_PREFILL_RUNNING} on prefill]",
        ),
        click.option(
            "--pre-alloc-size", type=click.IntRange(0, 65536), default=DEFAULT_PRE_ALLOC_SIZE, show_default=True,
            help="Decode rows beyond the running ones, where hand-offs land meanwhile.",
        ),
        click.option(
            "--mamba-size", "--max-mamba-cache-size", "mamba_size", type=click.IntRange(0, 2**31 - 1), default=None,
            help="Slots for recurrent states. [default: one for each row]",
        ),
        click.option(
            "--page-size", type=click.IntRange(1, 4096), default=DEFAULT_PAGE_SIZE, show_default=True,
            help="Tokens in a KV page.",
        ),
        click.option(
            "--memory", type=Bytes(), default=None,
            help="Budget of one worker, or of each of its ranks, weights included, e.g. 2GiB. "
            "[default: a share of what is available]",
        ),
        click.option(
            "--reserve", type=Bytes(), default=DEFAULT_RESERVE_BYTES, show_default=True,
            help="Part of the budget kept for activations, in bytes.",
        ),
        click.option(
            "--max-context", type=click.IntRange(1), default=None,
            help="Longest prompt plus answer, in tokens. [default: the model's]",
        ),
    )(command)  # fmt: skip


def tp_option(command: Command) -> Command:
    """A worker's tensor-parallel size."""
    return click.option(
        "--tp", type=click.IntRange(1, 64), default=1, show_default=True,
        help="Tensor-parallel ranks, one process each; --memory and --threads are each rank's.",
    )(command)  # fmt: skip


def chunk_option(command: Command) -> Command:
    """The prefill side's chunk."""
    return click.option(
        "--chunk-size", "--chunked-prefill-size", "chunk_size", type=click.IntRange(1, 1 << 20),
        default=DEFAULT_CHUNK_SIZE, show_default=True, help="Prompt tokens computed in one step.",
    )(command)  # fmt: skip


def transfer_option(command: Command) -> Command:
    """How state moves."""
    return click.option(
        "--transfer", type=click.Choice(["auto", "shm", "tcp", "collective", "nixl"]), default="auto",
        show_default=True, help="Transfer back end for hand-offs; auto is shm on one host and tcp between hosts. "
        "`tandem doctor` tells which ones work here.",
    )(command)  # fmt: skip


def verify_option(command: Command) -> Command:
    """Whether hand-offs are proven."""
    return click.option(
        "--verify-transfers/--no-verify-transfers", default=False, show_default=True,
        help="Hash what every hand-off moves, on both sides; a difference fails the request, naming the place.",
    )(command)  # fmt: skip


def compute_options(command: Command) -> Command:
    """How a worker computes."""
    return _all(
        click.option(
            "--threads", type=click.IntRange(1, 1024), default=None,
            help="CPU threads of one worker's computations. [default: its share of the cores]",
        ),
        click.option(
            "--check-weights/--no-check-weights", default=False, show_default=True,
            help="Refuse to serve weights with NaN or infinite values.",
        ),
        click.option(
            "--poison/--no-poison", default=False, show_default=True,
            help="Fill memory that nobody holds with NaN, to catch reads of stale state (slow; for debugging).",
        ),
    )(command)  # fmt: skip


def http_options(command: Command) -> Command:
    """The gateway's HTTP side."""
    return _all(
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
        click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True,
                     help="Port to listen on; 0 picks a free one."),
        click.option("--request-timeout", type=click.FloatRange(0.1, 86400), default=600.0, show_default=True,
                     help="Seconds that a request may take."),
        click.option("--api-key", envvar=API_KEY, default=None, show_envvar=True,
                     help="What clients must show as a bearer token. [default: none is needed]"),
        click.option("--retries", type=click.IntRange(0, 100), default=3, show_default=True,
                     help="Further attempts at a request whose worker was lost; then it is answered 503."),
        click.option("--silence", type=click.FloatRange(1, 3600), default=30.0, show_default=True,
                     help="Seconds without a sign of life after which a worker counts as lost."),
        click.option("--max-queue", type=click.IntRange(1, 1_000_000), default=1024, show_default=True,
                     help="Requests open at once; more are answered 429."),
    )(command)  # fmt: skip


def worker_options(command: Command) -> Command:
    """Where a worker belongs."""
    return _all(
        click.option("--gateway", required=True, help="The gateway's control endpoint, e.g. ipc:///path or tcp://…"),
        click.option("--name", required=True, help="The worker's name, unique among the gateway's workers."),
        click.option("--incarnation", default=None, hidden=True),
    )(command)


def child_options(command: Command) -> Command:
    """Pipes to the launcher that started the process; for its own use."""
    return _all(
        click.option("--lifeline-fd", type=int, default=None, hidden=True),
        click.option("--ready-fd", type=int, default=None, hidden=True),
    )(command)
