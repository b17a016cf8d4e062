"""Llama and the models that use its architecture: SmolLM2, TinyLlama, Yi, DeepSeek-Coder and many more."""

from __future__ import annotations

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import IGNORED, heads_of, plain_manifest
from models.families.family import Family
from models.parts.attention import Attention
from models.parts.basics import Norm
from models.parts.feed_forward import Mlp
from models.rope import read_rope


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.LlamaConfig`."""
    hidden = config.integer("hidden_size", 4096)
    heads, kv_heads, head_dim = heads_of(config, hidden=hidden, heads=32)
    max_positions = config.integer("max_position_embeddings", 2048)
    config.one_of("hidden_act", "silu", "silu")
    norm = Norm(config.number("rms_norm_eps", 1e-6))
    bias = config.flag("attention_bias", False)
    attention = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, max_positions),
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = Mlp(config.integer("intermediate_size", 11008), bias=config.flag("mlp_bias", False))
    layer = Layer((Block(attention, norm), Block(mlp, norm)))
    return Architecture(
        model_type="llama",
        vocab_size=config.integer("vocab_size", 32000),
        hidden_size=hidden,
        max_context_tokens=max_positions,
        layers=(layer,) * config.integer("num_hidden_layers", 32),
        norm=norm,
        tied=config.flag("tie_word_embeddings", False),
    )


LLAMA = Family("llama", architecture, plain_manifest, IGNORED)
