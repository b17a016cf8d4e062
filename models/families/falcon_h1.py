"""Falcon-H1: attention and Mamba2 side by side in every layer, and a constant factor at every turn (muP)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import IGNORED, heads_of
from models.families.family import Family
from models.families.mamba_fields import mamba2_of
from models.manifest import Manifest, Names, Pieces, decoder_manifest
from models.parts.attention import Attention
from models.parts.basics import Norm
from models.parts.feed_forward import Mlp
from models.parts.mamba2 import Mamba2
from models.parts.parallel import Branch, Parallel
from models.pieces import attention_pieces, mamba2_pieces, mlp_pieces
from models.rope import read_rope

NAMES = Names(norm="final_layernorm.weight", norms=("input_layernorm.weight", "pre_ff_layernorm.weight"))


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.FalconH1Config`."""
    config.one_of("hidden_act", "silu", "silu")
    norm = Norm(config.number("rms_norm_eps", 1e-5))
    max_positions = config.integer("max_position_embeddings", 8192)
    mixer = Parallel(
        (
            Branch(
                _mamba(config, norm),
                config.number("ssm_in_multiplier", 1.0),
                config.number("ssm_out_multiplier", 1.0),
            ),
            Branch(
                _attention(config, max_positions),
                config.number("attention_in_multiplier", 1.0),
                config.number("attention_out_multiplier", 1.0),
            ),
        )
    )
    gate, down = config.numbers("mlp_multipliers", (1.0, 1.0))
    bias = config.flag("mlp_bias", False)
    mlp = Mlp(config.integer("intermediate_size", 14336), bias=bias, gate_multiplier=gate)
    layer = Layer((Block(mixer, norm), Block(mlp, norm, multiplier=down)))
    return Architecture(
        model_type="falcon_h1",
        vocab_size=config.integer("vocab_size", 128000),
        hidden_size=config.integer("hidden_size", 4096),
        max_context_tokens=max_positions,
        layers=(layer,) * config.integer("num_hidden_layers", 32),
        norm=norm,
        tied=config.flag("tie_word_embeddings", False),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logits_scaling=1.0 / config.number("lm_head_multiplier", 1.0),
    )


def _attention(config: Config, max_positions: int) -> Attention:
    heads, kv_heads, head_dim = heads_of(config, hidden=4096, heads=32, kv_heads=8)
    bias = config.flag("attention_bias", False)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        # The factor on the keys comes out of the scores.
        scale=head_dim**-0.5 * config.number("key_multiplier", 1.0),
        rope=read_rope(config, head_dim, max_positions),
        qkv_bias=bias,
        out_bias=bias,
    )


def _mamba(config: Config, norm: Norm) -> Mamba2:
    channels = None if config.null("mamba_d_ssm") else config.integer("mamba_d_ssm", 1024)
    normed = norm if config.flag("mamba_rms_norm", False) else None
    gate, x, b, c, step = config.numbers("ssm_multipliers", (1.0,) * 5)
    return replace(
        mamba2_of(config, config.integer("hidden_size", 4096), normed, channels),
        out_bias=config.flag("projectors_bias", False),
        norm_before_gate=config.flag("mamba_norm_before_gate", True),
        multipliers=(gate, x, b, c, step),
    )


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published: `mamba`, `self_attn` and `feed_forward`."""
    hidden = architecture.hidden_size

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body = architecture.layers[index].blocks[block].body
        if isinstance(body, Mlp):
            yield from mlp_pieces(body, hidden, ours, f"{disk}feed_forward.")
        elif isinstance(body, Parallel):
            for number, branch in enumerate(body.branches):
                if isinstance(branch.body, Mamba2):
                    yield from mamba2_pieces(branch.body, hidden, f"{ours}branches.{number}.", f"{disk}mamba.")
                elif isinstance(branch.body, Attention):
                    yield from attention_pieces(branch.body, hidden, f"{ours}branches.{number}.", f"{disk}self_attn.")

    return decoder_manifest(architecture, NAMES, layer)


FALCON_H1 = Family("falcon_h1", architecture, manifest, IGNORED)
