"""Jamba: Mamba layers with attention without positions among them; experts in every other layer."""

from __future__ import annotations

from collections.abc import Collection

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import IGNORED, heads_of
from models.families.family import Family
from models.families.mamba_fields import step_rank
from models.manifest import Manifest, Names, Piece, Pieces, decoder_manifest
from models.parts.attention import Attention
from models.parts.basics import Norm, Part
from models.parts.feed_forward import Mlp, Moe, Router
from models.parts.mamba1 import Mamba1
from models.pieces import attention_pieces, expert_pieces, mamba1_pieces, mlp_pieces

NAMES = Names(norm="final_layernorm.weight", norms=("input_layernorm.weight", "pre_ff_layernorm.weight"))


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.JambaConfig`."""
    config.one_of("hidden_act", "silu", "silu")
    hidden = config.integer("hidden_size", 4096)
    norm = Norm(config.number("rms_norm_eps", 1e-6))
    heads, kv_heads, head_dim = heads_of(config, hidden=hidden, heads=32, kv_heads=8)
    attention = Attention(heads, kv_heads, head_dim, scale=head_dim**-0.5, rope=None)
    mamba = _mamba(config, hidden, norm)
    attention_every, attention_at = _period(config, "attn_layer", 8, 4)
    experts_every, experts_at = _period(config, "expert_layer", 2, 1)
    dense, sparse = _feed_forwards(config)

    def layer(index: int) -> Layer:
        mixer: Part = attention if index % attention_every == attention_at else mamba
        return Layer((Block(mixer, norm), Block(sparse if index % experts_every == experts_at else dense, norm)))

    return Architecture(
        model_type="jamba",
        vocab_size=config.integer("vocab_size", 65536),
        hidden_size=hidden,
        max_context_tokens=config.integer("max_position_embeddings", 262144),
        layers=tuple(layer(index) for index in range(config.integer("num_hidden_layers", 32))),
        norm=norm,
        tied=config.flag("tie_word_embeddings", False),
    )


def _period(config: Config, what: str, period: int, offset: int) -> tuple[int, int]:
    period = config.integer(f"{what}_period", period)
    offset = config.integer(f"{what}_offset", offset, minimum=0)
    if offset >= period:
        config.refuse(f"{what}_offset", f"it must be below {what}_period ({period})")
    return period, offset


def _mamba(config: Config, hidden: int, norm: Norm) -> Mamba1:
    return Mamba1(
        channels=config.integer("mamba_expand", 2) * hidden,
        state=config.integer("mamba_d_state", 16),
        step_rank=step_rank(config, "mamba_dt_rank", hidden),
        conv_width=config.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
        norm=norm,
    )


def _feed_forwards(config: Config) -> tuple[Part, Part]:
    """Dense and sparse; with one expert both are dense."""
    mlp = Mlp(config.integer("intermediate_size", 14336))
    experts = config.integer("num_experts", config.integer("num_local_experts", 16))
    if experts == 1:
        return mlp, mlp
    return mlp, Moe(Router(experts, config.integer("num_experts_per_tok", 2), renormalize=False), mlp)


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published: `mamba`, `self_attn` and `feed_forward`, whose experts lie one by one."""
    hidden = architecture.hidden_size

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body, feed_forward = architecture.layers[index].blocks[block].body, f"{disk}feed_forward."
        if isinstance(body, Mamba1):
            norms = ("dt_layernorm", "b_layernorm", "c_layernorm")
            yield from mamba1_pieces(body, hidden, ours, f"{disk}mamba.", norms)
        elif isinstance(body, Attention):
            yield from attention_pieces(body, hidden, ours, f"{disk}self_attn.")
        elif isinstance(body, Mlp):
            yield from mlp_pieces(body, hidden, ours, feed_forward)
        elif isinstance(body, Moe):
            yield f"{ours}router.weight", (Piece(f"{feed_forward}router.weight", (body.router.experts, hidden)),)
            yield from expert_pieces(body, hidden, ours, f"{feed_forward}experts.")

    return decoder_manifest(architecture, NAMES, layer)


JAMBA = Family("jamba", architecture, manifest, IGNORED)
