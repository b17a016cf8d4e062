"""Control messages between prefill and decode that are lost, repeated or late: every answer is right all the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from decode import worker as decode_worker
from pools.sizing import Phase
from prefill import peers as prefill_peers
from prefill import request as prefill_request
from tests.fleet import Decoders, assert_equal, config_of, fleet, greedy
from tests.landings import EVERY_MEDIUM
from tests.proxy import MessageProxy, seeded_fate
from tests.tiny import VOCAB, make_checkpoint
from wire.messages import Role

PROMPTS = [[random.Random(seed).randrange(VOCAB) for _ in range(3 + 7 * seed)] for seed in range(12)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_5_text", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("transfer", EVERY_MEDIUM)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_lost_repeated_and_late_messages_change_nothing(
    checkpoint: Path, tmp_path: Path, transfer: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_request, "SAY_AGAIN_S", 0.1)
    monkeypatch.setattr(prefill_peers, "GREET_AGAIN_S", 0.1)
    monkeypatch.setattr(decode_worker, "_SAY_AGAIN_S", 0.1)
    decoders = Decoders()
    with fleet(tmp_path) as made:
        served, _ = decoders.served(config_of(checkpoint), Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=16, transfer=transfer, verify=True)
        served, segment = decoders.served(config_of(checkpoint), Phase.DECODE, transfer == "shm")
        made.add_decode(served, segment, transfer=transfer, reuse=False)
        made.wait_for_all()
        endpoint = made.of(Role.DECODE)[0].peer_endpoint
        proxy = MessageProxy(endpoint, seeded_fate(seed, bad=0.4))
        made.detours[endpoint] = proxy.endpoint
        for number, prompt in enumerate(PROMPTS):
            made.submit(f"r{number}", prompt, greedy(4))
            if number % 4 == 3:
                made.submit(f"gone{number}", prompt, greedy(100))
                for _ in range(number):
                    made.turn()
                made.cancel(f"gone{number}")
        names = [f"r{number}" for number in range(len(PROMPTS))]
        made.finish(*names)
        made.settle()
        assert proxy.accidents > 10
        stormy = {name: made.answers[name] for name in names}
        made.detours.clear()
        proxy.close()
    calm_folder = tmp_path / "calm"
    calm_folder.mkdir()
    with fleet(calm_folder) as made:
        made.add_colocated(decoders.served(config_of(checkpoint), Phase.COLOCATED, shared=False)[0], chunk_size=16)
        made.wait_for_all()
        for number, prompt in enumerate(PROMPTS):
            made.submit(f"r{number}", prompt, greedy(4))
        made.finish()
        assert_equal(stormy, made.answers)
