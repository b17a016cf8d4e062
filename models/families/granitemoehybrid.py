"""Granite 4: Mamba2 and attention layers, with a shared MLP and in some sizes a mixture of experts beside it."""

from __future__ import annotations

from collections.abc import Collection

from models.architecture import Architecture, Attention, FeedForward, Layer, Mamba2, Mixer, Mlp, Moe, Norm
from models.config import Config
from models.errors import ConfigError
from models.families.family import Family
from models.manifest import Manifest, Names, Piece, Pieces, attention_pieces, decoder_manifest
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
    mixers: dict[str, Mixer] = {}
    if set(kinds) & set(MAMBA):
        mixers |= dict.fromkeys(MAMBA, _mamba(config, hidden, norm))
    if set(kinds) & set(ATTENTION):
        mixers |= dict.fromkeys(ATTENTION, _attention(config, hidden, max_positions))
    if unknown := set(kinds) - mixers.keys():
        raise ConfigError(f"layer_types has {sorted(unknown)}; implemented: {', '.join(MAMBA + ATTENTION)}")
    feed_forward = _feed_forward(config)
    return Architecture(
        model_type="granitemoehybrid",
        vocab_size=config.integer("vocab_size", 32000),
        hidden_size=hidden,
        max_context_tokens=max_positions,
        layers=tuple(Layer(mixers[kind], feed_forward) for kind in kinds),
        norm=norm,
        tied=config.flag("tie_word_embeddings", False),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_scaling=config.number("logits_scaling", 1.0),
    )


def _attention(config: Config, hidden: int, max_positions: int) -> Attention:
    heads = config.integer("num_attention_heads", 32)
    head_dim = config.integer("head_dim", hidden // heads)
    positions = config.one_of("position_embedding_type", None, None, "rope", "nope")
    return Attention(
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=config.number("attention_multiplier", 1.0),
        rope=read_rope(config, head_dim, max_positions) if positions == "rope" else None,
        bias=config.flag("attention_bias", False),
    )


def _mamba(config: Config, hidden: int, norm: Norm) -> Mamba2:
    channels = config.integer("mamba_expand", 2) * hidden
    heads = config.integer("mamba_n_heads", 128)
    head_dim = channels // heads
    if config.read("mamba_d_head", "auto") not in ("auto", head_dim) or heads * head_dim != channels:
        raise ConfigError(
            f"mamba_d_head is {config.read('mamba_d_head', 'auto')!r} with {heads} heads; "
            f"mamba_expand × hidden_size asks for {channels} channels"
        )
    limits = config.read("time_step_limit", (0.0, float("inf")))
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise ConfigError(f"time_step_limit is {limits!r}; it must be two numbers")
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        state=config.integer("mamba_d_state", 256),
        groups=config.integer("mamba_n_groups", 1),
        conv_width=config.integer("mamba_d_conv", 4, minimum=2),
        step_limits=(float(limits[0]), float(limits[1])),
        norm=norm,
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
    )


def _feed_forward(config: Config) -> FeedForward:
    shared = Mlp(config.integer("shared_intermediate_size", 1024))
    experts = config.integer("num_local_experts", 8, minimum=0)
    if not experts:
        return shared
    return Moe(
        experts=experts,
        per_token=config.integer("num_experts_per_tok", 2),
        intermediate=config.integer("intermediate_size", 11008),
        renormalize=True,
        shared=shared,
        shared_gate=False,
    )


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published; gate and up lie in one tensor `input_linear` there, experts in one of three dimensions."""
    hidden = architecture.hidden_size

    def layer(index: int, ours: str, disk: str) -> Pieces:
        mixer, feed_forward = architecture.layers[index].mixer, architecture.layers[index].feed_forward
        if isinstance(mixer, Mamba2):
            yield from _mamba_pieces(mixer, hidden, f"{ours}mixer.", f"{disk}mamba.")
        elif isinstance(mixer, Attention):
            yield from attention_pieces(mixer, hidden, f"{ours}mixer.", f"{disk}self_attn.")
        if isinstance(feed_forward, Moe):
            yield from _moe_pieces(feed_forward, hidden, f"{ours}feed_forward.", f"{disk}block_sparse_moe.")
            shared, ours_shared = feed_forward.shared, f"{ours}feed_forward.shared."
        else:
            shared, ours_shared = feed_forward, f"{ours}feed_forward."
        size, shared_disk = shared.intermediate, f"{disk}shared_mlp."
        yield f"{ours_shared}gate_up.weight", (Piece(f"{shared_disk}input_linear.weight", (2 * size, hidden)),)
        yield f"{ours_shared}down.weight", (Piece(f"{shared_disk}output_linear.weight", (hidden, size)),)

    return decoder_manifest(architecture, Names("model."), layer)


def _moe_pieces(moe: Moe, hidden: int, ours: str, disk: str) -> Pieces:
    experts, size = moe.experts, moe.intermediate
    yield f"{ours}router.weight", (Piece(f"{disk}router.layer.weight", (experts, hidden)),)
    yield f"{ours}gate_up", (Piece(f"{disk}input_linear.weight", (experts, 2 * size, hidden)),)
    yield f"{ours}down", (Piece(f"{disk}output_linear.weight", (experts, hidden, size)),)


def _mamba_pieces(mamba: Mamba2, hidden: int, ours: str, disk: str) -> Pieces:
    rows = mamba.channels + mamba.conv_channels + mamba.heads
    yield f"{ours}input.weight", (Piece(f"{disk}in_proj.weight", (rows, hidden)),)
    yield f"{ours}out.weight", (Piece(f"{disk}out_proj.weight", (hidden, mamba.channels)),)
    if mamba.bias:
        yield f"{ours}input.bias", (Piece(f"{disk}in_proj.bias", (rows,)),)
        yield f"{ours}out.bias", (Piece(f"{disk}out_proj.bias", (hidden,)),)
    yield f"{ours}conv.weight", (Piece(f"{disk}conv1d.weight", (mamba.conv_channels, 1, mamba.conv_width)),)
    if mamba.conv_bias:
        yield f"{ours}conv.bias", (Piece(f"{disk}conv1d.bias", (mamba.conv_channels,)),)
    for name, stored in {"log_rate": "A_log", "step_bias": "dt_bias", "skip": "D"}.items():
        yield f"{ours}{name}", (Piece(f"{disk}{stored}", (mamba.heads,)),)
    yield f"{ours}norm_weight", (Piece(f"{disk}norm.weight", (mamba.channels,)),)


GRANITEMOEHYBRID = Family("granitemoehybrid", architecture, manifest, ignored=r".*\.rotary_emb\.inv_freq")
