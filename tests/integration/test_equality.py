"""Disaggregated output equals colocated output, token for token, and both equal transformers' full forward.

Positions whose two best candidates are closer than `MARGIN` may be decided by rounding; from the first such position
on, an answer is not compared.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from pools.sizing import Phase
from tests.fleet import MARGIN, Answer, Decoders, Fleet, assert_equal, config_of, fleet, greedy
from tests.tiny import CONFIGS, VOCAB, make_checkpoint, oracle_logits
from wire.messages import Role

CHUNKS = (1, 4, 32, 512)
PAGES = (1, 8, 16)
LENGTHS = tuple(range(1, 41))
LONG = (47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129)

Prompts = Mapping[str, list[int]]


def prompts_of(lengths: tuple[int, ...]) -> dict[str, list[int]]:
    """One prompt for each length, always the same."""
    return {f"len{n}": [random.Random(1000 * n + i).randrange(VOCAB) for i in range(n)] for n in sorted(set(lengths))}


def answer_length(name: str) -> int:
    """Different for neighbours, so that requests leave the batch while others stay."""
    return 2 + int(name.removeprefix("len")) % 5


ALL = prompts_of(LENGTHS + LONG)


@pytest.fixture(scope="module")
def decoders() -> Decoders:
    return Decoders()


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(checkpoint: Path, decoders: Decoders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """The colocated worker's answers, in batches of up to eight."""
    with fleet(tmp_path_factory.mktemp("f")) as made:
        served, _ = decoders.served(config_of(checkpoint), Phase.COLOCATED, shared=False)
        made.add_colocated(served, chunk_size=512)
        made.wait_for_all()
        run(made, ALL)
        return dict(made.answers)


def run(made: Fleet, prompts: Prompts) -> None:
    """All prompts at once: more than may run, so they join and leave at different steps."""
    for pair, (name, prompt) in enumerate(prompts.items()):
        made.submit(name, prompt, greedy(answer_length(name)), pair=pair)
    made.finish()
    made.settle()


def pair_of(made: Fleet, decoders: Decoders, checkpoint: Path, chunk: int, pages: tuple[int, int], by: str) -> None:
    """One prefill and one decode worker."""
    served, _ = decoders.served(config_of(checkpoint, page_size=pages[0]), Phase.PREFILL, shared=False)
    made.add_prefill(served, chunk_size=chunk, transfer=by)
    served, segment = decoders.served(config_of(checkpoint, page_size=pages[1]), Phase.DECODE, shared=by != "tcp")
    made.add_decode(served, segment, transfer=by)
    made.wait_for_all()


def test_colocated_equals_transformers(checkpoint: Path, reference: dict[str, Answer]) -> None:
    for name in ("len1", "len2", "len17", "len40", "len65", "len129"):
        answer = reference[name]
        logits = oracle_logits(checkpoint, ALL[name] + answer.token_ids)
        for index, token in answer.tokens.items():
            expected = torch.log_softmax(logits[len(ALL[name]) - 1 + index], -1)
            best, second = expected.topk(2).values.tolist()
            if best - second < MARGIN:
                break
            assert token.token_id == int(expected.argmax()), f"{name}, token {index}"
            assert token.logprob == pytest.approx(best, abs=2e-3)


# Chunks of one token take a forward step for each: one page size of them is enough for `make test`.
ALL_SIZES = [
    pytest.param(chunk, page, marks=pytest.mark.slow if chunk == 1 and page != 8 else ())
    for chunk in CHUNKS
    for page in PAGES
]


@pytest.mark.parametrize(("chunk", "page"), ALL_SIZES)
def test_disaggregated_equals_colocated(
    checkpoint: Path, decoders: Decoders, reference: dict[str, Answer], tmp_path: Path, chunk: int, page: int
) -> None:
    with fleet(tmp_path) as made:
        pair_of(made, decoders, checkpoint, chunk, (page, page), "shm")
        run(made, ALL)
        assert_equal(made.answers, reference)
        # Every one of them was really handed over: two tokens at least, the second by decode.
        assert made.loads["prefill-0"].handoffs == len(ALL)
        made.turn_until(lambda: made.loads["decode-1"].handoffs == len(ALL))
        assert all(answer.senders[0] == "prefill-0" for answer in made.answers.values())
        assert all(set(answer.senders[1:]) == {"decode-1"} for answer in made.answers.values())


