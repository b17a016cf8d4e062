"""Llama and the models that use its architecture: SmolLM2, TinyLlama, Yi, DeepSeek-Coder and many more."""

from __future__ import annotations

from collections.abc import Collection

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.family import Family
from models.manifest import Manifest, Names, Pieces, decoder_manifest
from models.parts.attention import Attention
from models.parts.basics import Norm
from models.parts.feed_forward import Mlp
from models.pieces import attention_pieces, mlp_pieces
from models.rope import read_rope


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.LlamaConfig`."""
    hidden = config.integer("hidden_size", 4096)
    heads = config.integer("num_attention_heads", 32)
    head_dim = config.integer("head_dim", hidden // heads)
    max_positions = config.integer("max_position_embeddings", 2048)
    config.one_of("hidden_act", "silu", "silu")
    norm = Norm(config.number("rms_norm_eps", 1e-6))
    bias = config.flag("attention_bias", False)
    attention = Attention(
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
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


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published: `model.layers.N.self_attn.q_proj.weight` and so on."""

    hidden = architecture.hidden_size

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body = architecture.layers[index].blocks[block].body
        if isinstance(body, Attention):
            return attention_pieces(body, hidden, ours, f"{disk}self_attn.")
        assert isinstance(body, Mlp)
        return mlp_pieces(body, hidden, ours, f"{disk}mlp.")

    return decoder_manifest(architecture, Names(), layer)


# Old checkpoints store the rotary frequencies, which follow from config.json.
LLAMA = Family("llama", architecture, manifest, ignored=r".*\.rotary_emb\.inv_freq")
