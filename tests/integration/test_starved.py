"""Pools with room for little more than one request: all requests finish, right, and none waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from models.serving import ServingConfig, plan_worker
from pools.pools import Pools
from pools.sizing import Phase
from tests.fleet import Decoders, assert_equal, config_of, fleet, greedy
from tests.tiny import VOCAB, make_checkpoint
from wire.messages import AttemptId


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_5_text", tmp_path_factory.mktemp("model"))


def starved(config: ServingConfig, phase: Phase, pages: int) -> ServingConfig:
    """The same with memory for so many pages."""
    plan = plan_worker(config, phase)
    spare = (plan.num_pages - pages) * plan.layout.page.nbytes
    small = replace(config, memory_bytes=plan.total_bytes - spare)
    assert plan_worker(small, phase).num_pages == pages
    return small


def prompt(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB) for _ in range(tokens)]


@pytest.mark.parametrize("reuse", [True, False])
def test_one_slot_and_pages_for_one_and_a_half_serve_two_dozen(checkpoint: Path, tmp_path: Path, reuse: bool) -> None:
    prompts = {f"r{number}": prompt(number % 9, 10 + 3 * (number % 9)) for number in range(24)}
    decoders = Decoders()
    reference: dict[str, object] = {}
    for colocated in (True, False):
        folder = tmp_path / str(colocated)
        folder.mkdir()
        with fleet(folder) as made:
            if colocated:
                served, _ = decoders.served(config_of(checkpoint), Phase.COLOCATED, shared=False)
                made.add_colocated(served, chunk_size=16)
            else:
                config = config_of(checkpoint, mamba_size=1, max_context_tokens=48, max_running_requests=4)
                served, _ = decoders.served(starved(config, Phase.PREFILL, 6), Phase.PREFILL, shared=False)
                made.add_prefill(served, chunk_size=16, transfer="shm")
                config = replace(config, page_size=4, max_context_tokens=40)
                served, segment = decoders.served(starved(config, Phase.DECODE, 10), Phase.DECODE, shared=True)
                made.add_decode(served, segment, transfer="shm", reuse=reuse)
            made.wait_for_all()
            for name, tokens in prompts.items():
                made.submit(name, tokens, greedy(5))
            made.finish()
            made.settle()
            if colocated:
                reference = dict(made.answers)
            else:
                assert_equal(made.answers, reference)  # type: ignore[arg-type]


def test_a_large_request_is_overtaken_but_not_for_ever(checkpoint: Path, tmp_path: Path) -> None:
    """Small ones keep coming, and there is never room for the large one unless they are held back."""
    decoders = Decoders()
    with fleet(tmp_path) as made:
        config = config_of(checkpoint, max_context_tokens=96)
        served, _ = decoders.served(config, Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=64, transfer="shm", ask_ahead=64)
        served, segment = decoders.served(config, Phase.DECODE, shared=True)
        decode = made.add_decode(served, segment, transfer="shm", reuse=False)
        plan = served.plan
        decode.pools = Pools(  # fewer pages than any plan would leave to so many requests
            num_rows=plan.num_rows, num_pages=14, num_slots=plan.num_slots, page_size=plan.page_size,
            max_pages_per_request=plan.max_pages_per_request, slots_per_request=plan.slots_per_request,
        )  # fmt: skip
        made.wait_for_all()

        def small(number: int) -> None:
            made.submit(f"small{number}", prompt(number, 9), greedy(3 + 4 * (number % 4)))

        for number in range(4):
            small(number)
        made.submit("large", prompt(99, 80), greedy(8))
        count, overtaken = 4, 0
        while not made.answers["large"].done:
            open_now = [name for name, answer in made.answers.items() if not answer.done]
            for _ in range(8 - len(open_now)):
                small(count)
                count += 1
            made.turn()
            assert count < 200, "the large request starves"
            if (request := decode.requests.get(AttemptId("large/0"))) is not None:
                overtaken = max(overtaken, request.overtaken)
        assert 0 < overtaken <= 16
        assert made.answers["large"].failed is None
        made.finish()
        made.settle()
