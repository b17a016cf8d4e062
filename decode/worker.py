"""The decode worker process: hand-offs in, tokens out.

A request's way: `on_decode_task` → `on_ask` → `_admit` → `on_landed` → `_join` → `_step`. Whatever ends early goes
through `_end`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import zmq

from decode.admission import MAX_OVERTAKEN, join
from decode.config import DecodeConfig
from decode.early import EarlyAsks
from decode.engine import DecodeEngine, Work
from decode.handover import Handovers
from decode.peers import PrefillPeer, PrefillPeers
from decode.request import DecodeRequest, DecodeState
from models.sampling import NOT_FINITE
from pools.errors import RequestTooLong
from pools.lease import Lease
from pools.pools import Pools
from ranks.errors import RankLostError
from ranks.reports import hello_of, load_of
from ranks.team import Team
from transfer.handoff import HandoffState
from transfer.medium import Landing
from wire.codec import AnyMessage
from wire.gateway_link import GatewayLink
from wire.life import oldest_age
from wire.links import ListenLink
from wire.loop import Loop
from wire.messages import (
    Abort,
    Ask,
    AttemptId,
    Cancel,
    DecodeTask,
    Failed,
    Fault,
    Hello,
    Incarnation,
    Landed,
    Load,
    PeerHello,
    Quiet,
    Reserved,
    Role,
    Taken,
    Token,
)

_SWEEP_EVERY_S = 0.25
_SAY_AGAIN_S = 2.0

log = logging.getLogger(__name__)


class DecodeWorker:
    """Reserves memory for requests, lets prefill workers fill it, and generates."""

    def __init__(
        self,
        config: DecodeConfig,
        team: Team,
        incarnation: Incarnation,
        context: zmq.Context[zmq.Socket[bytes]],
        landings: Mapping[str, Landing],
    ) -> None:
        self._config = config
        self._team = team
        self._served = served = team.served
        self.storage = served.storage
        self._incarnation = incarnation
        self._landings = {medium: team.landing(medium, landing) for medium, landing in landings.items()}
        self.pools = Pools.from_plan(served.plan)
        self.engine = DecodeEngine(team)
        self.requests: dict[AttemptId, DecodeRequest] = {}
        """Every request that has not ended."""
        self._asked: dict[AttemptId, DecodeRequest] = {}
        """Those that prefill asked memory for, in order; they wait for it."""
        self._ready: dict[AttemptId, DecodeRequest] = {}
        self._running: dict[AttemptId, DecodeRequest] = {}
        self._fenced: dict[AttemptId, DecodeRequest] = {}
        """Ended requests whose memory prefill may still be writing."""
        self._early_asks = EarlyAsks()
        # Whole pages may be shared where state is paged; 0 where none is.
        self._shared_page_size = served.plan.page_size if config.reuse and served.plan.max_pages_per_request else 0
        self._handovers = Handovers(config.name, incarnation, served.plan.page_size)
        self._next_sweep = 0.0
        self._loop = Loop()
        self._inbox = ListenLink(context, config.peer_endpoint)
        self._peers = PrefillPeers(config.name, incarnation, served, self._landings)
        self._gateway = GatewayLink(context, config.gateway, self._hello(), self._load, self._drop_all)
        self._loop.watch(self._gateway.socket)
        self._loop.watch(self._inbox.socket)
        if team.followers:
            self._loop.watch(team.followers.socket)

    def _hello(self) -> Hello:
        return hello_of(self._served, self._config.name, self._incarnation, Role.DECODE, self._inbox.endpoint)

    def run(self, on_welcome: Callable[[], None]) -> None:
        """Serve until told to stop; `on_welcome` is called whenever a gateway has taken this worker in."""
        self._gateway.on_welcome = on_welcome
        self._loop.run(self.turn)
        for request in list(self.requests.values()):  # to be served by others
            self._fail(request, Fault.LEAVING, f"{self._config.name} is leaving", time.monotonic())
        self.close()

    def close(self) -> None:
        """Close every link and back end."""
        self._gateway.close()
        self._inbox.close()
        for landing in self._landings.values():
            landing.close()
        self._team.close()

    def turn(self, now: float) -> float:
        """Everything that is due at `now`: messages, deadlines, admission, one step.

        Returns the seconds until the next turn is due if nothing comes in; 0 when there is more to do at once.
        """
        for message in self._gateway.receive(now):
            self._on_gateway_message(message, now)
        for address, message in self._inbox.receive():
            self._on_peer_message(address, message, now)
        self._team.outcomes()
        if now >= self._next_sweep:
            self._sweep(now)
        self._admit(now)
        self._join(now)
        next_beat_s = self._gateway.beat(now)
        return 0.0 if self._step() else min(next_beat_s, _SWEEP_EVERY_S)

    # Messages.

    def _on_gateway_message(self, message: AnyMessage, now: float) -> None:
        match message:
            case DecodeTask():
                self.on_decode_task(message, now)
            case Cancel():
                self.on_cancel(message, now)
            case _:
                log.warning("the gateway sent a %s, which decode has no use for", type(message).__name__)

    def _on_peer_message(self, address: bytes, message: AnyMessage, now: float) -> None:
        if isinstance(message, PeerHello):
            self._inbox.send(address, self._peers.on_peer_hello(address, message))
            return
        peer = self._peers.get(address)
        if peer is None:
            return  # refused, or of an incarnation that has been replaced
        match message:
            case Ask():
                self.on_ask(peer, message, now)
            case Landed():
                self.on_landed(peer, message, now)
            case Quiet():
                self.on_quiet(peer, message, now)
            case _:
                log.warning("%s sent a %s, which decode has no use for", peer.worker, type(message).__name__)

    def on_decode_task(self, task: DecodeTask, now: float) -> None:
        """A request to expect; its memory is reserved when prefill asks."""
        if task.attempt in self.requests or task.attempt in self._fenced:
            log.warning("attempt %s came twice; the second is ignored", task.attempt)
            return
        request = DecodeRequest.start(task, self._shared_page_size, now)
        try:
            self.pools.pages_for(request.needed_tokens)
        except (RequestTooLong, ValueError) as error:
            self._gateway.send(Failed(task.attempt, Fault.REQUEST, f"{self._config.name} cannot hold it: {error}"))
            return
        self.requests[task.attempt] = request
        if early := self._early_asks.pop(task.attempt):
            self.on_ask(*early, now)

    def on_ask(self, peer: PrefillPeer, ask: Ask, now: float) -> None:
        """Prefill wants to compute the request next: queue it for memory."""
        request = self.requests.get(ask.attempt)
        if request is None:
            self._early_asks.put(peer, ask, now)
            return
        if request.peer is not None or request.task.prefill_incarnation != peer.incarnation:
            if request.peer is peer and request.state is DecodeState.RESERVED:
                self._say_reserved(request, peer)  # it asks again: the answer was lost
            return
        request.peer = peer
        if ask.prompt_tokens != request.prompt_tokens:
            text = f"prefill has {ask.prompt_tokens} prompt tokens, decode was told {request.prompt_tokens}"
            self._fail(request, Fault.OURS, text, now)
        else:
            self._asked[request.attempt] = request

    def on_landed(self, peer: PrefillPeer, landed: Landed, now: float) -> None:
        """All of the request's state is said to be here: check that, and go on with it."""
        request = self.requests.get(landed.attempt)
        if request is None or request.peer is not peer or request.state is not DecodeState.RESERVED:
            if landed.attempt not in self._fenced:  # taken before, and the answer was lost
                self._inbox.send(peer.address, Taken(landed.attempt))
            return
        if problem := self._handovers.problem(request, peer, landed):
            self._fail(request, Fault.OURS, problem, now)
            return
        request.life.move(DecodeState.READY, now)
        request.handoff.move(HandoffState.LANDED, now)
        request.tokens.append(landed.first_token)
        self._ready[request.attempt] = request
        self._inbox.send(peer.address, Taken(landed.attempt))
        self._gateway.send(self._handovers.take(request, landed))

    def on_quiet(self, peer: PrefillPeer, quiet: Quiet, now: float) -> None:
        """Prefill will write nothing more for the attempt: free what was fenced, or end what it gave up."""
        self._early_asks.pop(quiet.attempt)
        if fenced := self._fenced.get(quiet.attempt):
            if fenced.peer is peer:
                self._unfence(fenced, now)
            return
        request = self.requests.get(quiet.attempt)
        if request is None or request.peer is not peer:
            return
        if request.state is DecodeState.QUEUED:
            self._forget(request, DecodeState.ABORTED, now)
        elif request.state is DecodeState.RESERVED:
            self._forget(request, DecodeState.ABORTED, now)
            request.handoff.move(HandoffState.ABORTING, now)
            peer.landing.close_attempt(request.attempt)
            request.handoff.move(HandoffState.GONE, now)
            self._release(request)

    def on_cancel(self, cancel: Cancel, now: float) -> None:
        """Nobody waits for the request any more."""
        if request := self.requests.get(cancel.attempt):
            self._end(request, DecodeState.ABORTED, "cancelled", now)

    # Memory.

    def _admit(self, now: float) -> None:
        """Reserve for the asked as far as memory goes, and tell prefill where to write.

        In order, but for a few: what does not fit may be overtaken so often, and then nobody passes it any more.
        """
        waiting: list[DecodeRequest] = []
        for request in list(self._asked.values()):
            if any(other.overtaken >= MAX_OVERTAKEN for other in waiting):
                return
            lease = self.pools.reserve(request.attempt, request.needed_tokens, request.chain)
            if isinstance(lease, Lease):
                del self._asked[request.attempt]
                self._reserve(request, lease, now)
                for other in waiting:
                    other.overtaken += 1
            else:
                waiting.append(request)

    def _reserve(self, request: DecodeRequest, lease: Lease, now: float) -> None:
        peer = request.peer
        if peer is None:
            raise RuntimeError(f"{request.attempt} has memory, but nobody asked for it")
        request.lease = lease
        request.life.move(DecodeState.RESERVED, now)
        request.handoff.move(HandoffState.RESERVED, now)
        self._team.wipe(lease)
        self._team.bind(lease)
        peer.landing.open(request.attempt, lease)
        self._say_reserved(request, peer)

    def _say_reserved(self, request: DecodeRequest, peer: PrefillPeer) -> None:
        lease = request.held
        held = len(lease.shared) * self.storage.layout.page_size
        self._inbox.send(peer.address, Reserved(request.attempt, lease.token_pages, lease.slots, held))

    def _release(self, request: DecodeRequest) -> None:
        """The lease of an ended request becomes free; what it has written stays for requests that begin alike."""
        chain = request.stored_chain(self._shared_page_size) if request.tokens and self._shared_page_size else ()
        self._team.wipe(self.pools.release(request.held, chain))

    def _fence(self, request: DecodeRequest, peer: PrefillPeer, why: str, now: float) -> None:
        """End a hand-off that prefill may be in the middle of: free the memory only when it cannot be written."""
        request.handoff.move(HandoffState.ABORTING, now)
        peer.landing.close_attempt(request.attempt)
        self._abort(request, peer, why, now)
        if peer.landing.peer_writes:
            self.pools.fence(request.held)
            self._fenced[request.attempt] = request
        else:
            request.handoff.move(HandoffState.GONE, now)
            self._release(request)

    def _abort(self, request: DecodeRequest, peer: PrefillPeer, why: str, now: float) -> None:
        request.aborted_at = now
        self._inbox.send(peer.address, Abort(request.attempt, why))

    def _unfence(self, request: DecodeRequest, now: float) -> None:
        del self._fenced[request.attempt]
        request.handoff.move(HandoffState.GONE, now)
        self._team.wipe(self.pools.unfence(request.attempt))

    # A step.

    def _join(self, now: float) -> None:
        """Let landed requests into the batch, at every step, as far as the cap on running requests allows."""
        count = join(len(self._ready), len(self._running), self._served.plan.max_running_requests)
        for attempt, request in list(self._ready.items())[:count]:
            del self._ready[attempt]
            self._running[attempt] = request
            request.life.move(DecodeState.RUNNING, now)

    def _step(self) -> bool:
        """One token for each running request. True when there may be more to do at once."""
        batch = list(self._running.values())
        if not batch:
            return False
        try:
            sampled = self.engine.step([self._work(request) for request in batch])
        except RankLostError:
            raise
        except Exception as error:  # one bad request must not take the worker down
            log.exception("a decode step failed")
            for request in batch:
                self._fail(request, Fault.OURS, f"decode failed: {error}", time.monotonic())
            return True
        now = time.monotonic()
        tokens: list[Token] = []
        for request, token in zip(batch, sampled, strict=True):
            if token is None:
                self._fail(request, Fault.OURS, NOT_FINITE, now)
                continue
            index = request.index
            finish = request.task.sampling.finish(token.token_id, index)
            tokens.append(Token(request.attempt, index, token.token_id, token.logprob, token.top, finish))
            request.tokens.append(token.token_id)
            if finish is not None:
                self._forget(request, DecodeState.DONE, now)
                self._release(request)
        self._gateway.send_tokens(tokens)
        return True

    def _work(self, request: DecodeRequest) -> Work:
        row = self.pools.check(request.held).row
        return Work(row, request.tokens[-1], request.stored_tokens, request.task.sampling)

    # Ends.

    def _fail(self, request: DecodeRequest, fault: Fault, text: str, now: float) -> None:
        self._end(request, DecodeState.FAILED, text, now)
        self._gateway.send(Failed(request.attempt, fault, text))

    def _end(self, request: DecodeRequest, state: DecodeState, why: str, now: float) -> None:
        """End a request before its last token, and give up its memory as its state allows."""
        reserved = request.state is DecodeState.RESERVED
        self._forget(request, state, now)
        if reserved and request.peer is not None:
            self._fence(request, request.peer, why, now)
        elif request.lease is not None:
            self._release(request)

    def _forget(self, request: DecodeRequest, state: DecodeState, now: float) -> None:
        request.life.move(state, now)
        for table in (self.requests, self._asked, self._ready, self._running):
            table.pop(request.attempt, None)

    def _drop_all(self) -> None:
        """The gateway that sent these requests is gone."""
        for request in list(self.requests.values()):
            self._end(request, DecodeState.ABORTED, "the gateway has gone", time.monotonic())

    def _sweep(self, now: float) -> None:
        """Deadlines, asks whose task never came, and fences whose writer has died."""
        self._next_sweep = now + _SWEEP_EVERY_S
        for request in list(self.requests.values()):
            if now > request.deadline:
                text = f"the deadline passed while the request was {request.state.name.lower()} on decode"
                self._fail(request, Fault.NO_ROOM, text, now)
        self._early_asks.expire(now)
        for request in list(self._fenced.values()):
            if request.peer is not None and request.peer.is_gone():
                self._unfence(request, now)
            elif request.peer is not None and now - request.aborted_at > _SAY_AGAIN_S:
                self._abort(request, request.peer, "said before", now)

    def _load(self) -> Load:
        running = len(self._running)
        return load_of(
            self._config.name,
            self._incarnation,
            self.pools,
            waiting=len(self.requests) - running,
            running=running,
            handoffs=self._handovers.count,
            handoff_bytes=self._handovers.nbytes,
            damaged_handoffs=self._handovers.damaged,
            oldest_s=oldest_age([request.life for request in self.requests.values()], time.monotonic()),
        )
