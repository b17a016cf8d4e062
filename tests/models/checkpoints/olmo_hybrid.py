"""Value heads of 24: with 18, transformers' own float32 is 1.7e-3 off its float64 where a query meets its key at a
right angle and the output norm blows what little is left up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

OLMO = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 68,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "eos_token_id": None,
}


def _olmo(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**OLMO | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "olmo_hybrid": _olmo(linear_value_head_dim=24),
    "olmo_hybrid-no-positions": _olmo(
        rope_parameters={"rope_type": "default", "rope_theta": None},
        num_key_value_heads=2,
        attention_bias=True,
        linear_allow_neg_eigval=False,
        linear_num_key_heads=2,
        linear_value_head_dim=10,
        tie_word_embeddings=True,
    ),
}
