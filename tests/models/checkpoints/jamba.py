"""transformers starts every chunk of several tokens but the first from zero: only its full forward is held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

JAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 60,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "mamba_d_state": 10,
    "mamba_dt_rank": 5,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
}


def _jamba(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.JambaForCausalLM(transformers.JambaConfig(**JAMBA | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "jamba": _jamba(),
    "jamba-dense-biases-tied": _jamba(
        num_experts=1,
        num_experts_per_tok=1,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
        mamba_dt_rank="auto",
    ),
}
