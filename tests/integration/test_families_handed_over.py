"""Every family through a prefill worker, the hand-off and a decode worker, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pools.sizing import Phase
from tests.fleet import Answer, Decoders, config_of, fleet, greedy
from tests.models.player import CLOSE, prompts
from tests.models.zoo import MODELS, VOCAB, Twin, make

LENGTHS = (1, 3, 16, 17, 65, 200)
NEW_TOKENS = 24


# One back end after the other: they know nothing of families.
CASES = [(name, ("shm", "tcp")[number % 2]) for number, name in enumerate(MODELS)]


@pytest.mark.parametrize(("name", "transfer"), CASES)
def test_a_family_is_right_after_the_hand_off(name: str, transfer: str, tmp_path: Path) -> None:
    twin = make(name, tmp_path / "model")
    decoders = Decoders()
    with fleet(tmp_path) as made:
        served, _ = decoders.served(config_of(twin.folder, max_context_tokens=256), Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=32, transfer=transfer)
        # Another page size on the decode side.
        config = config_of(twin.folder, max_context_tokens=256, page_size=16)
        served, segment = decoders.served(config, Phase.DECODE, shared=transfer == "shm")
        made.add_decode(served, segment, transfer=transfer)
        made.wait_for_all()
        asked = {f"len{len(prompt)}": prompt for prompt in prompts(LENGTHS, VOCAB, seed=7)}
        for request, prompt in asked.items():
            made.submit(request, prompt, greedy(NEW_TOKENS))
        made.finish()
        made.settle()
        assert made.loads["prefill-0"].handoffs == len(LENGTHS)
        for request, prompt in asked.items():
            assert_answer(made.answers[request], prompt, twin)


def assert_answer(answer: Answer, prompt: list[int], twin: Twin) -> None:
    """Tokens and log-probabilities are those of one full forward pass, but where rounding may decide."""
    assert answer.failed is None
    assert len(answer.token_ids) == NEW_TOKENS
    expected = twin.logprobs(prompt + answer.token_ids[:-1])[len(prompt) - 1 :]
    for index, row in enumerate(expected):
        token = answer.tokens[index]
        best, second = row.topk(2).values.tolist()
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=2e-3)
        if best - second > CLOSE:
            assert token.token_id == int(row.argmax()), f"token {index} after {len(prompt)}"
