from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB, rope

MISTRAL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 92,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def _mistral(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**MISTRAL | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "mistral": _mistral(sliding_window=21, head_dim=20),
    "mistral-no-window-tied": _mistral(sliding_window=None, tie_word_embeddings=True),
    "mistral-dynamic": _mistral(sliding_window=64, num_key_value_heads=4, **rope("dynamic", factor=2.0)),
}
