"""The time step's floor is in transformers' full forward and not in its one-token step: the full forward holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

ZAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 68,
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
    "num_attention_heads": 4,
    "n_mamba_heads": 8,
    "mamba_d_state": 10,
    "adapter_rank": 6,
    "chunk_size": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
}


def _zamba2(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**ZAMBA | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "zamba2": _zamba2(),
    "zamba2-two-blocks-adapters-rope": _zamba2(
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        mamba_ngroups=4,
        add_bias_linear=True,
    ),
    # Where the embeddings are not tied, transformers does not tie the blocks either.
    "zamba2-untied": _zamba2(num_mem_blocks=2, use_shared_attention_adapter=True, tie_word_embeddings=False),
}
