"""LFM2, dense and with experts: gated short convolutions with attention among them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import IGNORED, heads_of, layer_types
from models.families.family import Family
from models.manifest import Manifest, Names, Piece, Pieces, decoder_manifest
from models.parts.attention import Attention
from models.parts.basics import Norm, Part
from models.parts.feed_forward import Mlp, Moe, Router, Scoring
from models.parts.short_conv import ShortConv
from models.pieces import MlpNames, attention_pieces, expert_pieces, mlp_pieces, stretches
from models.rope import read_rope

NAMES = Names(norm="embedding_norm.weight", norms=("operator_norm.weight", "ffn_norm.weight"))
MLP_NAMES = MlpNames("w1", "w3", "w2")


def lfm2(config: Config) -> Architecture:
    """Defaults are those of `transformers.Lfm2Config`."""
    mlp = Mlp(_adjusted(config, config.integer("block_ff_dim", config.integer("intermediate_size", 12288))))
    return _architecture(config, "lfm2", 2560, [mlp] * config.integer("num_hidden_layers", 32))


def lfm2_moe(config: Config) -> Architecture:
    """Defaults are those of `transformers.Lfm2MoeConfig`."""
    dense, sparse = Mlp(config.integer("intermediate_size", 7168)), _moe(config)
    first_sparse = config.integer("num_dense_layers", 2, minimum=0)
    feed_forwards: list[Part] = [
        dense if index < first_sparse else sparse for index in range(config.integer("num_hidden_layers", 32))
    ]
    return _architecture(config, "lfm2_moe", 2048, feed_forwards)


def _adjusted(config: Config, size: int) -> int:
    """Two thirds, times a factor, rounded up to a multiple."""
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if config.null("block_ffn_dim_multiplier"):
        return size
    multiple = config.integer("block_multiple_of", 256)
    return -(-int(config.number("block_ffn_dim_multiplier", 1.0) * size) // multiple) * multiple


def _moe(config: Config) -> Moe:
    router = Router(
        experts=config.integer("num_experts", 32),
        per_token=config.integer("num_experts_per_tok", 4),
        scoring=Scoring.SIGMOID,
        renormalize=config.flag("norm_topk_prob", True),
        renormalize_eps=1e-6,
        choice_bias=config.flag("use_expert_bias", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )
    return Moe(router, Mlp(config.integer("moe_intermediate_size", 1792)))


def _architecture(config: Config, model_type: str, hidden: int, feed_forwards: Sequence[Part]) -> Architecture:
    hidden = config.integer("hidden_size", hidden)
    norm = Norm(config.number("norm_eps", 1e-5))
    max_positions = config.integer("max_position_embeddings", 128_000)
    mixers: dict[str, Part] = {
        "conv": ShortConv(hidden, config.integer("conv_L_cache", 3, minimum=2), config.flag("conv_bias", False)),
        "full_attention": _attention(config, hidden, norm, max_positions),
    }
    attention_layers = set(config.integers("full_attn_idxs", tuple(range(len(feed_forwards)))))

    def default(index: int) -> str:
        return "full_attention" if index in attention_layers else "conv"

    kinds = layer_types(config, mixers, default, len(feed_forwards))
    return Architecture(
        model_type=model_type,
        vocab_size=config.integer("vocab_size", 65536),
        hidden_size=hidden,
        max_context_tokens=max_positions,
        layers=tuple(
            Layer((Block(mixers[kind], norm), Block(feed_forward, norm)))
            for kind, feed_forward in zip(kinds, feed_forwards, strict=True)
        ),
        norm=norm,
        tied=config.flag("tie_embedding", config.flag("tie_word_embeddings", True)),
    )


def _attention(config: Config, hidden: int, norm: Norm, max_positions: int) -> Attention:
    heads, kv_heads, head_dim = heads_of(config, hidden=hidden, heads=32, kv_heads=8)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, max_positions, default_theta=1e6),
        qk_norm=norm,
    )


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published: `conv`, `self_attn` and `feed_forward` with w1, w2 and w3."""
    hidden = architecture.hidden_size

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body, feed_forward = architecture.layers[index].blocks[block].body, f"{disk}feed_forward."
        if isinstance(body, ShortConv):
            yield from _conv_pieces(body, hidden, ours, f"{disk}conv.")
        elif isinstance(body, Attention):
            yield from attention_pieces(body, hidden, ours, f"{disk}self_attn.", out="out_proj", norm="layernorm")
        elif isinstance(body, Mlp):
            yield from mlp_pieces(body, hidden, ours, feed_forward, MLP_NAMES)
        elif isinstance(body, Moe):
            yield from _moe_pieces(body, hidden, ours, feed_forward)

    return decoder_manifest(architecture, NAMES, layer)


def _conv_pieces(conv: ShortConv, hidden: int, ours: str, disk: str) -> Pieces:
    channels, thirds = conv.channels, [(conv.channels, conv.channels)] * 3
    shape = (channels, 1, conv.conv_width)
    yield f"{ours}input.weight", stretches(f"{disk}in_proj.weight", (3 * channels, hidden), thirds)
    yield f"{ours}conv.weight", (Piece(f"{disk}conv.weight", shape, units=channels),)
    yield f"{ours}out.weight", (Piece(f"{disk}out_proj.weight", (hidden, channels), units=channels, axis=1),)
    if conv.bias:
        yield f"{ours}input.bias", stretches(f"{disk}in_proj.bias", (3 * channels,), thirds)
        yield f"{ours}conv.bias", (Piece(f"{disk}conv.bias", (channels,), units=channels),)
        yield f"{ours}out.bias", (Piece(f"{disk}out_proj.bias", (hidden,)),)


def _moe_pieces(moe: Moe, hidden: int, ours: str, disk: str) -> Pieces:
    yield f"{ours}router.weight", (Piece(f"{disk}gate.weight", (moe.router.experts, hidden)),)
    if moe.router.choice_bias:
        yield f"{ours}choice_bias", (Piece(f"{disk}expert_bias", (moe.router.experts,)),)
    yield from expert_pieces(moe, hidden, ours, f"{disk}experts.", MLP_NAMES)


LFM2 = Family("lfm2", lfm2, manifest, IGNORED)
LFM2_MOE = Family("lfm2_moe", lfm2_moe, manifest, IGNORED)
