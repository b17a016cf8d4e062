from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

LFM2 = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "max_position_embeddings": 1024,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "num_dense_layers": 1}


def _lfm2(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**LFM2 | fields))


def _lfm2_moe(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**LFM2 | EXPERTS | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "lfm2": _lfm2(block_multiple_of=8),
    "lfm2-bias-untied": _lfm2(
        conv_bias=True, conv_L_cache=5, block_auto_adjust_ff_dim=False, tie_word_embeddings=False
    ),
    "lfm2_moe": _lfm2_moe(routed_scaling_factor=1.6),
    "lfm2_moe-plain-router": _lfm2_moe(use_expert_bias=False, norm_topk_prob=False, conv_bias=True),
}
