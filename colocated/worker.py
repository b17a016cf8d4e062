"""One worker that does both phases on one set of pools: no hand-off, no transfer.

It is the reference: a disaggregated run must give the same tokens. It computes with the same two engines and decides
with the same pure functions, so that only what lies between the phases differs.

    QUEUED ──lease──▶ PREFILL ──last chunk──▶ DECODE ──finish──▶ ended
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from colocated.config import ColocatedConfig
from decode.engine import DecodeEngine
from decode.engine import Work as DecodeWork
from models.sampling import NOT_FINITE, Sampled
from pools.errors import RequestTooLong
from pools.lease import Lease, Shortage
from pools.pools import Pools
from prefill.engine import PrefillEngine
from prefill.engine import Work as PrefillWork
from prefill.scheduler import plan_step
from ranks.errors import RankLostError
from ranks.reports import hello_of, load_of
from ranks.team import Team
from wire.gateway_link import GatewayLink
from wire.loop import Loop
from wire.messages import (
    AttemptId,
    Cancel,
    Failed,
    Fault,
    Hello,
    Incarnation,
    Load,
    PrefillTask,
    Role,
    Token,
)

_SWEEP_EVERY_S = 0.25

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Request:
    """`computed` counts prompt tokens, `generated` the answer's in this attempt."""

    task: PrefillTask
    deadline: float
    lease: Lease | None = None
    computed: int = 0
    last_token: int = -1
    generated: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.task.token_ids)

    @property
    def needed_tokens(self) -> int:
        return self.prompt_tokens + self.task.sampling.max_tokens - self.task.generated - 1

    @property
    def held(self) -> Lease:
        if self.lease is None:
            raise RuntimeError(f"{self.task.attempt} has no lease")
        return self.lease


