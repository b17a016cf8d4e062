"""Bamba: Mamba2 layers with a few of attention among them, each followed by an MLP."""

from __future__ import annotations

from collections.abc import Collection

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import IGNORED, heads_of
from models.families.family import Family
from models.families.mamba_fields import mamba2_of
from models.manifest import Manifest, Names, Pieces, decoder_manifest
from models.parts.attention import Attention
from models.parts.basics import Norm, Part
from models.parts.feed_forward import Mlp
from models.parts.mamba2 import Mamba2
from models.pieces import attention_pieces, mamba2_pieces, mlp_pieces
from models.rope import read_rope

NAMES = Names(norm="final_layernorm.weight", norms=("input_layernorm.weight", "pre_ff_layernorm.weight"))
ROTATED = 0.5  # of a head, whatever the file says


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.BambaConfig`."""
    config.one_of("hidden_act", "silu", "silu")
    hidden = config.integer("hidden_size", 4096)
    norm = Norm(config.number("rms_norm_eps", 1e-5))
    max_positions = config.integer("max_position_embeddings", 262144)
    attention_layers = config.integers("attn_layer_indices", ())
    layers = config.integer("num_hidden_layers", 32)
    if unknown := [index for index in attention_layers if index not in range(layers)]:
        config.refuse("attn_layer_indices", f"layers are 0 to {layers - 1}, not {unknown}")
    attention, mamba = _attention(config, max_positions), mamba2_of(config, hidden, norm)
    bias = config.flag("mlp_bias", False)
    mlp = Block(Mlp(config.integer("intermediate_size", 14336), bias=bias), norm)

    def mixer(index: int) -> Part:
        return attention if index in attention_layers else mamba

    return Architecture(
        model_type="bamba",
        vocab_size=config.integer("vocab_size", 128000),
        hidden_size=hidden,
        max_context_tokens=max_positions,
        layers=tuple(Layer((Block(mixer(index), norm), mlp)) for index in range(layers)),
        norm=norm,
        tied=config.flag("tie_word_embeddings", False),
    )


def _attention(config: Config, max_positions: int) -> Attention:
    heads, kv_heads, head_dim = heads_of(config, hidden=4096, heads=32, kv_heads=8)
    bias = config.flag("attention_bias", False)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, max_positions, partial=ROTATED),
        qkv_bias=bias,
        out_bias=bias,
    )


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published: `mamba`, `self_attn` and `feed_forward`."""
    hidden = architecture.hidden_size

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body = architecture.layers[index].blocks[block].body
        if isinstance(body, Mlp):
            yield from mlp_pieces(body, hidden, ours, f"{disk}feed_forward.")
        elif isinstance(body, Mamba2):
            yield from mamba2_pieces(body, hidden, ours, f"{disk}mamba.")
        elif isinstance(body, Attention):
            yield from attention_pieces(body, hidden, ours, f"{disk}self_attn.")

    return decoder_manifest(architecture, NAMES, layer)


BAMBA = Family("bamba", architecture, manifest, IGNORED)
