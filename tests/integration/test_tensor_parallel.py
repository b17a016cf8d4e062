"""Prefill and decode at unequal tensor-parallel sizes: the tokens are transformers', whatever the pair."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from models.checkpoint import Checkpoint
from models.errors import ConfigError
from pools.sizing import Phase
from tests.fleet import config_of, fleet, greedy
from tests.integration.test_families_handed_over import NEW_TOKENS, assert_answer
from tests.models.player import prompts
from tests.models.zoo import MODELS, VOCAB, Zoo
from tests.teams import thread_team

LENGTHS = (1, 17, 65)
TRIED = 3
PAIRS = ((1, 2), (2, 1), (2, 4), (4, 1), (3, 1), (1, 3), (2, 2))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


def fits(folder: Path, *sizes: int) -> bool:
    """Whether this many ranks can share the model."""
    try:
        for size in sizes:
            Checkpoint.open(folder).architecture.check_ranks(size)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", MODELS)
def test_tokens_do_not_depend_on_the_sizes(zoo: Zoo, name: str, tmp_path: Path) -> None:
    twin = zoo[name]
    pairs = [pair for pair in PAIRS if fits(twin.folder, *pair)]
    assert len(pairs) >= 2, "a zoo's checkpoint must fit 2 or 3 ranks"
    # Some of them, others for the next model, so that all are tried many times.
    first = list(MODELS).index(name)
    chosen = {pairs[(first + step) % len(pairs)] for step in range(TRIED)}
    for number, (prefill_tp, decode_tp) in enumerate(sorted(chosen), start=first):
        transfer = ("shm", "tcp")[number % 2]
        folder = tmp_path / str(number)
        folder.mkdir()
        with ExitStack() as stack:
            # Unequal page sizes in every third pair.
            page_size = 16 if number % 3 == 0 else 8
            prefill_config = config_of(twin.folder, tp=prefill_tp, page_size=page_size)
            prefill = stack.enter_context(thread_team(prefill_config, Phase.PREFILL, transfer, folder))
            decode_config = config_of(twin.folder, tp=decode_tp)
            decode = stack.enter_context(thread_team(decode_config, Phase.DECODE, transfer, folder))
            made = stack.enter_context(fleet(folder))
            made.add_prefill(prefill.served, chunk_size=32, transfer=transfer, followers=prefill.followers)
            made.add_decode(decode.served, decode.segment, transfer=transfer, followers=decode.followers)
            made.wait_for_all()
            asked = {f"len{len(prompt)}": prompt for prompt in prompts(LENGTHS, VOCAB, seed=7)}
            for request, prompt in asked.items():
                made.submit(request, prompt, greedy(NEW_TOKENS))
            made.finish()
            made.settle()
            assert made.loads["prefill-0"].handoffs == len(LENGTHS)
            for request, prompt in asked.items():
                assert_answer(made.answers[request], prompt, twin)
