"""What happens to a request that does not simply go through: memory, books and neighbours in every case."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from decode import peers
from decode.request import DecodeState
from decode.worker import DecodeWorker
from pools.sizing import Phase
from pools.spec import DType
from prefill.request import PrefillState
from prefill.worker import PrefillWorker
from tests.fleet import Answer, Decoders, Fleet, config_of, fleet, greedy
from tests.tiny import VOCAB, make_checkpoint
from wire.messages import AttemptId, Cancel, DecodeTask, Fault, Finish, Incarnation, PrefillTask, Role

PROMPT = [random.Random(5).randrange(VOCAB) for _ in range(40)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_5_text", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def decoders() -> Decoders:
    return Decoders()


class Pair:
    """A fleet of one prefill and one decode worker."""

    def __init__(self, made: Fleet, prefill: PrefillWorker, decode: DecodeWorker) -> None:
        self.fleet = made
        self.prefill = prefill
        self.decode = decode

    def prefill_state(self, name: str) -> PrefillState | None:
        """Where a request stands on prefill; None when it is not there."""
        request = self.prefill.requests.get(AttemptId(f"{name}/0"))
        return request.state if request else None

    def decode_state(self, name: str) -> DecodeState | None:
        """Where a request stands on decode; None when it is not there."""
        request = self.decode.requests.get(AttemptId(f"{name}/0"))
        return request.state if request else None


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, checkpoint: Path, decoders: Decoders, tmp_path: Path) -> Iterator[Pair]:
    with fleet(tmp_path) as made:
        yield make_pair(made, decoders, checkpoint, request.param)


def make_pair(made: Fleet, decoders: Decoders, checkpoint: Path, by: str, **changes: object) -> Pair:
    served, _ = decoders.served(config_of(checkpoint), Phase.PREFILL, shared=False)
    prefill = made.add_prefill(served, chunk_size=4, transfer=by)
    served, segment = decoders.served(config_of(checkpoint, **changes), Phase.DECODE, shared=by == "shm")
    decode = made.add_decode(served, segment, transfer=by)
    made.wait_for_all()
    return Pair(made, prefill, decode)


STAGES: dict[str, Callable[[Pair], bool]] = {
    "queued": lambda pair: True,
    "reserved": lambda pair: pair.decode_state("victim") is DecodeState.RESERVED,
    "computing": lambda pair: pair.prefill_state("victim") is PrefillState.RUNNING,
    "half computed": lambda pair: any(request.computed >= 20 for request in pair.prefill.requests.values()),
    "sending": lambda pair: pair.prefill_state("victim") is PrefillState.SENDING,
    "decoding": lambda pair: pair.decode_state("victim") is DecodeState.RUNNING,
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_cancel_at_any_stage_frees_everything_and_spares_the_neighbour(pair: Pair, stage: str) -> None:
    pair.fleet.submit("alone", PROMPT, greedy(8))
    pair.fleet.finish("alone")
    pair.fleet.submit("neighbour", PROMPT, greedy(8))
    pair.fleet.submit("victim", PROMPT, greedy(60))
    pair.fleet.turn_until(lambda: STAGES[stage](pair))
    pair.fleet.cancel("victim")
    pair.fleet.finish("neighbour")
    pair.fleet.settle()
    assert pair.fleet.answers["neighbour"].token_ids == pair.fleet.answers["alone"].token_ids
    assert len(pair.fleet.answers["victim"].tokens) < 60
    pair.fleet.submit("again", PROMPT, greedy(8))
    pair.fleet.finish("again")
    assert pair.fleet.answers["again"].token_ids == pair.fleet.answers["alone"].token_ids
    pair.fleet.settle()


def test_an_answer_of_one_token_is_not_handed_over(pair: Pair) -> None:
    pair.fleet.submit("one", PROMPT, greedy(1))
    pair.fleet.finish()
    pair.fleet.settle()
    (token,) = pair.fleet.answers["one"].tokens.values()
    assert token.finish is Finish.LENGTH
    assert pair.fleet.answers["one"].senders == ["prefill-0"]
    pair.fleet.turn()
    assert pair.fleet.loads["decode-1"].handoffs == 0


def test_a_stop_token_ends_the_answer_on_either_side(pair: Pair) -> None:
    pair.fleet.submit("plain", PROMPT, greedy(12))
    pair.fleet.finish()
    plain = pair.fleet.answers["plain"].token_ids
    for place in (0, next(i for i in range(1, 12) if plain[i] not in plain[:i])):
        name = f"stop at {place}"
        pair.fleet.submit(name, PROMPT, greedy(12, stop_token_ids=(plain[place],)))
        pair.fleet.finish()
        answer = pair.fleet.answers[name]
        assert answer.token_ids == plain[: place + 1]
        assert answer.tokens[place].finish is Finish.STOP
    pair.fleet.settle()


def test_sampled_answers_depend_on_the_seed_alone(pair: Pair) -> None:
    def ask(name: str, seed: int) -> None:
        pair.fleet.submit(name, PROMPT, greedy(12, temperature=1.0, seed=seed))

    ask("first", 7)
    pair.fleet.finish()
    for name, seed in (("same", 7), ("other", 8), ("more", 9)):
        ask(name, seed)
    pair.fleet.finish()
    answers = {name: answer.token_ids for name, answer in pair.fleet.answers.items()}
    assert answers["same"] == answers["first"]
    assert len({tuple(ids) for ids in answers.values()}) == 3


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        ([], 4, "no tokens"),
        ([VOCAB], 4, f"token id {VOCAB} is outside the model's vocabulary of {VOCAB}"),
        ([-1], 4, "token id -1 is outside"),
        (PROMPT * 5, 4, "pages of 8, and one request can have 20 (160 tokens)"),
        (PROMPT, 500, "decode-1 cannot hold it: 539 tokens need 68 pages of 8, and one request can have 20"),
    ],
)
def test_what_can_never_be_served_fails_at_once(pair: Pair, prompt: list[int], max_tokens: int, says: str) -> None:
    pair.fleet.submit("bad", prompt, greedy(max_tokens))
    pair.fleet.finish()
    failed = pair.fleet.answers["bad"].failed
    assert failed is not None
    assert failed.fault is Fault.REQUEST
    assert says in failed.text
    pair.fleet.cancel("bad")
    pair.fleet.submit("good", PROMPT, greedy(4))
    pair.fleet.finish("good")
    assert pair.fleet.answers["good"].failed is None
    pair.fleet.settle()


def test_a_deadline_ends_a_request_that_waits_for_memory(
    checkpoint: Path, decoders: Decoders, tmp_path: Path
) -> None:
    with fleet(tmp_path) as made:
        pair = make_pair(made, decoders, checkpoint, "shm", mamba_size=1)
        made.submit("long", PROMPT, greedy(100))
        made.turn_until(lambda: pair.decode_state("long") is DecodeState.RUNNING)
        made.submit("late", PROMPT, greedy(4), deadline_s=0.05)
        made.turn_until(lambda: made.answers["late"].failed is not None)
        failed = made.answers["late"].failed
        assert failed is not None
        assert failed.fault is Fault.NO_ROOM
        assert "deadline passed while the request was queued" in failed.text
        made.cancel("late")
        made.finish("long")
        made.settle()


def test_a_step_that_raises_fails_its_batch_and_no_more(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.fleet.submit("before", PROMPT, greedy(6))
    pair.fleet.finish()
    with monkeypatch.context() as patch:
        patch.setattr(pair.decode.engine, "step", _raise)
        pair.fleet.submit("decode fails", PROMPT, greedy(6))
        pair.fleet.finish()
    with monkeypatch.context() as patch:
        patch.setattr(pair.prefill.engine, "step", _raise)
        pair.fleet.submit("prefill fails", PROMPT, greedy(6))
        pair.fleet.finish()
        pair.fleet.cancel("prefill fails")
    for name in ("decode fails", "prefill fails"):
        failed = pair.fleet.answers[name].failed
        assert failed is not None
        assert failed.fault is Fault.OURS
        assert failed.text == f"{name.split()[0]} failed: out of luck"
    pair.fleet.submit("after", PROMPT, greedy(6))
    pair.fleet.finish()
    assert pair.fleet.answers["after"].token_ids == pair.fleet.answers["before"].token_ids
    pair.fleet.settle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_output_that_is_not_finite_fails_its_request_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """The state of one of two neighbours turns to NaN."""
    pair.fleet.submit("alone", PROMPT, greedy(12))
    pair.fleet.finish()
    pair.fleet.submit("victim", PROMPT, greedy(50))
    pair.fleet.submit("neighbour", PROMPT, greedy(12))
    if side == "prefill":
        pair.fleet.turn_until(lambda: STAGES["half computed"](pair))
        worker: PrefillWorker | DecodeWorker = pair.prefill
    else:
        pair.fleet.turn_until(lambda: pair.decode_state("victim") is DecodeState.RUNNING)
        worker = pair.decode
    lease = worker.requests[AttemptId("victim/0")].held
    worker.storage.poison = True
    worker.storage.wipe([], lease.slots)
    pair.fleet.finish("neighbour", "victim")
    failed = pair.fleet.answers["victim"].failed
    assert failed is not None
    assert "not finite" in failed.text
    assert pair.fleet.answers["neighbour"].token_ids == pair.fleet.answers["alone"].token_ids
    pair.fleet.cancel("victim")
    pair.fleet.settle()


def _raise(_work: object) -> None:
    raise RuntimeError("out of luck")


def test_the_ask_may_overtake_the_task(pair: Pair) -> None:
    """Prefill's and the gateway's messages to decode come by different sockets, in any order."""
    made = pair.fleet
    prefill, decode = made.of(Role.PREFILL)[0], made.of(Role.DECODE)[0]
    attempt = AttemptId("early/0")
    made.submit("plain", PROMPT, greedy(6))
    made.finish()
    made.answers["early"] = Answer()
    task = PrefillTask(
        attempt, tuple(PROMPT), 0, greedy(6), 60.0, decode.worker, decode.incarnation, decode.peer_endpoint
    )
    made.send(prefill.worker, task)
    for _ in range(50):
        made.turn()
    assert pair.prefill_state("early") is PrefillState.QUEUED
    made.send(
        decode.worker, DecodeTask(attempt, tuple(PROMPT), 0, greedy(6), 60.0, prefill.worker, prefill.incarnation)
    )
    made.finish()
    assert made.answers["early"].token_ids == made.answers["plain"].token_ids
    made.settle()


def test_messages_for_another_incarnation_change_nothing(pair: Pair) -> None:
    """An ask from a prefill incarnation that the task does not name is not served."""
    made = pair.fleet
    prefill, decode = made.of(Role.PREFILL)[0], made.of(Role.DECODE)[0]
    attempt = AttemptId("stale/0")
    made.answers["stale"] = Answer()
    made.send(
        decode.worker, DecodeTask(attempt, tuple(PROMPT), 0, greedy(6), 60.0, prefill.worker, Incarnation("former"))
    )
    task = PrefillTask(
        attempt, tuple(PROMPT), 0, greedy(6), 60.0, decode.worker, decode.incarnation, decode.peer_endpoint
    )
    made.send(prefill.worker, task)
    for _ in range(50):
        made.turn()
    assert pair.decode_state("stale") is DecodeState.QUEUED
    made.cancel("stale")
    made.settle()


def test_a_gateway_that_starts_anew_has_lost_its_requests(pair: Pair) -> None:
    for number in range(6):
        pair.fleet.submit(f"old {number}", PROMPT, greedy(100))
    pair.fleet.turn_until(lambda: pair.decode_state("old 0") is DecodeState.RUNNING)
    pair.fleet.incarnation = Incarnation("gateway-2")
    pair.fleet.settle()
    assert not any(answer.done for answer in pair.fleet.answers.values())
    pair.fleet.submit("new", PROMPT, greedy(4))
    pair.fleet.finish("new")
    assert pair.fleet.answers["new"].failed is None
    pair.fleet.settle()


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("qwen3_5_text", {}, "model fingerprint"),
        ("qwen3_5_text", {"linear_value_head_dim": 16}, r"shape of conv\+recurrent\.conv: prefill has \[104, 3\]"),
        ("llama", {}, r"slot state groups: prefill has \['conv\+recurrent'\], decode has \[\]"),
    ],
)
def test_a_pair_that_does_not_match_is_refused_by_name(
    checkpoint: Path,
    decoders: Decoders,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    changes: dict[str, object],
    says: str,
) -> None:
    other = make_checkpoint(family, tmp_path_factory.mktemp("other"), seed=1, **changes)
    with fleet(tmp_path) as made:
        served, _ = decoders.served(config_of(checkpoint), Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=4, transfer="tcp")
        served, _ = decoders.served(config_of(other), Phase.DECODE, shared=False)
        made.add_decode(served, None, transfer="tcp")
        made.wait_for_all()
        made.submit("first", PROMPT, greedy(4))
        made.finish()
        made.submit("second", PROMPT, greedy(4))
        made.finish()
        for answer in made.answers.values():
            assert answer.failed is not None
            assert re.search(says, answer.failed.text), answer.failed.text
        for name in ("first", "second"):
            made.cancel(name)
        made.settle()


def test_different_dtypes_are_refused_by_name(checkpoint: Path, decoders: Decoders, tmp_path: Path) -> None:
    with fleet(tmp_path) as made:
        served, _ = decoders.served(config_of(checkpoint), Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=4, transfer="tcp")
        served, _ = Decoders().served(config_of(checkpoint, dtype=DType.BFLOAT16), Phase.DECODE, shared=False)
        made.add_decode(served, None, transfer="tcp")
        made.wait_for_all()
        made.submit("first", PROMPT, greedy(4))
        made.finish()
        failed = made.answers["first"].failed
        assert failed is not None
        assert "dtype of k+v.k: prefill has float32, decode has bfloat16" in failed.text


def test_fenced_memory_is_not_reused_before_the_writer_is_quiet(
    checkpoint: Path, decoders: Decoders, tmp_path: Path
) -> None:
    """Prefill writes decode's memory by itself: when decode gives up, that memory waits for prefill's word."""
    with fleet(tmp_path) as made:
        pair = make_pair(made, decoders, checkpoint, "shm")
        made.submit("victim", PROMPT, greedy(60))
        made.turn_until(lambda: pair.decode_state("victim") is DecodeState.RESERVED)
        lease = pair.decode.requests[AttemptId("victim/0")].held
        made.send("decode-1", Cancel(AttemptId("victim/0")))
        # Only decode takes turns: prefill is as good as stopped.
        made.turn_until(lambda: pair.decode.pools.stats().rows.fenced == 1, pair.decode)
        stats = pair.decode.pools.stats()
        assert stats.pages.fenced == len(lease.pages)
        assert stats.slots.fenced == 1
        # The late writer: all of its pages and its slot.
        layout = pair.decode.storage.layout
        block = pair.decode.storage.block.numpy()
        for offset, size in [
            *((layout.page_offset(page), layout.page.nbytes) for page in lease.pages),
            *((layout.slot_offset(slot), layout.slot.nbytes) for slot in lease.slots),
        ]:
            block[offset : offset + size] = 0x55
        everywhere = np.flatnonzero(block == 0x55)
        assert len(everywhere) >= len(lease.pages) * layout.page.nbytes
        free = [page for page in range(layout.num_pages) if page not in lease.pages]
        assert not any(
            (block[layout.page_offset(page) : layout.page_offset(page) + layout.page.nbytes] == 0x55).all()
            for page in free
        )
        # Prefill hears of it, says Quiet, and the memory is free and wiped.
        made.cancel("victim")
        made.settle()
        assert pair.decode.pools.stats().pages.fenced == 0
        made.submit("next", PROMPT, greedy(6))
        made.finish("next")
        assert made.answers["next"].failed is None


def test_a_dead_writer_lifts_the_fence(
    checkpoint: Path, decoders: Decoders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet(tmp_path) as made:
        pair = make_pair(made, decoders, checkpoint, "shm")
        made.submit("victim", PROMPT, greedy(60))
        made.turn_until(lambda: pair.decode_state("victim") is DecodeState.RESERVED)
        made.send("decode-1", Cancel(AttemptId("victim/0")))
        made.turn_until(lambda: pair.decode.pools.stats().rows.fenced == 1, pair.decode)
        now = time.monotonic()
        for moment in range(20):
            pair.decode.turn(now + moment)
        assert pair.decode.pools.stats().rows.fenced == 1
        monkeypatch.setattr(peers.PrefillPeer, "is_gone", lambda _self: True)
        pair.decode.turn(now + 30)
        assert pair.decode.pools.stats().rows.fenced == 0
        assert pair.decode.pools.stats().rows.held == 0
