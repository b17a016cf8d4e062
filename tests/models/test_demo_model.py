"""The bundled demo model: what its card says of it is what the serving code computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from models.batch import Chunk
from models.serving import plan_worker
from pools.lease import Lease
from pools.pools import Pools
from pools.sizing import Phase
from tests.fleet import Decoders, config_of, fleet, greedy
from tests.tiny import oracle_logits

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
REPORT = json.loads((DEMO / "evaluation.json").read_text())
WINDOW = REPORT["window_tokens"]


@pytest.fixture(scope="module")
def held_out() -> list[int]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids: list[int] = tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8")).ids
    assert len(ids) == REPORT["heldout_tokens"]
    return ids


def test_it_is_small_and_plannable() -> None:
    assert sum(path.stat().st_size for path in DEMO.glob("*.safetensors")) < 8_000_000
    plan = plan_worker(config_of(DEMO), Phase.DECODE)
    assert plan.num_slots == plan.num_rows
    assert "README.md" in {path.name for path in DEMO.iterdir()}
    assert str(round(REPORT["loss_nats_per_token"], 2)) in (DEMO / "README.md").read_text()


def test_the_pools_and_decode_steps_reproduce_the_held_out_loss(held_out: list[int]) -> None:
    """Each window is a request that decodes the given text: token by token, all windows in a batch."""
    windows = [held_out[at : at + WINDOW] for at in range(0, len(held_out) - WINDOW + 1, WINDOW)]
    assert len(windows) == REPORT["windows"]
    config = config_of(DEMO, max_running_requests=len(windows), max_context_tokens=WINDOW, page_size=16)
    served, _ = Decoders().served(config, Phase.PREFILL, shared=False)
    runner, pools, storage = served.runner(), Pools.from_plan(served.plan), served.storage
    rows = []
    for index in range(len(windows)):
        lease = pools.reserve(f"window {index}", WINDOW)
        assert isinstance(lease, Lease)
        storage.bind(lease.row, lease.pages, lease.slots)
        storage.clear_slots(lease.slots)
        rows.append(lease.row)
    total = 0.0
    for position in range(WINDOW - 1):
        logits = runner.forward(
            [Chunk(row, (window[position],), position) for row, window in zip(rows, windows, strict=True)]
        )
        following = torch.tensor([window[position + 1] for window in windows])
        total += torch.nn.functional.cross_entropy(logits, following, reduction="sum").item()
    assert total / REPORT["predictions"] == pytest.approx(REPORT["loss_nats_per_token"], abs=2e-4)


def test_greedy_answers_through_a_hand_off_agree_with_transformers(held_out: list[int], tmp_path: Path) -> None:
    prompts = {f"at {at}": held_out[at : at + 40 + at % 37] for at in range(0, 4000, 500)}
    decoders = Decoders()
    with fleet(tmp_path) as made:
        served, _ = decoders.served(config_of(DEMO), Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=16, transfer="shm")
        served, segment = decoders.served(config_of(DEMO), Phase.DECODE, shared=True)
        made.add_decode(served, segment, transfer="shm")
        made.wait_for_all()
        for name, prompt in prompts.items():
            made.submit(name, prompt, greedy(24))
        made.finish()
        made.settle()
    compared = 0
    for name, prompt in prompts.items():
        answer = made.answers[name].token_ids
        logits = oracle_logits(DEMO, prompt + answer)[len(prompt) - 1 : -1]
        for token_id, row in zip(answer, logits, strict=True):
            best, second = row.topk(2).values.tolist()
            if best - second < 1e-3:
                break
            assert token_id == int(row.argmax()), name
            compared += 1
    assert compared > 0.9 * 24 * len(prompts)
