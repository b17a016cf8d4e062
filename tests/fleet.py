"""Workers without processes: real engines, pools, sockets and transfers, turned by hand in one thread.

A test can so run hundreds of fleets in the time that one takes to start as processes, and decide in which order
things happen. The gateway's part is played by `Fleet` itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import zmq

from colocated.config import ColocatedConfig
from colocated.worker import ColocatedWorker
from decode.config import DecodeConfig
from decode.worker import DecodeWorker
from models.serving import Served, ServingConfig, load
from pools.sizing import Phase
from pools.spec import DType
from pools.storage import Storage
from prefill.config import PrefillConfig
from prefill.worker import PrefillWorker
from ranks.followers import Followers
from ranks.team import Team
from transfer.media import PoolMemory, media_of, open_landing
from transfer.medium import Landing
from transfer.segment import Segment
from wire.links import ListenLink
from wire.messages import (
    AttemptId,
    Cancel,
    DecodeTask,
    Failed,
    HandedOver,
    Hello,
    Incarnation,
    Load,
    Message,
    PrefillTask,
    Role,
    Sampling,
    Token,
    Tokens,
    Welcome,
)

PATIENCE_S = 60.0
MARGIN = 1e-3
"""Between the two best candidates: below it, rounding may choose."""


def greedy(max_tokens: int, **changes: object) -> Sampling:
    """Greedy sampling with the two best candidates' log-probabilities, from which the margin is known."""
    values: dict[str, object] = {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "max_tokens": max_tokens,
        "stop_token_ids": (), "logprobs": 2,
    }  # fmt: skip
    return Sampling(**{**values, **changes})  # type: ignore[arg-type]


def config_of(folder: Path, **changes: object) -> ServingConfig:
    """A small worker's configuration, with freed memory poisoned."""
    values: dict[str, object] = {
        "model_path": folder, "served_model_name": "tiny", "dtype": DType.FLOAT32, "page_size": 8,
        "max_running_requests": 8, "pre_alloc_size": 2, "mamba_size": None, "max_context_tokens": 160,
        "memory_bytes": 1 << 30, "reserve_bytes": 0, "threads": 1, "poison": True,
    }  # fmt: skip
    return ServingConfig(**{**values, **changes})  # type: ignore[arg-type]


class Decoders:
    """Loads each checkpoint once; every worker gets the same weights and pools of its own."""

    def __init__(self) -> None:
        self._loaded: dict[Path, Served] = {}

    def served(self, config: ServingConfig, phase: Phase, shared: bool) -> tuple[Served, Segment | None]:
        """A model on fresh pools, in shared memory if asked."""
        from models.serving import plan_worker

        if config.model_path not in self._loaded:
            self._loaded[config.model_path] = load(config, phase)
        like = self._loaded[config.model_path]
        plan = plan_worker(config, phase)
        segment = Segment.create("test", plan.block_bytes) if shared else None
        block = torch.frombuffer(segment.memory, dtype=torch.uint8)[: plan.block_bytes] if segment else None
        storage = Storage.from_plan(plan, block=block, poison=config.poison)
        return replace(like, plan=plan, storage=storage), segment


def landings_of(
    context: zmq.Context[zmq.Socket[bytes]], served: Served, segment: Segment | None, transfer: str
) -> dict[str, Landing]:
    """A decode rank's transfer back ends; its pools lie in `segment`, if it is to offer shm."""
    memory = PoolMemory(served.storage.block, segment)
    media = [medium for medium in media_of(transfer) if medium != "shm" or segment]
    return {medium: open_landing(medium, memory, context, "tcp://127.0.0.1:*") for medium in media}


