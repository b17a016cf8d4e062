from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

QWEN = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def _qwen3_next(**fields: Any) -> Callable[[], Any]:
    config = QWEN | EXPERTS | {"intermediate_size": 48} | fields
    return lambda: transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**config))


def _qwen3_5(**fields: Any) -> Callable[[], Any]:
    config = QWEN | {"intermediate_size": 48} | fields
    return lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**config))


def _qwen3_5_multimodal(*, tied: bool) -> Callable[[], Any]:
    config = {"text_config": QWEN | {"intermediate_size": 48}, "vision_config": QWEN_VISION}
    config["tie_word_embeddings"] = tied  # type: ignore[assignment]
    return lambda: transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(**config))


def _qwen3_5_moe(**fields: Any) -> Callable[[], Any]:
    config = QWEN | EXPERTS | fields
    return lambda: transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**config))


def _qwen3_5_moe_multimodal() -> Any:
    text = QWEN | EXPERTS | {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=QWEN_VISION, tie_word_embeddings=True)
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_next": _qwen3_next(),
    "qwen3_next-some-dense": _qwen3_next(
        mlp_only_layers=[1], decoder_sparse_step=2, norm_topk_prob=False, tie_word_embeddings=True
    ),
    "qwen3_next-dense": _qwen3_next(num_experts=0, attention_bias=True),
    # One key head and one K/V head, which several ranks must hold copies of.
    "qwen3_next-one-key-head": _qwen3_next(
        num_experts=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        linear_num_key_heads=1,
        linear_num_value_heads=4,
    ),
    "qwen3_5_text": _qwen3_5(tie_word_embeddings=True),
    "qwen3_5": _qwen3_5_multimodal(tied=False),
    "qwen3_5-tied": _qwen3_5_multimodal(tied=True),
    "qwen3_5_moe_text": _qwen3_5_moe(),
    "qwen3_5_moe": _qwen3_5_moe_multimodal,
}