SOME = {name: ALL[name] for name in ("len1", "len7", "len8", "len9", "len31", "len33", "len64", "len129")}


def test_alone_equals_batched(
    checkpoint: Path, decoders: Decoders, reference: dict[str, Answer], tmp_path: Path
) -> None:
    with fleet(tmp_path) as made:
        pair_of(made, decoders, checkpoint, 32, (8, 8), "shm")
        for name, prompt in SOME.items():
            made.submit(name, prompt, greedy(answer_length(name)))
            made.finish(name)
        made.settle()
        assert_equal(made.answers, reference)


@pytest.mark.parametrize("pages", [(8, 8), (4, 16), (16, 8), (1, 3)])
def test_tcp_and_unequal_pages_change_nothing(
    checkpoint: Path, decoders: Decoders, reference: dict[str, Answer], tmp_path: Path, pages: tuple[int, int]
) -> None:
    with fleet(tmp_path) as made:
        pair_of(made, decoders, checkpoint, 32, pages, "tcp")
        run(made, SOME)
        assert_equal(made.answers, reference)


def test_several_prefill_and_decode_workers(
    checkpoint: Path, decoders: Decoders, reference: dict[str, Answer], tmp_path: Path
) -> None:
    with fleet(tmp_path) as made:
        for chunk in (8, 32):
            served, _ = decoders.served(config_of(checkpoint), Phase.PREFILL, shared=False)
            made.add_prefill(served, chunk_size=chunk, transfer="auto")
        for shared in (True, False):
            served, segment = decoders.served(config_of(checkpoint), Phase.DECODE, shared=shared)
            made.add_decode(served, segment, transfer="auto")
        made.wait_for_all()
        run(made, ALL)
        assert_equal(made.answers, reference)
        made.turn()
        assert {hello.role for hello in made.of(Role.DECODE)} == {Role.DECODE}
        decoded = {sender for answer in made.answers.values() for sender in answer.senders[1:]}
        assert decoded == {"decode-2", "decode-3"}


def test_few_slots_make_requests_wait_and_nothing_else(
    checkpoint: Path, decoders: Decoders, reference: dict[str, Answer], tmp_path: Path
) -> None:
    """Slots for two requests, 8 rows to run in and 2 to land in: all are served, two at a time."""
    with fleet(tmp_path) as made:
        served, _ = decoders.served(config_of(checkpoint), Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=16, transfer="shm")
        served, segment = decoders.served(config_of(checkpoint, mamba_size=2), Phase.DECODE, shared=True)
        assert served.plan.num_rows == 10
        made.add_decode(served, segment, transfer="shm")
        made.wait_for_all()
        run(made, ALL)
        assert_equal(made.answers, reference)
        if served.plan.num_slots:
            assert served.plan.num_slots == 2
            assert made.max_running_seen <= 2


def test_running_requests_never_exceed_the_cap(
    checkpoint: Path, decoders: Decoders, reference: dict[str, Answer], tmp_path: Path
) -> None:
    """Two may run and four may land; hand-offs land in the rows beyond the running ones."""
    with fleet(tmp_path) as made:
        served, _ = decoders.served(config_of(checkpoint), Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=64, transfer="shm")
        config = config_of(checkpoint, max_running_requests=2, pre_alloc_size=4)
        served, segment = decoders.served(config, Phase.DECODE, shared=True)
        worker = made.add_decode(served, segment, transfer="shm")
        made.wait_for_all()
        held = 0
        for name, prompt in SOME.items():
            made.submit(name, prompt, greedy(answer_length(name)))
        while not all(answer.done for answer in made.answers.values()):
            made.turn()
            held = max(held, worker.pools.stats().rows.held)
        assert made.max_running_seen <= 2
        assert 2 < held <= 6
        assert_equal(made.answers, reference)
        made.settle()
