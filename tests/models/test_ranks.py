"""Tensor parallelism: the same tokens at any size, and every weight on the rank that needs it."""

from __future__ import annotations

import pytest

from models.checkpoint import Checkpoint
from models.errors import ConfigError
from models.layers.ranks import Ranks
from models.weights import load_decoder
from pools.spec import DType
from tests.models.player import Player, assert_like, prompts
from tests.models.threads import on_ranks
from tests.models.zoo import MODELS, VOCAB, Zoo

SIZES = (2, 3, 4)
WAVE = [(1, 1), (33, 4), (70, 32), (7, 512)]


def unfit(checkpoint: Checkpoint, size: int) -> str | None:
    try:
        checkpoint.architecture.check_ranks(size)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", MODELS)
def test_ranks_together_compute_the_full_forward_pass(zoo: Zoo, name: str) -> None:
    twin = zoo[name]
    checkpoint = Checkpoint.open(twin.folder)
    sizes = [size for size in SIZES if unfit(checkpoint, size) is None]
    assert sizes, "no checkpoint of the zoo may be unfit for all sizes"
    lengths, chunks = zip(*WAVE, strict=True)

    for size in sizes:

        def play(ranks: Ranks) -> list[list[int]]:
            decoder = load_decoder(checkpoint, DType.FLOAT32, ranks=ranks)
            player = Player(decoder, page_size=8, rows=len(WAVE), max_tokens=90)
            requests = player.play(prompts(lengths, VOCAB, seed=5), chunks, new_tokens=6)
            assert_like(requests, twin)
            return [request.tokens for request in requests]

        tokens = on_ranks(size, play)
        assert all(of_rank == tokens[0] for of_rank in tokens)


@pytest.mark.parametrize("name", MODELS)
def test_a_size_is_refused_by_the_name_of_what_cannot_be_split(zoo: Zoo, name: str) -> None:
    checkpoint = Checkpoint.open(zoo[name].folder)
    refusal = unfit(checkpoint, 97)
    assert refusal is not None
    assert "97 tensor-parallel ranks" in refusal


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", SIZES)
def test_ranks_take_every_stored_element(zoo: Zoo, name: str, size: int) -> None:
    """And what is not replicated, once."""
    checkpoint = Checkpoint.open(zoo[name].folder)
    if unfit(checkpoint, size):
        return
    for parameter, pieces in checkpoint.manifest.items():
        for piece in pieces:
            whole = [position for span in piece.spans(0, 1) for position in span]
            parts = [[p for span in piece.spans(rank, size) for p in span] for rank in range(size)]
            taken = [position for part in parts for position in part]
            units = piece.member[1] if piece.member else piece.units
            if units >= size or piece.uneven:
                assert taken == whole, (parameter, piece)
            else:
                assert set(taken) == set(whole), (parameter, piece)
    total = sum(checkpoint.weight_bytes(DType.FLOAT32, rank, size) for rank in range(size))
    assert total >= checkpoint.weight_bytes(DType.FLOAT32)
