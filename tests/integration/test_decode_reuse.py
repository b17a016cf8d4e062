"""Pages that decode still holds do not move again, and nothing but the count of bytes tells."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from pools.sizing import Phase
from tests.fleet import Decoders, Fleet, assert_equal, config_of, fleet, greedy
from tests.landings import EVERY_MEDIUM
from tests.tiny import VOCAB, make_checkpoint

PAGE_SIZES = [(8, 4), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((8, 8), (4, 16)))]
"""Prefill's and decode's."""
TOKENS = [random.Random(8).randrange(VOCAB) for _ in range(80)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_5_text", tmp_path_factory.mktemp("model"))


def cached(made: Fleet, name: str) -> int:
    return made.reports[name].cached_tokens


@pytest.mark.parametrize("transfer", EVERY_MEDIUM)
@pytest.mark.parametrize("page_sizes", PAGE_SIZES)
def test_only_missing_pages_move(
    checkpoint: Path, tmp_path: Path, transfer: str, page_sizes: tuple[int, int]
) -> None:
    decoders = Decoders()
    with fleet(tmp_path) as made:
        config = config_of(checkpoint, page_size=page_sizes[0], poison=True)
        served, _ = decoders.served(config, Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=16, transfer=transfer, verify=True)
        config = config_of(checkpoint, page_size=page_sizes[1], poison=True)
        served, segment = decoders.served(config, Phase.DECODE, transfer == "shm")
        made.add_decode(served, segment, transfer=transfer)
        made.wait_for_all()
        page = page_sizes[1]

        def ask(name: str, prompt: list[int], count: int = 6) -> list[int]:
            made.submit(name, prompt, greedy(count))
            made.finish()
            made.settle()
            assert made.answers[name].failed is None, made.answers[name].failed
            return made.answers[name].token_ids

        first = ask("first", TOKENS[:40])
        assert cached(made, "first") == 0
        assert ask("again", TOKENS[:40]) == first
        assert cached(made, "again") == 40 // page * page
        assert made.reports["again"].nbytes < made.reports["first"].nbytes
        # The next turn of a conversation: the answer's own pages serve as well.
        longer = TOKENS[:40] + first + TOKENS[60:70]
        ask("longer", longer)
        assert cached(made, "longer") == 45 // page * page
        # Other tokens from the middle on share only what lies before.
        ask("other", [*TOKENS[:20], TOKENS[20] ^ 1, *TOKENS[21:40]])
        assert cached(made, "other") == 20 // page * page


def test_many_at_once_share_and_agree_with_a_worker_that_does_not(checkpoint: Path, tmp_path: Path) -> None:
    """With few pages, so that kept ones are given up all the time."""
    prompts = [TOKENS[: 8 * (1 + n % 4)] + [n] * (n % 3) for n in range(24)]
    answers = []
    for reuse in (False, True):
        folder = tmp_path / str(reuse)
        folder.mkdir()
        with ExitStack() as stack:
            decoders = Decoders()
            made = stack.enter_context(fleet(folder))
            served, _ = decoders.served(config_of(checkpoint), Phase.PREFILL, shared=False)
            made.add_prefill(served, chunk_size=16, transfer="shm")
            config = config_of(
                checkpoint, page_size=4, max_context_tokens=40, max_running_requests=2, pre_alloc_size=1
            )
            served, segment = decoders.served(config, Phase.DECODE, shared=True)
            made.add_decode(served, segment, transfer="shm", reuse=reuse)
            made.wait_for_all()
            for number, prompt in enumerate(prompts):
                made.submit(f"r{number}", prompt, greedy(5))
            made.finish()
            made.settle()
            answers.append(dict(made.answers))
            hits = sum(report.cached_tokens for report in made.reports.values())
            assert bool(hits) == reuse
    assert_equal(answers[1], answers[0])
