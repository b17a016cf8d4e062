"""Mistral 7B and its kin: Llama with a sliding window over all layers, or without."""

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
    """Defaults are those of `transformers.MistralConfig`; a window that is null means none."""
    heads, kv_heads, head_dim = heads_of(config, hidden=4096, heads=32, kv_heads=8)
    max_positions = config.integer("max_position_embeddings", 131072)
    config.one_of("hidden_act", "silu", "silu")
    norm = Norm(config.number("rms_norm_eps", 1e-6))
    attention = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, max_positions),
        window=config.optional_integer("sliding_window", 4096),
    )
    layer = Layer((Block(attention, norm), Block(Mlp(config.integer("intermediate_size", 14336)), norm)))
    return Architecture(
        model_type="mistral",
        vocab_size=config.integer("vocab_size", 32000),
        hidden_size=config.integer("hidden_size", 4096),
        max_context_tokens=max_positions,
        layers=(layer,) * config.integer("num_hidden_layers", 32),
        norm=norm,
        tied=config.flag("tie_word_embeddings", False),
    )


MISTRAL = Family("mistral", architecture, plain_manifest, IGNORED)
