from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

KIMI = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 68,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "linear_head_dim": 12,
    "linear_num_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _kimi(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**KIMI | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "kimi_linear": _kimi(),
    "kimi_linear-narrow-queries-groups": _kimi(
        q_lora_rank=16,
        attention_bias=True,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        norm_topk_prob=False,
        mlp_layer_types=["sparse", "dense", "sparse", "dense"],
    ),
}
