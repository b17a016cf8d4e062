"""Granite 4: Mamba2 and attention layers, with a shared MLP and in some sizes a mixture of experts beside it."""

from __future__ import annotations

from collections.abc import Collection

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.errors import ConfigError
from models.families.family import Family
from models.families.mamba_fields import mamba2_of
from models.manifest import Manifest, Names, Piece, Pieces, decoder_manifest
from models.parts.attention import Attention
from models.parts.basics import Norm, Part
from models.parts.feed_forward import Mlp, Moe, Router
from models.parts.mamba2 import Mamba2
from models.pieces import attention_pieces, mamba2_pieces
from models.rope import read_rope

MAMBA = ("linear_attention", "mamba")  # transformers 5 and earlier files
ATTENTION = ("full_attention", "attention")


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.GraniteMoeHybridConfig`."""
    hidden = config.integer("hidden_size", 4096)
    norm = Norm(config.number("rms_norm_eps", 1e-6))
    max_positions = config.integer("max_position_embeddings", 2048)
    config.one_of("hidden_act", "silu", "silu")
    kinds = config.strings("layer_types", config.strings("layers_block_type", ()))
    layers = config.integer("num_hidden_layers", 32)
    kinds = kinds or MAMBA[:1] * layers
    if len(kinds) != layers:
        raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
    mixers: dict[str, Part] = {}
    if set(kinds) & set(MAMBA):
        mixers |= dict.fromkeys(MAMBA, mamba2_of(config, hidden, norm))
    if set(kinds) & set(ATTENTION):
        mixers |= dict.fromkeys(ATTENTION, _attention(config, hidden, max_positions))
    if unknown := set(kinds) - mixers.keys():
        raise ConfigError(f"layer_types has {sorted(unknown)}; implemented: {', '.join(MAMBA + ATTENTION)}")
    multiplier = config.number("residual_multiplier", 1.0)
    feed_forward = Block(_feed_forward(config), norm, multiplier=multiplier)
    return Architecture(
        model_type="granitemoehybrid",
        vocab_size=config.integer("vocab_size", 32000),
        hidden_size=hidden,
        max_context_tokens=max_positions,
        layers=tuple(Layer((Block(mixers[kind], norm, multiplier=multiplier), feed_forward)) for kind in kinds),
        norm=norm,
        tied=config.flag("tie_word_embeddings", False),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logits_scaling=config.number("logits_scaling", 1.0),
    )


def _attention(config: Config, hidden: int, max_positions: int) -> Attention:
    heads = config.integer("num_attention_heads", 32)
    head_dim = config.integer("head_dim", hidden // heads)
    bias = config.flag("attention_bias", False)
    positions = config.one_of("position_embedding_type", None, None, "rope", "nope")
    return Attention(
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=config.number("attention_multiplier", 1.0),
        rope=read_rope(config, head_dim, max_positions) if positions == "rope" else None,
        qkv_bias=bias,
        out_bias=bias,
    )


def _feed_forward(config: Config) -> Part:
    shared = Mlp(config.integer("shared_intermediate_size", 1024))
    experts = config.integer("num_local_experts", 8, minimum=0)
    if not experts:
        return shared
    router = Router(experts, config.integer("num_experts_per_tok", 2))
    return Moe(router, Mlp(config.integer("intermediate_size", 11008)), shared)


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published; gate and up lie in one tensor `input_linear` there, experts in one of three dimensions."""
    hidden = architecture.hidden_size

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body = architecture.layers[index].blocks[block].body
        if isinstance(body, Mamba2):
            yield from mamba2_pieces(body, hidden, ours, f"{disk}mamba.")
        elif isinstance(body, Attention):
            yield from attention_pieces(body, hidden, ours, f"{disk}self_attn.")
        elif isinstance(body, Mlp):
            yield from _mlp_pieces(body, hidden, ours, f"{disk}shared_mlp.")
        elif isinstance(body, Moe):
            yield from _moe_pieces(body, hidden, ours, f"{disk}block_sparse_moe.")
            if body.shared:
                yield from _mlp_pieces(body.shared, hidden, f"{ours}shared.", f"{disk}shared_mlp.")

    return decoder_manifest(architecture, Names(), layer)


def _mlp_pieces(mlp: Mlp, hidden: int, ours: str, disk: str) -> Pieces:
    size, name = mlp.intermediate, f"{disk}input_linear.weight"
    gate, up = (
        Piece(name, (2 * size, hidden), units=size, begin=begin, end=begin + size) for begin in (0, size)
    )  # fmt: skip
    yield f"{ours}up.weight", (gate, up)
    yield f"{ours}down.weight", (Piece(f"{disk}output_linear.weight", (hidden, size), units=size, axis=1),)


def _moe_pieces(moe: Moe, hidden: int, ours: str, disk: str) -> Pieces:
    experts, size = moe.router.experts, moe.expert.intermediate
    yield f"{ours}router.weight", (Piece(f"{disk}router.layer.weight", (experts, hidden)),)
    yield f"{ours}up", (Piece(f"{disk}input_linear.weight", (experts, 2 * size, hidden), units=experts),)
    yield f"{ours}down", (Piece(f"{disk}output_linear.weight", (experts, hidden, size), units=experts),)


GRANITEMOEHYBRID = Family("granitemoehybrid", architecture, manifest, ignored=r".*\.rotary_emb\.inv_freq")
