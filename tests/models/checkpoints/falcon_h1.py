from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 68,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "mamba_d_ssm": 72,
    "mamba_n_heads": 12,
    "mamba_d_state": 10,
    "mamba_chunk_size": 32,
    "pad_token_id": None,
}


def _falcon(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**FALCON | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "falcon_h1": _falcon(
        embedding_multiplier=2.5,
        lm_head_multiplier=0.6,
        key_multiplier=0.7,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.9,
        ssm_multipliers=[0.8, 1.3, 0.7, 1.4, 0.9],
        mlp_multipliers=[1.2, 0.7],
    ),
    "falcon_h1-normed-groups": _falcon(
        mamba_rms_norm=True, mamba_n_groups=4, mamba_d_ssm=None, attention_bias=True, projectors_bias=True
    ),
    "falcon_h1-normed-after-gate": _falcon(
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_proj_bias=True,
        mlp_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
    ),
}
