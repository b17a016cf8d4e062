"""Plays requests on a runner the way an engine would, and compares what comes out with transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from models.batch import Chunk
from models.decoder import Decoder
from models.runner import Runner
from pools.layout import PoolLayout
from pools.spec import DType
from pools.storage import Storage
from tests.models.zoo import Twin

CLOSE = 1e-3  # a top-2 margin below which rounding may decide
GARBAGE = 1_000_000_007


@dataclass
class Request:
    """A request and what the runner said about it: log-probabilities by position of the token they follow."""

    row: int
    chunk: int
    tokens: list[int]
    prompt: int
    done: int = 0
    heard: dict[int, torch.Tensor] = field(default_factory=dict)

    def next_chunk(self) -> Chunk:
        return Chunk(self.row, tuple(self.tokens[self.done : self.done + self.chunk]), self.done)

    def take(self, logits: torch.Tensor, chunk: Chunk) -> None:
        self.done = chunk.end
        self.heard[chunk.end - 1] = logits.log_softmax(-1)
        if chunk.end == len(self.tokens):
            self.tokens.append(int(logits.argmax()))


class Player:
    """A runner on poisoned pools, whose pages and slots are given out in random order."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        page_size: int,
        rows: int,
        max_tokens: int,
        dtype: DType = DType.FLOAT32,
        seed: int = 0,
    ) -> None:
        self._random = random.Random(seed)
        self._width = -(-max_tokens // page_size)
        spec = decoder.architecture.state_spec(dtype).of_rank(decoder.ranks.rank, decoder.ranks.size)
        slots = rows + 2 if spec.slots else 0
        layout = PoolLayout.of(spec, page_size=page_size, num_pages=rows * self._width + 3, num_slots=slots)
        self.storage = Storage(layout, num_rows=rows + 1, max_pages_per_request=self._width + 1, poison=True)
        self.storage.page_table.fill_(GARBAGE)
        self.storage.row_to_slot.fill_(GARBAGE if slots else 0)
        self.runner = Runner(decoder, self.storage)
        self._rows = rows

    def play(self, prompts: Sequence[list[int]], chunks: Sequence[int], *, new_tokens: int) -> list[Request]:
        """Serve all prompts, one entering each step, until each has `new_tokens` more. Frees all in the end."""
        layout = self.storage.layout
        rows = self._random.sample(range(self._rows + 1), len(prompts))
        pages = self._random.sample(range(layout.num_pages), layout.num_pages)
        slots = self._random.sample(range(layout.num_slots), layout.num_slots)
        requests = []
        for prompt, chunk, row in zip(prompts, chunks, rows, strict=True):
            request = Request(row, chunk, list(prompt), len(prompt))
            count = -(-(len(prompt) + new_tokens - 1) // layout.page_size)
            held_slots = [slots.pop()] if slots else []
            self.storage.bind(row, [pages.pop() for _ in range(count)], held_slots)
            self.storage.clear_slots(held_slots)
            requests.append(request)
        step = 0
        while active := [r for r in requests[: step + 1] if len(r.tokens) < r.prompt + new_tokens]:
            self._random.shuffle(active)
            batch = [request.next_chunk() for request in active]
            for request, chunk, logits in zip(active, batch, self.runner.forward(batch), strict=True):
                request.take(logits, chunk)
            step += 1
        self.storage.wipe(range(layout.num_pages), range(layout.num_slots))
        self.storage.page_table.fill_(GARBAGE)
        return requests


def assert_like(requests: Sequence[Request], twin: Twin, *, tolerance: float = 2e-3) -> None:
    """Greedy tokens and log-probabilities are those of the full forward pass, but where rounding may decide."""
    for request in requests:
        expected = twin.logprobs(request.tokens[:-1])
        assert len(request.heard) >= len(request.tokens) - request.prompt
        for position, heard in request.heard.items():
            torch.testing.assert_close(heard, expected[position], atol=tolerance, rtol=0)
            best, second = expected[position].topk(2)
            if best[0] - best[1] > CLOSE:
                assert heard.argmax() == second[0], f"another token after position {position}"


def prompts(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(vocab) for _ in range(length)] for length in lengths]
