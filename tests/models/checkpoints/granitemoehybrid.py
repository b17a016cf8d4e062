from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

GRANITE = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "shared_intermediate_size": 52,
    "mamba_n_heads": 12,
    "mamba_d_state": 20,
    "mamba_chunk_size": 32,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.35,
    "logits_scaling": 1.5,
    "pad_token_id": None,
}


def _granite(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**GRANITE | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "granitemoehybrid": _granite(num_local_experts=6, num_experts_per_tok=2, intermediate_size=28),
    "granitemoehybrid-dense-rope": _granite(
        num_local_experts=0,
        mamba_n_groups=4,
        position_embedding_type="rope",
        mamba_proj_bias=True,
        attention_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
        time_step_limit=[0.05, 0.8],
    ),
}
