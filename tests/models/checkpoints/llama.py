from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB, rope

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def _llama(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama(),
    "llama-bias-tied-llama3": _llama(
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-linear": _llama(num_key_value_heads=6, **rope("linear", factor=2.5)),
    "llama-yarn": _llama(**rope("yarn", factor=4.0, original_max_position_embeddings=64)),
}
