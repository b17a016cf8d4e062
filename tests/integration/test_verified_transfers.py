"""`--verify-transfers`: a bit that flips between the two pools is always caught, and named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from pools.sizing import Phase
from tests.fleet import Decoders, Fleet, config_of, fleet, greedy
from tests.landings import EVERY_MEDIUM
from tests.stretches import stretches
from tests.teams import thread_team
from tests.tiny import VOCAB, make_checkpoint
from transfer import route
from transfer.media import open_channel
from transfer.medium import Channel, never
from transfer.plan import Range
from transfer.reshard import Reshard
from wire.messages import AttemptId

PROMPT = [random.Random(5).randrange(VOCAB) for _ in range(37)]


class Weather:
    """Flips one bit of what the `strike`-th write moves; None for fair weather."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.strike: int | None = None
        self.writes = 0

    def open(
        self, medium: str, reach: str, context: zmq.Context[zmq.Socket[bytes]], source: torch.Tensor, reshard: Reshard
    ) -> Channel:
        on_the_way = source.clone()
        channel = open_channel(medium, reach, context, on_the_way, reshard)
        return ExposedChannel(channel, source.numpy(), on_the_way.numpy(), self)


class ExposedChannel:
    """Moves what is in `on_the_way`: at every write a fresh copy of `source` that the weather has been at."""

    def __init__(self, inner: Channel, source: np.ndarray, on_the_way: np.ndarray, weather: Weather) -> None:
        self.inner, self.source, self.on_the_way, self.weather = inner, source, on_the_way, weather

    def write(self, attempt: AttemptId, ranges: Sequence[Range], cancelled: Callable[[], bool] = never) -> None:
        self.on_the_way[:] = self.source
        if ranges and self.weather.writes == self.weather.strike:
            source, _, nbytes = self.weather.random.choice([piece for item in ranges for piece in stretches(item)])
            self.on_the_way[source + self.weather.random.randrange(nbytes)] ^= 1 << self.weather.random.randrange(8)
        self.weather.writes += bool(ranges)
        self.inner.write(attempt, ranges)
        self.inner.wait(attempt)  # the next write changes what this one moves

    def wait(self, attempt: AttemptId, cancelled: Callable[[], bool] = never) -> None:
        self.inner.wait(attempt, cancelled)

    def abandon(self, attempt: AttemptId) -> None:
        self.inner.abandon(attempt)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Weather:
    weather = Weather(seed=11)
    monkeypatch.setattr(route, "open_channel", weather.open)
    return weather


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_5_text", tmp_path_factory.mktemp("model"))


def strikes(made: Fleet, weather: Weather, count: int) -> list[str | None]:
    """What became of `count` requests, each of which lost a bit at another of its writes."""
    reports = []
    for number in range(count):
        weather.writes, weather.strike = 0, number % 4
        name = f"struck-{number}"
        made.submit(name, PROMPT, greedy(4))
        made.finish()
        made.settle()
        failed = made.answers[name].failed
        reports.append(failed.text if failed else None)
    weather.strike = None
    return reports


@pytest.mark.parametrize("transfer", EVERY_MEDIUM)
@pytest.mark.parametrize("page_size", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_caught_and_named(
    checkpoint: Path, weather: Weather, tmp_path: Path, transfer: str, page_size: int
) -> None:
    decoders = Decoders()
    with fleet(tmp_path) as made:
        served, _ = decoders.served(config_of(checkpoint), Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=16, transfer=transfer, verify=True)
        served, segment = decoders.served(config_of(checkpoint, page_size=page_size), Phase.DECODE, transfer == "shm")
        made.add_decode(served, segment, transfer=transfer, reuse=False)
        made.wait_for_all()
        made.submit("before", PROMPT, greedy(4))
        made.finish()
        reports = strikes(made, weather, 24)
        assert all(report is not None and "damaged on its way" in report for report in reports), reports
        assert any(("page" in str(report) and ", k" in str(report)) or ", v" in str(report) for report in reports)
        assert any("slot" in str(report) for report in reports)
        # It is counted, and nobody else suffers.
        made.turn_until(lambda: made.loads["decode-1"].damaged_handoffs == len(reports))
        made.submit("after", PROMPT, greedy(4))
        made.finish()
        assert made.answers["after"].token_ids == made.answers["before"].token_ids


def test_without_verification_nobody_would_know(checkpoint: Path, weather: Weather, tmp_path: Path) -> None:
    """That the weather is real."""
    decoders = Decoders()
    with fleet(tmp_path) as made:
        served, _ = decoders.served(config_of(checkpoint), Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=16, transfer="shm")
        served, segment = decoders.served(config_of(checkpoint), Phase.DECODE, shared=True)
        made.add_decode(served, segment, transfer="shm", reuse=False)
        made.wait_for_all()
        assert strikes(made, weather, 4) == [None] * 4


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)])
def test_every_rank_looks_at_its_own(
    checkpoint: Path, weather: Weather, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    with ExitStack() as stack:
        config = config_of(checkpoint, tp=sizes[0])
        prefill = stack.enter_context(thread_team(config, Phase.PREFILL, "tcp", tmp_path))
        config = config_of(checkpoint, tp=sizes[1])
        decode = stack.enter_context(thread_team(config, Phase.DECODE, "tcp", tmp_path))
        made = stack.enter_context(fleet(tmp_path))
        made.add_prefill(prefill.served, chunk_size=16, transfer="tcp", followers=prefill.followers, verify=True)
        made.add_decode(decode.served, decode.segment, transfer="tcp", followers=decode.followers, reuse=False)
        made.wait_for_all()
        made.submit("before", PROMPT, greedy(4))
        made.finish()
        assert made.answers["before"].failed is None
        reports = strikes(made, weather, 12)
        assert all(report is not None and "damaged on its way" in report for report in reports), reports
        assert sizes[1] == 1 or any("rank 1" in str(report) for report in reports)
