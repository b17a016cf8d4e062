from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from gateway.errors import BadRequest, StartError
from gateway.tokenizer import Defaults, Tokenizer
from tests.integration.gateway_fakes import write_model

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello <|im_end|> 🎉"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path)
    return tmp_path


def test_chat_equals_transformers_own_rendering(folder: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert asyncio.run(Tokenizer(folder).encode_chat(MESSAGES)) == expected


@pytest.mark.parametrize("repeats", [1, 3000], ids=["at once", "in a thread"])
def test_encodes_as_the_tokenizer_does(folder: Path, repeats: int) -> None:
    text = "hello world. " * repeats
    expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert asyncio.run(Tokenizer(folder).encode(text, "prompt")) == expected


def test_defaults_and_ends_come_from_the_model(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "top_k": 7, "eos_token_id": [0, 2]})
    )
    tokenizer = Tokenizer(folder)
    assert tokenizer.defaults == Defaults(1.0, 1.0, 7)
    assert tokenizer.eos_ids == (0, 2)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.2, "top_k": 7}))
    assert Tokenizer(folder).defaults == Defaults(1.0, 1.0, 0)
    (folder / "generation_config.json").unlink()
    assert Tokenizer(folder).eos_ids == (2,)


def test_text_config_counts(folder: Path) -> None:
    config = {"vocab_size": 1, "text_config": {"vocab_size": 400, "max_position_embeddings": 64, "eos_token_id": 3}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.max_context, tokenizer.eos_ids) == (400, 64, (2, 3))


def test_without_a_template_chat_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BadRequest, match="chat template"):
        asyncio.run(Tokenizer(folder).encode_chat(MESSAGES))


def test_folder_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StartError, match=r"tokenizer\.json"):
        Tokenizer(folder)


def test_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(StartError, match=r"config\.json"):
        Tokenizer(folder)


def test_torch_stays_out(folder: Path) -> None:
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nimport gateway.server\n"
        "from gateway.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer(Path({str(folder)!r}))\n"
        "asyncio.run(tokenizer.encode_chat([{'role': 'user', 'content': 'hi'}]))\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
