"""Tiny seeded checkpoints, made with transformers' own classes, and its full forward as the oracle."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

VOCAB = 131
"""Odd on purpose."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "num_hidden_layers": 4,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_COMMON, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "qwen3_5_text": ("Qwen3_5TextConfig", {**_COMMON, **_DELTA, "tie_word_embeddings": True}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_COMMON, **_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32, "mlp_only_layers": [1],
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_COMMON, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4,
            "num_experts_per_tok": 2, "shared_intermediate_size": 40, "mamba_n_heads": 8, "mamba_n_groups": 2,
            "mamba_d_state": 12, "mamba_expand": 2, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
            "embedding_multiplier": 3.0, "logits_scaling": 0.5,
        },
    ),
}  # fmt: skip


def make_checkpoint(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny model of `family`; weights are large enough for outputs that differ from token to token."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name, values = CONFIGS[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**values, **changes}))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            elif parameter_name.endswith(("dt_bias", "A_log")):
                parameter.uniform_(-2.0, 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@cache
def oracle(folder: Path) -> Any:
    """transformers' model in float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def oracle_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """(tokens, vocab) float32, by one full forward without a cache."""
    logits: torch.Tensor = oracle(folder)(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float()
