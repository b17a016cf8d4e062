"""What a hand-off costs on every back end, beside what copying the same bytes costs. Verifies every byte.

    python benchmarks/transfer.py [--tokens 512 4096 32768] [--repeats 7] [--json FILE]

The state is a hybrid model's: K and V of 24 layers x 2 heads x 128 in bf16, pages of 16 tokens scattered on both
sides, and recurrent states of 18 layers (convolution 6144 x 3 in bf16, recurrence 16 x 128 x 128 in fp32). The
landing lives in a process of its own. Baselines, in the same run on the same bytes: a copy by one thread within one
process (scattered as the pages are, and in one stretch), plain TCP sockets, plain Gloo send and recv of one buffer,
NIXL and Mooncake used by hand where they are installed. Each of ours is measured beside its baseline: a
warm-up round, then rounds in which they take turns, so that a slow spell of the machine hits both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # this file's folder would hide the package `transfer`

import numpy as np
import torch
import zmq
from rich.console import Console
from rich.table import Table

from pools.layout import PoolLayout
from pools.spec import DType, PagedGroup, Segment, SlotGroup, StateSpec, TensorSpec
from transfer.copying import copy
from transfer.media import MEDIA, PoolMemory, open_channel, open_landing, unusable
from transfer.plan import LeasedMemory, Range, plan_slots, plan_tokens
from transfer.reshard import Reshard
from transfer.segment import Segment as SharedSegment
from transfer.segment import SegmentReach
from wire.messages import AttemptId

ATTEMPT = AttemptId("bench")
PAGE = 16
SEED = 3
SAID = "bench: "
GROUPS = (
    ("memcpy scattered", "memcpy in one stretch", "shm"),
    ("plain sockets", "tcp"),
    ("plain Gloo", "collective"),
    ("NIXL by hand", "nixl"),
    ("NIXL by hand", "shm"),
    ("NIXL by hand", "tcp"),
    ("Mooncake by hand", "shm"),
    ("Mooncake by hand", "tcp"),
)
"""What is measured side by side, in a process of its own: some of them keep the cores busy while they wait."""


def spec() -> StateSpec:
    kv = tuple(TensorSpec(name, (2, 128), DType.BFLOAT16, 0, (Segment("heads", 2),)) for name in ("k", "v"))
    conv = TensorSpec("conv", (6144, 3), DType.BFLOAT16, 0, (Segment("channels", 6144),))
    recurrent = TensorSpec("recurrent", (16, 128, 128), DType.FLOAT32, 0, (Segment("heads", 16),))
    return StateSpec(
        (PagedGroup("attention", tuple(range(24)), kv),),
        (SlotGroup("delta", tuple(range(24, 42)), (conv, recurrent)),),
    )


@dataclass(frozen=True)
class Item:
    """One hand-off: which pages and slots, in pools a quarter larger than it needs."""

    tokens: int

    @property
    def layout(self) -> PoolLayout:
        return PoolLayout.of(spec(), page_size=PAGE, num_pages=self.tokens // PAGE * 5 // 4, num_slots=2)

    def pages(self, side: int) -> list[int]:
        random = np.random.default_rng(SEED + side)
        return [int(page) for page in random.permutation(self.layout.num_pages)[: self.tokens // PAGE]]

    def ranges(self) -> list[Range]:
        reshard = Reshard.between(spec(), self.layout, self.layout)
        return [*plan_tokens(reshard, self.pages(0), self.pages(1), 0, self.tokens), *plan_slots(reshard, [1], [0])]

    @property
    def nbytes(self) -> int:
        return sum(item.total for item in self.ranges())


# The other process: a landing, or a baseline's receiver, on a block of shared memory that this process looks at.


def serve(kind: str, tokens: int, reach: str) -> None:
    """Print how to connect; then wait for the end of standard input."""
    segment = SharedSegment.attach(SegmentReach.from_json(reach))
    item = Item(tokens)
    block = torch.frombuffer(segment.memory, dtype=torch.uint8)[: item.layout.nbytes]
    if kind in MEDIA:
        landing = open_landing(kind, PoolMemory(block, segment), zmq.Context(), "tcp://127.0.0.1:*")
        landing.open(ATTEMPT, LeasedMemory(item.layout, item.pages(1), [0]))
        say(landing.reach)
        for line in sys.stdin:
            if line.strip() == "open":  # a new hand-off to the same memory
                landing.close_attempt(ATTEMPT)
                landing.open(ATTEMPT, LeasedMemory(item.layout, item.pages(1), [0]))
                say("open")
        os._exit(0)
    {"sockets": serve_sockets, "gloo": serve_gloo, "nixl by hand": serve_nixl, "mooncake": serve_mooncake}[kind](
        block.numpy(), item
    )
    os._exit(0)


def say(text: object) -> None:
    print(f"{SAID}{text}", flush=True)


def serve_sockets(block: np.ndarray, item: Item) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    say(server.getsockname()[1])
    connection, _ = server.accept()
    pieces = [memoryview(block)[piece.target : piece.target + piece.nbytes] for piece in item.ranges()]
    while connection.recv(1, socket.MSG_PEEK):
        for piece in pieces:
            done = 0
            while done < len(piece):
                done += connection.recv_into(piece[done:])
        connection.sendall(b"k")


def gloo_group(rank: int, port: int) -> Any:
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=60)
    return gloo(store, rank, 2, options)


def serve_gloo(block: np.ndarray, item: Item) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    say(port)
    group = gloo_group(0, port)
    buffer, token = torch.from_numpy(block[: item.nbytes]), torch.zeros(1, dtype=torch.uint8)
    while True:
        group.recv([buffer], 1, 0).wait()
        group.send([token], 1, 1).wait()


def serve_nixl(block: np.ndarray, item: Item) -> None:
    from transfer.nixl import NixlLanding

    landing = NixlLanding(block)
    say(landing.reach)
    sys.stdin.read()


def serve_mooncake(block: np.ndarray, item: Item) -> None:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    engine.register_memory(block.ctypes.data, block.nbytes)
    say(json.dumps([engine.get_rpc_port(), block.ctypes.data]))
    sys.stdin.read()


class Other:
    """The other process, and the memory that it receives into."""

    def __init__(self, kind: str, item: Item) -> None:
        self.segment = SharedSegment.create("bench", item.layout.nbytes)
        self.block = np.frombuffer(self.segment.memory, dtype=np.uint8)[: item.layout.nbytes]
        self.block[:] = 0  # its pages are there before anything is measured, as a worker's are
        command = [sys.executable, __file__, "--serve", kind, str(item.tokens), self.segment.reach.to_json()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.reach = self.ask("")

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if line:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        for said in self.process.stdout:  # libraries speak here too
            if said.startswith(SAID):
                return said.removeprefix(SAID).strip()
        raise RuntimeError("the other process has ended")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.segment.close()


@dataclass
class Contender:
    """One way to move the item. `move` returns when all bytes are there; `check` looks at them."""

    name: str
    move: Callable[[], None]
    target: np.ndarray
    contiguous: bool = False
    before: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


def media_contender(medium: str, item: Item, source: np.ndarray) -> Contender:
    other = Other(medium, item)
    reshard = Reshard.between(spec(), item.layout, item.layout)
    channel = open_channel(medium, other.reach, zmq.Context(), torch.from_numpy(source), reshard)
    here, there, tokens = item.pages(0), item.pages(1), item.tokens

    def move() -> None:
        # As prefill does it, planning included.
        channel.write(ATTEMPT, [*plan_tokens(reshard, here, there, 0, tokens), *plan_slots(reshard, [1], [0])])
        channel.wait(ATTEMPT)
        channel.abandon(ATTEMPT)

    return Contender(medium, move, other.block, before=lambda: other.ask("open"), close=other.close)


def copies(item: Item, source: np.ndarray) -> list[Contender]:
    ranges = item.ranges()
    scattered, stretch = np.zeros(item.layout.nbytes, np.uint8), np.zeros(item.nbytes, np.uint8)

    def contiguous() -> None:
        stretch[:] = source[: item.nbytes]

    return [
        Contender("memcpy scattered", lambda: copy(source, scattered, ranges), scattered),
        Contender("memcpy in one stretch", contiguous, stretch, contiguous=True),
    ]


def sockets(item: Item, source: np.ndarray) -> Contender:
    other = Other("sockets", item)
    connection = socket.create_connection(("127.0.0.1", int(other.reach)))
    pieces = [memoryview(source)[piece.source : piece.source + piece.nbytes] for piece in item.ranges()]

    def move() -> None:
        for piece in pieces:
            connection.sendall(piece)
        assert connection.recv(1)

    return Contender("plain sockets", move, other.block, close=other.close)


def gloo(item: Item, source: np.ndarray) -> Contender:
    other = Other("gloo", item)
    group = gloo_group(1, int(other.reach))
    buffer, token = torch.from_numpy(source[: item.nbytes]), torch.zeros(1, dtype=torch.uint8)

    def move() -> None:
        group.send([buffer], 0, 0).wait()
        group.recv([token], 0, 1).wait()

    return Contender("plain Gloo", move, other.block, contiguous=True, close=other.close)


def nixl_by_hand(item: Item, source: np.ndarray) -> Contender:
    import base64

    from nixl._api import nixl_agent, nixl_agent_config

    other = Other("nixl by hand", item)
    reach = json.loads(other.reach)
    agent = nixl_agent("bench", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(source.ctypes.data, source.nbytes, 0, "")], "DRAM")
    peer = agent.add_remote_agent(base64.b64decode(reach["metadata"]))
    ranges = item.ranges()
    ours = agent.prep_xfer_dlist("", [(source.ctypes.data + r.source, r.nbytes, 0) for r in ranges], "DRAM")
    theirs = agent.prep_xfer_dlist(peer, [(reach["address"] + r.target, r.nbytes, 0) for r in ranges], "DRAM")
    indexes = list(range(len(ranges)))

    def move() -> None:
        handle = agent.make_prepped_xfer("WRITE", ours, indexes, theirs, indexes)
        state = agent.transfer(handle)
        while state != "DONE":
            state = agent.check_xfer_state(handle)
            assert state != "ERR"
        agent.release_xfer_handle(handle)

    return Contender("NIXL by hand", move, other.block, close=other.close)


def mooncake(item: Item, source: np.ndarray) -> Contender:
    from mooncake.engine import TransferEngine

    other = Other("mooncake", item)
    port, address = json.loads(other.reach)
    engine = TransferEngine()
    engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    engine.register_memory(source.ctypes.data, source.nbytes)
    ranges = item.ranges()
    ours, theirs = [source.ctypes.data + r.source for r in ranges], [address + r.target for r in ranges]
    lengths = [r.nbytes for r in ranges]

    def move() -> None:
        assert engine.batch_transfer_sync_write(f"127.0.0.1:{port}", ours, theirs, lengths) == 0

    return Contender("Mooncake by hand", move, other.block, close=other.close)


def make(name: str, item: Item, source: np.ndarray) -> Contender:
    """A contender by name. Raises ImportError where it is not installed."""
    by_hand = {
        "plain sockets": sockets,
        "plain Gloo": gloo,
        "NIXL by hand": nixl_by_hand,
        "Mooncake by hand": mooncake,
    }
    scattered, stretch = copies(item, source)
    if name in by_hand:
        return by_hand[name](item, source)
    if name in MEDIA:
        if reason := unusable(name):
            raise ImportError(reason)
        return media_contender(name, item, source)
    return scattered if name == scattered.name else stretch


def measure(names: Sequence[str], tokens: int, repeats: int) -> dict[str, float]:
    """Median seconds of each, which take turns."""
    item = Item(tokens)
    source = np.random.default_rng(1).integers(0, 256, item.layout.nbytes, dtype=np.uint8)
    expected = np.zeros_like(source)
    copy(source, expected, item.ranges())
    found = []
    for name in names:
        try:
            found.append(make(name, item, source))
        except ImportError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
    seconds: dict[str, list[float]] = {contender.name: [] for contender in found}
    for number in range(repeats + 1):
        for contender in found:
            contender.before()
            started = time.perf_counter()
            contender.move()
            took = time.perf_counter() - started
            if number:
                seconds[contender.name].append(took)
    for contender in found:
        good = source[: item.nbytes] if contender.contiguous else expected
        assert (contender.target[: len(good)] == good).all(), f"{contender.name} moved wrong bytes"
        contender.close()
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 32768])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--group", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=3, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        serve(options.serve[0], int(options.serve[1]), options.serve[2])
    elif options.group:
        say(json.dumps(measure(options.group.split(","), options.tokens[0], options.repeats)))
        os._exit(0)  # libraries' threads have nothing more to say
    else:
        report(options.tokens, options.repeats, options.json)


def report(sizes: Sequence[int], repeats: int, file: Path | None) -> None:
    results = []
    for tokens in sizes:
        item = Item(tokens)
        title = f"{tokens} tokens, {item.nbytes / 2**20:.0f} MiB"
        table = Table("way", "ms", "GB/s", "beside", "times as fast", title=title, title_justify="left")
        for group in GROUPS:
            command = [sys.executable, __file__, "--group", ",".join(group), "--tokens", str(tokens)]
            ran = subprocess.run([*command, "--repeats", str(repeats)], stdout=subprocess.PIPE, text=True, check=True)
            (said,) = (line for line in ran.stdout.splitlines() if line.startswith(SAID))
            medians: dict[str, float] = json.loads(said.removeprefix(SAID))
            baseline = group[0]
            if baseline not in medians:  # it is not installed
                continue
            for name, took in medians.items():
                ratio = medians[baseline] / took
                beside = "" if name == baseline else baseline
                table.add_row(name, f"{took * 1e3:.2f}", f"{item.nbytes / took / 1e9:.2f}", beside, f"{ratio:.2f}")
                results.append(
                    {"tokens": tokens, "way": name, "bytes": item.nbytes, "seconds": took,
                     "beside": baseline, "ratio": ratio}
                )  # fmt: skip
        Console().print(table)
    if file:
        file.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
