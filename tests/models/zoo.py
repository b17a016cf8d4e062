"""Tiny checkpoints of every family, written by transformers itself, with weights that give logits real margins."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 131

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
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
GRANITE = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "shared_intermediate_size": 52,
    "mamba_n_heads": 12,
    "mamba_d_state": 20,
    "mamba_chunk_size": 32,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.35,
    "logits_scaling": 1.5,
    "pad_token_id": None,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def _rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **parameters}}


def _llama(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | fields))


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


def _granite(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**GRANITE | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama(),
    "llama-bias-tied-llama3": _llama(
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-linear": _llama(num_key_value_heads=6, **_rope("linear", factor=2.5)),
    "llama-yarn": _llama(**_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "qwen3_next": _qwen3_next(),
    "qwen3_next-some-dense": _qwen3_next(
        mlp_only_layers=[1], decoder_sparse_step=2, norm_topk_prob=False, tie_word_embeddings=True
    ),
    "qwen3_next-dense": _qwen3_next(num_experts=0, attention_bias=True),
    "qwen3_5_text": _qwen3_5(tie_word_embeddings=True),
    "qwen3_5": _qwen3_5_multimodal(tied=False),
    "qwen3_5-tied": _qwen3_5_multimodal(tied=True),
    "qwen3_5_moe_text": _qwen3_5_moe(),
    "granitemoehybrid": _granite(num_local_experts=6, num_experts_per_tok=2, intermediate_size=28),
    "granitemoehybrid-dense-rope": _granite(
        num_local_experts=0,
        mamba_n_groups=4,
        position_embedding_type="rope",
        mamba_proj_bias=True,
        attention_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
        time_step_limit=[0.05, 0.8],
    ),
}


@dataclass(frozen=True)
class Twin:
    """A checkpoint folder and the transformers model that wrote it, in float32."""

    folder: Path
    model: Any

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """(T, vocab): one full forward pass without a cache, the oracle."""
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Zoo:
    """Makes each twin once."""

    root: Path

    @cached_property
    def _made(self) -> dict[str, Twin]:
        return {}

    def __getitem__(self, name: str) -> Twin:
        if name not in self._made:
            self._made[name] = make(name, self.root / name)
        return self._made[name]


def make(name: str, folder: Path) -> Twin:
    torch.manual_seed(20 + list(MODELS).index(name))
    model = MODELS[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        _fill(parameter_name, parameter.data)
    model.save_pretrained(folder)
    return Twin(folder, model)


@torch.no_grad()
def _fill(name: str, weight: torch.Tensor) -> None:
    """Weights under which every part of the model matters to the logits."""
    if name.endswith("A_log"):
        weight.uniform_(math.log(0.05), math.log(2.0))
    elif name.endswith("dt_bias"):
        weight.uniform_(-3.0, 0.5)
    elif name.endswith("lm_head.weight") or name.endswith("embed_tokens.weight"):
        weight.normal_(0, 3.0 * weight.shape[-1] ** -0.5)
    elif "conv1d" in name:
        weight.normal_(0, 0.6)
    elif name.endswith("bias"):
        weight.normal_(0, 0.3)
    elif weight.dim() == 1:  # norms, around their default; the skip of Mamba2
        weight.add_(torch.randn_like(weight) * 0.3)
    else:
        weight.normal_(0, 1.2 * weight.shape[-1] ** -0.5)
