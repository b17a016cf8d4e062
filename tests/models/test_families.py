"""Every family against transformers: full forward passes in float32, without a cache."""

from __future__ import annotations

import pytest

from models.checkpoint import Checkpoint
from models.weights import load_decoder
from pools.spec import DType
from tests.models.player import Player, assert_like, prompts
from tests.models.zoo import MODELS, VOCAB, Zoo

LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 200, 700)
CHUNKS = (512, 1, 4, 32, 4, 512, 32, 1, 64, 512, 32, 128)
NEW_TOKENS = 24
# Other page sizes → (prompt length, chunk size) of requests that run together.
WAVES = {
    1: [(1, 1), (33, 4), (130, 32), (7, 512)],
    16: [(16, 512), (129, 4), (31, 32), (100, 512), (48, 1), (63, 32)],
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs_are_those_of_the_full_forward_pass(zoo: Zoo, name: str) -> None:
    """All lengths together, entering one by one, each with a chunk size of its own."""
    twin = zoo[name]
    decoder = load_decoder(Checkpoint.open(twin.folder), DType.FLOAT32)
    player = Player(decoder, page_size=8, rows=len(LENGTHS), max_tokens=max(LENGTHS) + NEW_TOKENS)
    assert_like(player.play(prompts(LENGTHS, VOCAB, seed=1), CHUNKS, new_tokens=NEW_TOKENS), twin)


@pytest.mark.parametrize("name", MODELS)
def test_page_sizes_and_freed_memory_do_not_matter(zoo: Zoo, name: str) -> None:
    twin = zoo[name]
    decoder = load_decoder(Checkpoint.open(twin.folder), DType.FLOAT32)
    for seed, (page_size, wave) in enumerate(WAVES.items()):
        player = Player(decoder, page_size=page_size, rows=len(wave), max_tokens=140, seed=seed)
        lengths, chunks = zip(*wave, strict=True)
        for repeat in range(2):  # the second time on freed, poisoned memory
            texts = prompts(lengths, VOCAB, seed=100 * seed + repeat)
            assert_like(player.play(texts, chunks, new_tokens=6), twin)


# Without experts: which of them a token takes may turn on rounding, in transformers as here.
@pytest.mark.parametrize("name", ["llama", "qwen3_next-dense", "qwen3_5_text", "granitemoehybrid-dense-rope"])
def test_bfloat16_stays_close(zoo: Zoo, name: str) -> None:
    twin = zoo[name]
    decoder = load_decoder(Checkpoint.open(twin.folder), DType.BFLOAT16)
    player = Player(decoder, page_size=8, rows=2, max_tokens=60, dtype=DType.BFLOAT16)
    requests = player.play(prompts([20, 40], VOCAB, seed=3), [32, 8], new_tokens=6)
    for request in requests:
        expected = twin.logprobs(request.tokens[:-1]).exp()
        for position, heard in request.heard.items():
            # Total variation: rounding moves some probability, a wrong model nearly all of it.
            assert (heard.exp() - expected[position]).abs().sum() / 2 < 0.25
