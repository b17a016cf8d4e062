from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB, rope

QWEN = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "head_dim": 20}


def _qwen2(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**QWEN | fields))


def _qwen3(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN | {"head_dim": 16} | fields))


def _qwen3_moe(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN | EXPERTS | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": _qwen2(),
    "qwen2-window-tied": _qwen2(
        use_sliding_window=True, sliding_window=17, max_window_layers=2, tie_word_embeddings=True
    ),
    "qwen2-yarn": _qwen2(**rope("yarn", factor=4.0, original_max_position_embeddings=256)),
    "qwen3": _qwen3(num_key_value_heads=1),
    "qwen3-bias-layer-types": _qwen3(
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=30,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "qwen3_moe": _qwen3_moe(),
    "qwen3_moe-some-dense": _qwen3_moe(
        norm_topk_prob=True,
        mlp_only_layers=[2],
        decoder_sparse_step=2,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=40,
    ),
}
