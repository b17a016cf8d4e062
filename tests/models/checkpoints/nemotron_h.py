"""The time step's floor is in transformers' full forward and not in its one-token step: the full forward holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

NEMOTRON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 1024,
    "intermediate_size": 68,
    "ssm_state_size": 10,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 1,
    "chunk_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 36,
    "pad_token_id": None,
}


def _nemotron(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**NEMOTRON | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "nemotron_h": _nemotron(layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"]),
    "nemotron_h-experts": _nemotron(routed_scaling_factor=1.7),
    "nemotron_h-latent-groups": _nemotron(
        moe_latent_size=20,
        n_groups=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
        time_step_min=0.3,
    ),
}