@dataclass
class Answer:
    """What has come for one request. `tokens` by index, whatever the order of arrival."""

    tokens: dict[int, Token] = field(default_factory=dict)
    failed: Failed | None = None
    senders: list[str] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether the last token and all before it are here, or the request has failed."""
        if self.failed is not None:
            return True
        last = [index for index, token in self.tokens.items() if token.finish is not None]
        return bool(last) and len(self.tokens) == last[0] + 1

    @property
    def token_ids(self) -> list[int]:
        """The answer."""
        return [self.tokens[index].token_id for index in sorted(self.tokens)]


Worker = PrefillWorker | DecodeWorker | ColocatedWorker


class Fleet:
    """A gateway's worth of bookkeeping and any number of workers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> None:
        self.context = context
        self._directory = directory
        self._gateway = ListenLink(context, f"ipc://{directory}/gateway")
        self.incarnation = Incarnation("gateway-1")
        self.workers: list[Worker] = []
        self.hellos: dict[str, tuple[bytes, Hello]] = {}
        self.loads: dict[str, Load] = {}
        self.reports: dict[str, HandedOver] = {}
        self.detours: dict[str, str] = {}
        """By a decode worker's endpoint: where prefill is told to dial instead."""
        self.answers: dict[str, Answer] = {}
        self.max_running_seen = 0

    def add_prefill(
        self,
        served: Served,
        *,
        chunk_size: int,
        transfer: str,
        ask_ahead: int = 8,
        followers: Followers | None = None,
        verify: bool = False,
    ) -> PrefillWorker:
        """Start a prefill worker."""
        name = f"prefill-{len(self.workers)}"
        config = PrefillConfig(name, self._gateway.endpoint, chunk_size, ask_ahead, transfer, verify)
        worker = PrefillWorker(config, Team(served, followers), Incarnation(f"{name}-1"))
        self.workers.append(worker)
        return worker

    def add_decode(
        self,
        served: Served,
        segment: Segment | None,
        *,
        transfer: str,
        followers: Followers | None = None,
        reuse: bool = True,
    ) -> DecodeWorker:
        """Start a decode worker; its pools lie in `segment`, if it is to offer shm."""
        name = f"decode-{len(self.workers)}"
        landings = landings_of(self.context, served, segment, transfer)
        config = DecodeConfig(name, self._gateway.endpoint, f"ipc://{self._directory}/{name}", reuse)
        team = Team(served, followers)
        worker = DecodeWorker(config, team, Incarnation(f"{name}-1"), self.context, landings)
        self.workers.append(worker)
        return worker

    def add_colocated(
        self, served: Served, *, chunk_size: int, followers: Followers | None = None
    ) -> ColocatedWorker:
        """Start a colocated worker."""
        name = f"colocated-{len(self.workers)}"
        config = ColocatedConfig(name, self._gateway.endpoint, chunk_size)
        worker = ColocatedWorker(config, Team(served, followers), Incarnation(f"{name}-1"))
        self.workers.append(worker)
        return worker

    def of(self, role: Role) -> list[Hello]:
        """The workers of a role that have announced themselves."""
        return [hello for _, hello in self.hellos.values() if hello.role is role]

    def wait_for_all(self) -> None:
        """Turn until every worker has said hello."""
        self.turn_until(lambda: len(self.hellos) == len(self.workers))

    def send(self, worker: str, message: Message) -> None:
        """To a worker, as the gateway."""
        assert self._gateway.send(self.hellos[worker][0], message)

    def submit(
        self, name: str, prompt: Sequence[int], sampling: Sampling, *, pair: int = 0, deadline_s: float = 60.0
    ) -> None:
        """Send a request to the `pair`-th prefill worker (or colocated one) and decode worker, round robin."""
        attempt = AttemptId(f"{name}/0")
        self.answers[name] = Answer()
        if colocated := self.of(Role.COLOCATED):
            task = PrefillTask(attempt, tuple(prompt), 0, sampling, deadline_s, "", Incarnation(""), "")
            self.send(colocated[0].worker, task)
            return
        prefills, decodes = self.of(Role.PREFILL), self.of(Role.DECODE)
        prefill, decode = prefills[pair % len(prefills)], decodes[pair // len(prefills) % len(decodes)]
        self.send(
            prefill.worker,
            PrefillTask(
                attempt,
                tuple(prompt),
                0,
                sampling,
                deadline_s,
                decode.worker,
                decode.incarnation,
                self.detours.get(decode.peer_endpoint, decode.peer_endpoint),
            ),
        )
        self.send(
            decode.worker,
            DecodeTask(attempt, tuple(prompt), 0, sampling, deadline_s, prefill.worker, prefill.incarnation),
        )

    def cancel(self, name: str) -> None:
        """Tell all workers that nobody waits for the request."""
        for worker in self.hellos:
            self.send(worker, Cancel(AttemptId(f"{name}/0")))

    def turn(self) -> None:
        """One turn of every worker and of the gateway."""
        for worker in self.workers:
            worker.turn(time.monotonic())
        for peer, message in self._gateway.receive():
            self._on_message(peer, message)

    def _on_message(self, peer: bytes, message: Message) -> None:
        match message:
            case Hello():
                self.hellos[message.worker] = (peer, message)
                self._gateway.send(peer, Welcome(self.incarnation, 0.0))
            case Load():
                self.loads[message.worker] = message
                if message.worker.startswith("decode"):
                    self.max_running_seen = max(self.max_running_seen, message.running)
                self._gateway.send(peer, Welcome(self.incarnation, 0.0))
            case Tokens():
                for token in message.tokens:
                    answer = self.answers[token.attempt.rsplit("/", 1)[0]]
                    assert token.index not in answer.tokens, f"{token} came twice"
                    answer.tokens[token.index] = token
                    answer.senders.append(message.worker)
            case HandedOver():
                self.reports[message.attempt.rsplit("/", 1)[0]] = message
            case Failed():
                self.answers[message.attempt.rsplit("/", 1)[0]].failed = message

    def turn_until(self, condition: Callable[[], bool], alone: Worker | None = None) -> None:
        """Turn until `condition()` holds; fails after a minute. `alone`: the only worker that takes turns."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if alone is None:
                self.turn()
            else:
                alone.turn(time.monotonic())
            assert time.monotonic() < deadline, f"still waiting; loads {self.loads}"

    def finish(self, *names: str) -> None:
        """Turn until these requests (default: all) are answered."""
        wanted = names or tuple(self.answers)
        self.turn_until(lambda: all(self.answers[name].done for name in wanted))

    def settle(self) -> None:
        """Turn until every worker reports that it holds nothing, and check that its books agree."""
        self.turn_until(lambda: all(self._idle(worker) for worker in self.workers))
        for worker in self.workers:
            worker.pools.audit()

    @staticmethod
    def _idle(worker: Worker) -> bool:
        stats = worker.pools.stats()
        return all(usage.held == usage.fenced == 0 for usage in (stats.rows, stats.slots)) and (
            (stats.pages.held, stats.pages.fenced) == (stats.kept, 0)
        )

    def close(self) -> None:
        """Close every socket and thread."""
        for worker in self.workers:
            worker.close()
        self._gateway.close()


def assert_equal(answers: Mapping[str, Answer], reference: Mapping[str, Answer]) -> None:
    """Equal tokens up to the first close call; and enough of them were compared for that to mean something."""
    compared = 0
    for name, answer in answers.items():
        assert answer.failed is None, f"{name}: {answer.failed}"
        for index, token in sorted(reference[name].tokens.items()):
            if token.top[0][1] - token.top[1][1] < MARGIN:
                break
            assert answer.tokens[index].token_id == token.token_id, f"{name}, token {index}"
            compared += 1
    wanted = sum(len(reference[name].tokens) for name in answers)
    assert compared > 0.9 * wanted, f"only {compared} of {wanted} tokens have a margin over {MARGIN}"


@contextmanager
def fleet(directory: Path) -> Iterator[Fleet]:
    """An empty fleet whose sockets lie in `directory`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Fleet(context, directory)
    try:
        yield made
    finally:
        made.close()
        context.destroy(linger=0)
