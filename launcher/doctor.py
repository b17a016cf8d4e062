"""`tandem doctor`: what this machine offers, and which transfer back ends work here, tried rather than guessed."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass

import psutil
import torch
import zmq
from rich.console import Console
from rich.table import Table

from pools.layout import PoolLayout
from pools.spec import DType, PagedGroup, Segment, StateSpec, TensorSpec
from transfer import segment
from transfer.errors import TransferError
from transfer.media import AUTOMATIC, MEDIA, PoolMemory, open_channel, open_landing, unusable
from transfer.plan import LeasedMemory, plan_tokens
from transfer.reshard import Reshard
from wire.messages import AttemptId

_KV = TensorSpec("k", (1, 1024), DType.FLOAT32, 0, (Segment("heads", 1),))
_SPEC = StateSpec((PagedGroup("attention", (0,), (_KV,)),))
_PAGES = 256


@dataclass(frozen=True, slots=True)
class Finding:
    """A back end: why it cannot be used, or how fast it moved 16 MiB within this process."""

    medium: str
    automatic: bool
    problem: str | None
    gigabytes_per_second: float | None


def examine(medium: str) -> Finding:
    """Move pages through a back end, and compare every byte."""
    automatic = medium in AUTOMATIC
    if reason := unusable(medium):
        return Finding(medium, automatic, reason, None)
    try:
        return Finding(medium, automatic, None, _speed(medium))
    except (TransferError, OSError, RuntimeError) as error:
        return Finding(medium, automatic, f"a trial failed: {error}", None)


def _speed(medium: str) -> float:
    layout = PoolLayout.of(_SPEC, page_size=16, num_pages=_PAGES, num_slots=0)
    reshard = Reshard.between(_SPEC, layout, layout)
    source = torch.randint(256, (layout.nbytes,), dtype=torch.uint8)
    shared = segment.Segment.create("doctor", layout.nbytes) if medium == "shm" else None
    target = torch.frombuffer(shared.memory if shared else bytearray(layout.nbytes), dtype=torch.uint8)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    landing = open_landing(medium, PoolMemory(target, shared), context, "tcp://127.0.0.1:*")
    try:
        channel = open_channel(medium, landing.reach, context, source, reshard)
        pages = list(range(_PAGES))
        attempt = AttemptId("doctor")
        landing.open(attempt, LeasedMemory(layout, pages, []))
        ranges = plan_tokens(reshard, pages, pages, 0, _PAGES * layout.page_size)
        for _ in range(2):  # the first write also connects
            started = time.perf_counter()
            channel.write(attempt, ranges)
            channel.wait(attempt)
            seconds = time.perf_counter() - started
        channel.abandon(attempt)
        channel.close()
    finally:
        landing.close()
        context.destroy(linger=0)
    if not torch.equal(source, target):
        raise TransferError("the bytes that arrived are not those that were sent")
    return layout.nbytes / seconds / 1e9


def machine() -> dict[str, str]:
    """What else a report of a problem should say."""
    memory = psutil.virtual_memory()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cores": str(os.cpu_count()),
        "memory": f"{memory.available / 2**30:.1f} GiB available of {memory.total / 2**30:.1f}",
        "torch": torch.__version__,
        "zmq": zmq.zmq_version(),
        "gpus": ", ".join(gpus) or "none: models run on the CPU",
    }


def run(as_json: bool, console: Console) -> None:
    """Examine and print."""
    facts, findings = machine(), [examine(medium) for medium in MEDIA]
    if as_json:
        console.print_json(json.dumps({"machine": facts, "transfer": [asdict(item) for item in findings]}))
        return
    for name, value in facts.items():
        console.print(f"{name:<8} {value}", highlight=False)
    table = Table("transfer", "auto", "here", "remark", title="Transfer back ends, best first", title_justify="left")
    for item in findings:
        speed = f"{item.gigabytes_per_second:.1f} GB/s within one process" if item.gigabytes_per_second else ""
        verdict = "[red]no[/red]" if item.problem else "[green]works[/green]"
        table.add_row(item.medium, "yes" if item.automatic else "", verdict, item.problem or speed)
    console.print(table)
