from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

BAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 68,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_indices": [1],
    "max_position_embeddings": 1024,
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
    "mamba_chunk_size": 32,
    "pad_token_id": None,
}


def _bamba(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.BambaForCausalLM(transformers.BambaConfig(**BAMBA | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "bamba": _bamba(),
    "bamba-groups-biases": _bamba(
        mamba_n_groups=4,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        attn_layer_indices=[0, 2],
    ),
}
