from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

GEMMA = {
    "vocab_size": VOCAB,
    "hidden_size": 56,
    "intermediate_size": 84,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 18,
    "max_position_embeddings": 1024,
    "query_pre_attn_scalar": 12,
    "sliding_window": 19,
    "pad_token_id": None,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}


def _gemma3(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GEMMA | fields))


def _multimodal() -> Any:
    config = transformers.Gemma3Config(text_config=GEMMA, vision_config=VISION, image_token_index=VOCAB - 1)
    return transformers.Gemma3ForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "gemma3_text": _gemma3(
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    ),
    "gemma3_text-capped-untied": _gemma3(
        final_logit_softcapping=9.0,
        attention_bias=True,
        tie_word_embeddings=False,
        num_key_value_heads=4,
        layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2_000.0},
        },
    ),
    "gemma3": _multimodal,
}