class ColocatedWorker:
    """Computes prompts and generates, a chunk and a decode step in turn."""

    def __init__(self, config: ColocatedConfig, team: Team, incarnation: Incarnation) -> None:
        self._config = config
        self._team = team
        self._served = served = team.served
        self._incarnation = incarnation
        self.pools = Pools.from_plan(served.plan)
        self._prefill = PrefillEngine(team)
        self._decode = DecodeEngine(team)
        self.requests: dict[AttemptId, _Request] = {}
        """Every request that has not ended, in order of arrival."""
        self._next_sweep = 0.0
        self._loop = Loop()
        self._gateway = GatewayLink(zmq.Context(), config.gateway, self._hello(), self._load, self._drop_all)
        self._loop.watch(self._gateway.socket)
        if team.followers:
            self._loop.watch(team.followers.socket)

    def _hello(self) -> Hello:
        return hello_of(self._served, self._config.name, self._incarnation, Role.COLOCATED)

    def run(self, on_welcome: Callable[[], None]) -> None:
        """Serve until told to stop; `on_welcome` is called whenever a gateway has taken this worker in."""
        self._gateway.on_welcome = on_welcome
        self._loop.run(self.turn)
        for request in list(self.requests.values()):  # to be served by others
            self._fail(request, f"{self._config.name} is leaving", Fault.LEAVING)
        self.close()

    def close(self) -> None:
        """Close the links."""
        self._gateway.close()
        self._team.close()

    def turn(self, now: float) -> float:
        """Everything that is due at `now`: messages, deadlines, admission, a chunk and a decode step.

        Returns the seconds until the next turn is due if nothing comes in; 0 when there is more to do at once.
        """
        for message in self._gateway.receive(now):
            match message:
                case PrefillTask():
                    self.on_prefill_task(message, now)
                case Cancel():
                    self.on_cancel(message)
                case _:
                    log.warning("the gateway sent a %s, of no use here", type(message).__name__)
        self._team.outcomes()
        if now >= self._next_sweep:
            self._sweep(now)
        self._admit()
        next_beat_s = self._gateway.beat(now)
        prefilled, decoded = self._step_prefill(), self._step_decode()
        return 0.0 if prefilled or decoded else min(next_beat_s, _SWEEP_EVERY_S)

    def on_prefill_task(self, task: PrefillTask, now: float) -> None:
        """A new request: to the end of the queue, unless it can never be served here."""
        if task.attempt in self.requests:
            log.warning("attempt %s came twice; the second is ignored", task.attempt)
            return
        request = _Request(task, now + task.deadline_s)
        problem = self._served.unfit(task.token_ids)
        if problem is None:
            try:
                self.pools.pages_for(request.needed_tokens)
            except RequestTooLong as error:
                problem = f"{self._config.name} cannot hold it: {error}"
        if problem is None:
            self.requests[task.attempt] = request
        else:
            self._gateway.send(Failed(task.attempt, Fault.REQUEST, problem))

    def on_cancel(self, cancel: Cancel) -> None:
        """Nobody waits for the request any more."""
        self._end(cancel.attempt)

    def _admit(self) -> None:
        """Give memory for prompt and answer to the waiting, in order, as long as there is some."""
        for request in self.requests.values():
            if request.lease is None:
                lease = self.pools.reserve(request.task.attempt, request.needed_tokens)
                if isinstance(lease, Shortage):
                    return
                request.lease = lease
                self._prefill.begin(lease)

    def _step_prefill(self) -> bool:
        """The next chunk of the prompts that are not yet computed."""
        waiting = [item for item in self.requests.values() if item.lease and item.computed < item.prompt_tokens]
        shares = plan_step([item.prompt_tokens - item.computed for item in waiting], self._config.chunk_size)
        batch = [(item, count) for item, count in zip(waiting, shares, strict=True) if count]
        if not batch:
            return False
        work = [
            PrefillWork(
                self.pools.check(item.held).row, item.task.token_ids, item.computed, count, item.task.sampling
            )
            for item, count in batch
        ]
        try:
            ended = self._prefill.step(work)
        except RankLostError:
            raise
        except Exception as error:  # one bad request must not take the worker down
            self._fail_all([item for item, _ in batch], "prefill", error)
            return True
        for item, count in batch:
            item.computed += count
        self._take([(batch[index][0], sampled) for index, sampled in ended.items()])
        return True

    def _step_decode(self) -> bool:
        """One token for each request whose prompt is computed."""
        batch = [item for item in self.requests.values() if item.generated]
        if not batch:
            return False
        work = [
            DecodeWork(
                self.pools.check(item.held).row,
                item.last_token,
                item.prompt_tokens + item.generated - 1,
                item.task.sampling,
            )
            for item in batch
        ]
        try:
            sampled = self._decode.step(work)
        except RankLostError:
            raise
        except Exception as error:  # one bad request must not take the worker down
            self._fail_all(batch, "decode", error)
            return True
        self._take(list(zip(batch, sampled, strict=True)))
        return True

    def _take(self, results: list[tuple[_Request, Sampled | None]]) -> None:
        """Report new tokens, and end the requests they finish."""
        tokens: list[Token] = []
        for item, sampled in results:
            attempt, index = item.task.attempt, item.task.generated + item.generated
            if sampled is None:
                self._fail(item, NOT_FINITE)
                continue
            finish = item.task.sampling.finish(sampled.token_id, index)
            tokens.append(Token(attempt, index, sampled.token_id, sampled.logprob, sampled.top, finish))
            item.last_token, item.generated = sampled.token_id, item.generated + 1
            if finish is not None:
                self._end(attempt)
        self._gateway.send_tokens(tokens)

    def _fail_all(self, batch: list[_Request], phase: str, error: Exception) -> None:
        log.exception("a %s step failed", phase)
        for item in batch:
            self._fail(item, f"{phase} failed: {error}")

    def _fail(self, item: _Request, text: str, fault: Fault = Fault.OURS) -> None:
        self._end(item.task.attempt)
        self._gateway.send(Failed(item.task.attempt, fault, text))

    def _end(self, attempt: AttemptId) -> None:
        request = self.requests.pop(attempt, None)
        if request is not None and request.lease is not None:
            self._team.wipe(self.pools.release(request.lease))

    def _drop_all(self) -> None:
        """The gateway that sent these requests is gone."""
        for attempt in list(self.requests):
            self._end(attempt)

    def _sweep(self, now: float) -> None:
        self._next_sweep = now + _SWEEP_EVERY_S
        for attempt, request in list(self.requests.items()):
            if now > request.deadline:
                self._end(attempt)
                self._gateway.send(
                    Failed(attempt, Fault.NO_ROOM, "the deadline passed before the answer was complete")
                )

    def _load(self) -> Load:
        running = sum(item.lease is not None for item in self.requests.values())
        return load_of(
            self._config.name, self._incarnation, self.pools, waiting=len(self.requests) - running, running=running
        )
