"""The prefill worker process: tasks in, first tokens and hand-offs out.

A request's way: `on_prefill_task` → `_ask_ahead` → `on_reserved` → `_start_matched` → `_step` → `_on_sent` →
`on_taken`. Whatever ends early goes through `_end`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from models.sampling import NOT_FINITE, Sampled
from pools.errors import RequestTooLong
from pools.lease import Shortage
from pools.pools import Pools
from prefill.config import PrefillConfig
from prefill.engine import PrefillEngine, Work
from prefill.handover import send_computed
from prefill.peers import Peer, Peers, PeerState, greeting
from prefill.request import PrefillRequest, PrefillState
from prefill.scheduler import plan_step
from ranks.errors import RankLostError
from ranks.reports import hello_of, load_of
from ranks.team import Team
from transfer.handoff import HandoffState
from transfer.sender import Drained, Outcomes, SendFailed, Sent
from wire.codec import AnyMessage
from wire.gateway_link import GatewayLink
from wire.life import oldest_age
from wire.loop import Loop
from wire.messages import (
    Abort,
    Ask,
    AttemptId,
    Cancel,
    Failed,
    Fault,
    Hello,
    Incarnation,
    Landed,
    Load,
    PeerRefused,
    PeerWelcome,
    PrefillTask,
    Quiet,
    Reserved,
    Role,
    Taken,
    Token,
)

_SWEEP_EVERY_S = 0.25

log = logging.getLogger(__name__)


class PrefillWorker:
    """Computes prompts on its own pools and writes their state into decode workers' pools."""

    def __init__(self, config: PrefillConfig, team: Team, incarnation: Incarnation) -> None:
        self._config = config
        self._team = team
        self._served = served = team.served
        self.storage = served.storage
        self._incarnation = incarnation
        self._layout = served.storage.layout
        self.pools = Pools.from_plan(served.plan)
        self.engine = PrefillEngine(team)
        self._outcomes = Outcomes()
        self._gathering = team.gathering(self._outcomes.put)
        self.requests: dict[AttemptId, PrefillRequest] = {}
        """Every request that has not ended, in order of arrival."""
        self._draining: dict[AttemptId, PrefillRequest] = {}
        """Ended requests whose sender may still be reading their memory."""
        self._handoffs = 0
        self._handoff_bytes = 0
        self._next_sweep = 0.0
        self._loop = Loop()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers = Peers(
            context, greeting(config, incarnation, team), team, self._gathering, config.verify_transfers
        )
        self._gateway = GatewayLink(context, config.gateway, self._hello(), self._load, self._drop_all)
        self._loop.watch(self._gateway.socket)
        self._loop.watch(self._outcomes)
        if team.followers:
            self._loop.watch(team.followers.socket)

    def _hello(self) -> Hello:
        return hello_of(self._served, self._config.name, self._incarnation, Role.PREFILL)

    def run(self, on_welcome: Callable[[], None]) -> None:
        """Serve until told to stop; `on_welcome` is called whenever a gateway has taken this worker in."""
        self._gateway.on_welcome = on_welcome
        self._loop.run(self.turn)
        self._give_back()
        self.close()

    def close(self) -> None:
        """Close every link."""
        self._gateway.close()
        self._peers.close()
        self._team.close()

    def turn(self, now: float) -> float:
        """Everything that is due at `now`: messages, outcomes, deadlines, one step.

        Returns the seconds until the next turn is due if nothing comes in; 0 when there is more to do at once.
        """
        for message in self._gateway.receive(now):
            self._on_gateway_message(message, now)
        for peer, message in self._peers.receive():
            self._on_peer_message(peer, message, now)
        for event in self._team.outcomes():
            self._gathering.put(event)
        for event in self._outcomes.take():
            self._on_outcome(event, now)
        if now >= self._next_sweep:
            self._sweep(now)
        self._ask_ahead(now)
        self._start_matched(now)
        next_beat_s = self._gateway.beat(now)
        return 0.0 if self._step() else min(next_beat_s, _SWEEP_EVERY_S)

    # Messages.

    def _on_gateway_message(self, message: AnyMessage, now: float) -> None:
        match message:
            case PrefillTask():
                self.on_prefill_task(message, now)
            case Cancel():
                self.on_cancel(message, now)
            case _:
                log.warning("the gateway sent a %s, which prefill has no use for", type(message).__name__)

    def _on_peer_message(self, peer: Peer, message: AnyMessage, now: float) -> None:
        match message:
            case PeerWelcome():
                self._peers.on_peer_welcome(peer, message)
                log.info("hand-offs to %s go by %s", message.worker, message.medium)
            case PeerRefused():
                self._peers.on_peer_refused(peer, message)
                log.error("%s", peer.refusal)
            case Reserved():
                self.on_reserved(peer, message, now)
            case Taken():
                self.on_taken(message, now)
            case Abort():
                self.on_abort(peer, message, now)
            case _:
                log.warning("%s sent a %s, which prefill has no use for", peer.worker, type(message).__name__)

    def on_prefill_task(self, task: PrefillTask, now: float) -> None:
        """A new request: to the end of the queue, unless it can never be computed here."""
        if task.attempt in self.requests or task.attempt in self._draining:
            log.warning("attempt %s came twice; the second is ignored", task.attempt)
        elif problem := self._unfit(task):
            self._gateway.send(Failed(task.attempt, Fault.REQUEST, problem))
        else:
            peer = self._peers.get(task, self._loop.watch, now)
            self.requests[task.attempt] = PrefillRequest.start(task, peer, now)

    def _unfit(self, task: PrefillTask) -> str | None:
        """Why this prompt can never be computed here, or None."""
        if problem := self._served.unfit(task.token_ids):
            return problem
        try:
            self.pools.pages_for(len(task.token_ids))
        except RequestTooLong as error:
            return f"the prompt is too long for {self._config.name}: {error}"
        return None

    def on_reserved(self, peer: Peer, reserved: Reserved, now: float) -> None:
        """Decode has memory for the request: it may be computed."""
        request = self.requests.get(reserved.attempt)
        if request is None:
            if reserved.attempt not in self._draining:
                peer.send(Quiet(reserved.attempt))
            return
        if request.peer is not peer or request.state is not PrefillState.QUEUED:
            return  # said twice
        target, _ = peer.route
        if not (
            all(0 <= page < target.num_pages for page in reserved.pages)
            and all(0 <= slot < target.num_slots for slot in reserved.slots)
            and len(reserved.pages) * target.page_size >= (request.prompt_tokens if target.page.nbytes else 0)
            and bool(reserved.slots) == bool(target.slot.nbytes)
            and 0 <= reserved.held_tokens <= request.prompt_tokens
        ):
            self._fail(request, Fault.OURS, f"{peer.worker} reserved memory that cannot hold the prompt", now)
            return
        request.pages, request.slots, request.sent = reserved.pages, reserved.slots, reserved.held_tokens
        request.unanswered = None
        request.life.move(PrefillState.MATCHED, now)
        request.handoff.move(HandoffState.RESERVED, now)

    def on_taken(self, taken: Taken, now: float) -> None:
        """Decode goes on with the request; it is done here."""
        request = self.requests.get(taken.attempt)
        if request is None or request.handoff.state is not HandoffState.LANDED:
            return
        del self.requests[taken.attempt]
        request.life.move(PrefillState.DONE, now)
        request.handoff.move(HandoffState.GONE, now)
        self._release(request)

    def on_abort(self, peer: Peer, abort: Abort, now: float) -> None:
        """Decode gives up the hand-off and waits for our `Quiet`."""
        if request := self.requests.get(abort.attempt):
            self._end(request, PrefillState.ABORTED, now)
        elif abort.attempt not in self._draining:
            peer.send(Quiet(abort.attempt))

    def on_cancel(self, cancel: Cancel, now: float) -> None:
        """Nobody waits for the request any more."""
        if request := self.requests.get(cancel.attempt):
            self._end(request, PrefillState.ABORTED, now)

    # The queue.

    def _ask_ahead(self, now: float) -> None:
        """Have the next few requests reserve on decode, and no more: a long queue must not fill memory there."""
        waiting = [request for request in self.requests.values() if request.lease is None]
        for request in waiting[: self._config.ask_ahead]:
            if not request.asked and request.peer.state is PeerState.OPEN:
                request.say(Ask(request.attempt, request.prompt_tokens), now)

    def _start_matched(self, now: float) -> None:
        """Give memory here to requests that have it on decode, in order, as long as there is some."""
        for request in self._in(PrefillState.MATCHED):
            lease = self.pools.reserve(request.attempt, request.prompt_tokens)
            if isinstance(lease, Shortage):
                return
            request.lease = lease
            request.life.move(PrefillState.RUNNING, now)
            self.engine.begin(lease)

    def _in(self, state: PrefillState) -> list[PrefillRequest]:
        return [request for request in self.requests.values() if request.state is state]

    # A step.

    def _step(self) -> bool:
        """Compute one chunk, if any prompt is running. True when there may be more to do at once."""
        running = self._in(PrefillState.RUNNING)
        shares = plan_step([request.remaining for request in running], self._config.chunk_size)
        batch = [(request, count) for request, count in zip(running, shares, strict=True) if count]
        if not batch:
            return False
        try:
            ended = self.engine.step([self._work(request, count) for request, count in batch])
        except RankLostError:
            raise
        except Exception as error:  # one bad request must not take the worker down
            log.exception("a prefill step failed")
            for request, _ in batch:
                self._fail(request, Fault.OURS, f"prefill failed: {error}", time.monotonic())
            return True
        now = time.monotonic()
        first_tokens: list[Token] = []
        for index, (request, count) in enumerate(batch):
            request.computed += count
            if index in ended:
                first_tokens += self._take_first_token(request, ended[index], now)
            if request.life.state in (PrefillState.RUNNING, PrefillState.SENDING):
                send_computed(request, self._layout, now)
        self._gateway.send_tokens(first_tokens)
        return True

    def _work(self, request: PrefillRequest, count: int) -> Work:
        row = self.pools.check(request.held).row
        return Work(row, request.task.token_ids, request.computed, count, request.task.sampling)

    def _take_first_token(self, request: PrefillRequest, sampled: Sampled | None, now: float) -> list[Token]:
        """The prompt is computed. When its first token is also the last, nothing is handed over."""
        if sampled is None:
            self._fail(request, Fault.OURS, NOT_FINITE, now)
            return []
        request.first_token, request.computed_at = sampled.token_id, now
        index = request.task.generated
        finish = request.task.sampling.finish(sampled.token_id, index)
        if finish is None:
            request.life.move(PrefillState.SENDING, now)
        else:
            self._end(request, PrefillState.ABORTED, now)
        return [Token(request.attempt, index, sampled.token_id, sampled.logprob, sampled.top, finish)]

    # Outcomes of the sender threads.

    def _on_outcome(self, event: Sent | SendFailed | Drained, now: float) -> None:
        match event:
            case Sent():
                self._on_sent(event, now)
            case SendFailed():
                if request := self.requests.get(event.attempt):
                    self._fail(request, Fault.OURS, f"the hand-off failed: {event.reason}", now)
            case Drained():
                request = self._draining.pop(event.attempt)
                request.handoff.move(HandoffState.GONE, now)
                self._say_quiet(request)

    def _on_sent(self, sent: Sent, now: float) -> None:
        """Every byte is there: say so."""
        request = self.requests.get(sent.attempt)
        if request is None:
            return
        request.handoff.move(HandoffState.LANDED, now)
        request.say(
            Landed(
                request.attempt,
                self._incarnation,
                request.prompt_tokens,
                request.first_token,
                sent.nbytes,
                wire_s=sent.seconds,
                unhidden_s=now - request.computed_at,
                digests=sent.digests,
            ).sealed(),
            now,
        )
        self._handoffs += 1
        self._handoff_bytes += sent.nbytes

    # Ends.

    def _fail(self, request: PrefillRequest, fault: Fault, text: str, now: float) -> None:
        self._end(request, PrefillState.FAILED, now)
        self._gateway.send(Failed(request.attempt, fault, text))

    def _end(self, request: PrefillRequest, state: PrefillState, now: float) -> None:
        """End a request early; its memory follows as soon as its sender cannot read it any more."""
        if self.requests.pop(request.attempt, None) is None:
            return
        request.life.move(state, now)
        if request.handoff.state is HandoffState.MOVING:
            request.handoff.move(HandoffState.ABORTING, now)
            self._draining[request.attempt] = request
            _, route = request.peer.route
            route.cancel(request.attempt)
        else:
            self._say_quiet(request)

    def _say_quiet(self, request: PrefillRequest) -> None:
        """Nothing of the request is or will be written: tell decode, and release the lease here."""
        if request.asked:
            request.peer.send(Quiet(request.attempt))
        self._release(request)

    def _release(self, request: PrefillRequest) -> None:
        if request.lease is not None:
            self._team.wipe(self.pools.release(request.lease))
            request.lease = None

    def _give_back(self) -> None:
        """This worker leaves: what it has is to be served by others."""
        for request in list(self.requests.values()):
            self._fail(request, Fault.LEAVING, f"{self._config.name} is leaving", time.monotonic())

    def _drop_all(self) -> None:
        """The gateway that sent these requests is gone."""
        for request in list(self.requests.values()):
            self._end(request, PrefillState.ABORTED, time.monotonic())

    def _sweep(self, now: float) -> None:
        """Deadlines, refused pairs, and links to decode workers that have started anew."""
        self._next_sweep = now + _SWEEP_EVERY_S
        for request in list(self.requests.values()):
            if request.peer.state is PeerState.REFUSED:
                self._fail(request, Fault.OURS, request.peer.refusal, now)
            elif now > request.deadline:
                text = f"the deadline passed while the request was {request.state.name.lower()} on prefill"
                self._fail(request, Fault.NO_ROOM, text, now)
            else:
                request.say_again(now)
        self._peers.greet_again(now)
        in_use = {request.peer for request in (*self.requests.values(), *self._draining.values())}
        self._peers.close_outdated(in_use, self._loop.unwatch)

    def _load(self) -> Load:
        running = len(self._in(PrefillState.RUNNING))
        return load_of(
            self._config.name,
            self._incarnation,
            self.pools,
            waiting=len(self.requests) - running,
            running=running,
            handoffs=self._handoffs,
            handoff_bytes=self._handoff_bytes,
            oldest_s=oldest_age([request.life for request in self.requests.values()], time.monotonic()),
        )
