"""Qwen3-Next and Qwen3.5 (dense and MoE): Gated DeltaNet layers and gated attention layers.

The generations differ in how the Gated DeltaNet's input projection lies on disk and in which layers are sparse.
Qwen3.5 is published with a vision tower; the text decoder is read from `text_config` and `model.language_model.*`.
"""

from __future__ import annotations

from collections.abc import Collection

from models.architecture import Architecture, Attention, FeedForward, GatedDelta, Layer, Mixer, Mlp, Moe, Norm
from models.config import Config
from models.errors import ConfigError
from models.families.family import Family
from models.manifest import Manifest, Names, Piece, Pieces, attention_pieces, decoder_manifest, mlp_pieces
from models.rope import read_rope

IGNORED = r"mtp\..*|model\.visual\..*"  # draft layers and the vision tower


def qwen3_next(config: Config) -> Architecture:
    """Defaults are those of `transformers.Qwen3NextConfig`."""
    dense = Mlp(config.integer("intermediate_size", 5632))
    sparse_step = config.integer("decoder_sparse_step", 1)
    dense_layers = set(config.integers("mlp_only_layers", ()))
    sparse = None
    if config.integer("num_experts", 512, minimum=0):
        sparse = _moe(config, experts=512, per_token=10, renormalize=config.flag("norm_topk_prob", True))

    def feed_forward(index: int) -> FeedForward:
        return dense if sparse is None or index in dense_layers or (index + 1) % sparse_step else sparse

    layers = config.integer("num_hidden_layers", 48)
    vocab, hidden, kv_heads = 151936, 2048, 2
    return _architecture(config, "qwen3_next", vocab, hidden, kv_heads, [feed_forward(i) for i in range(layers)])


def qwen3_5(config: Config) -> Architecture:
    """Defaults are those of `transformers.Qwen3_5TextConfig`."""
    text = _text(config)
    mlp = Mlp(text.integer("intermediate_size", 12288))
    return _architecture(text, "qwen3_5", 248320, 4096, 4, [mlp] * text.integer("num_hidden_layers", 32))


def qwen3_5_moe(config: Config) -> Architecture:
    """Defaults are those of `transformers.Qwen3_5MoeTextConfig`."""
    text = _text(config)
    moe = _moe(text, experts=256, per_token=8, renormalize=True)
    return _architecture(text, "qwen3_5_moe", 248320, 2048, 2, [moe] * text.integer("num_hidden_layers", 40))


def _text(config: Config) -> Config:
    """The fields of the text decoder. A multimodal file has them in a section, but says outside whether it ties."""
    return config.section("text_config", inherited=("tie_word_embeddings",)) if config.has("text_config") else config


def _architecture(
    config: Config, model_type: str, vocab: int, hidden: int, kv_heads: int, feed_forwards: list[FeedForward]
) -> Architecture:
    hidden = config.integer("hidden_size", hidden)
    eps = config.number("rms_norm_eps", 1e-6)
    max_positions = config.integer("max_position_embeddings", 32768)
    config.one_of("hidden_act", "silu", "silu")
    every = config.integer("full_attention_interval", 4)
    default = tuple(
        "linear_attention" if (index + 1) % every else "full_attention" for index in range(len(feed_forwards))
    )
    kinds = config.strings("layer_types", default)
    mixers: dict[str, Mixer] = {
        "linear_attention": _gated_delta(config, eps),
        "full_attention": _attention(config, kv_heads, eps, max_positions),
    }
    if unknown := set(kinds) - mixers.keys():
        raise ConfigError(f"layer_types has {sorted(unknown)}; implemented: {', '.join(mixers)}")
    if len(kinds) != len(feed_forwards):
        raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {len(feed_forwards)}")
    return Architecture(
        model_type=model_type,
        vocab_size=config.integer("vocab_size", vocab),
        hidden_size=hidden,
        max_context_tokens=max_positions,
        layers=tuple(Layer(mixers[kind], feed) for kind, feed in zip(kinds, feed_forwards, strict=True)),
        norm=Norm(eps, unit_offset=True),
        tied=config.flag("tie_word_embeddings", False),
    )


def _attention(config: Config, kv_heads: int, eps: float, max_positions: int) -> Attention:
    head_dim = config.integer("head_dim", 256)
    config.one_of("attn_output_gate", True, True)
    # Interleaved multimodal rotary sections equal plain rotary positions when all three coordinates are the same.
    rope = read_rope(config, head_dim, max_positions, partial=0.25, unused=("mrope_section", "mrope_interleaved"))
    return Attention(
        heads=config.integer("num_attention_heads", 16),
        kv_heads=config.integer("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        qk_norm=Norm(eps, unit_offset=True),
        output_gate=True,
        bias=config.flag("attention_bias", False),
    )


def _gated_delta(config: Config, eps: float) -> GatedDelta:
    config.one_of("mamba_ssm_dtype", "float32", "float32")
    return GatedDelta(
        key_heads=config.integer("linear_num_key_heads", 16),
        value_heads=config.integer("linear_num_value_heads", 32),
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=config.integer("linear_value_head_dim", 128),
        conv_width=config.integer("linear_conv_kernel_dim", 4, minimum=2),
        norm=Norm(eps),
    )


def _moe(config: Config, *, experts: int, per_token: int, renormalize: bool) -> Moe:
    return Moe(
        experts=config.integer("num_experts", experts),
        per_token=config.integer("num_experts_per_tok", per_token),
        intermediate=config.integer("moe_intermediate_size", 512),
        renormalize=renormalize,
        shared=Mlp(config.integer("shared_expert_intermediate_size", 512)),
        shared_gate=True,
    )


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published, in the spellings that `stored` shows."""
    hidden = architecture.hidden_size
    multimodal = "model.language_model.embed_tokens.weight" in stored

    def layer(index: int, ours: str, disk: str) -> Pieces:
        mixer, feed_forward = architecture.layers[index].mixer, architecture.layers[index].feed_forward
        if isinstance(mixer, GatedDelta):
            yield from _delta_pieces(mixer, hidden, f"{ours}mixer.", f"{disk}linear_attn.", architecture.model_type)
        elif isinstance(mixer, Attention):
            yield from attention_pieces(mixer, hidden, f"{ours}mixer.", f"{disk}self_attn.")
        if isinstance(feed_forward, Moe):
            yield from _moe_pieces(feed_forward, hidden, f"{ours}feed_forward.", f"{disk}mlp.", stored)
        else:
            yield from mlp_pieces(feed_forward, hidden, f"{ours}feed_forward.", f"{disk}mlp.")

    return decoder_manifest(architecture, Names("model.language_model." if multimodal else "model."), layer)


def _delta_pieces(delta: GatedDelta, hidden: int, ours: str, disk: str, model_type: str) -> Pieces:
    inputs = _interleaved_inputs if model_type == "qwen3_next" else _plain_inputs
    values = delta.value_heads * delta.value_dim
    yield f"{ours}input.weight", inputs(delta, hidden, disk)
    yield f"{ours}conv.weight", (Piece(f"{disk}conv1d.weight", (delta.conv_channels, 1, delta.conv_width)),)
    yield f"{ours}log_rate", (Piece(f"{disk}A_log", (delta.value_heads,)),)
    yield f"{ours}step_bias", (Piece(f"{disk}dt_bias", (delta.value_heads,)),)
    yield f"{ours}norm.weight", (Piece(f"{disk}norm.weight", (delta.value_dim,)),)
    yield f"{ours}out.weight", (Piece(f"{disk}out_proj.weight", (hidden, values)),)


def _plain_inputs(delta: GatedDelta, hidden: int, disk: str) -> tuple[Piece, ...]:
    """[q k v] and z, b, a in tensors of their own."""
    heads = delta.value_heads
    rows = {"qkv": delta.conv_channels, "z": heads * delta.value_dim, "b": heads, "a": heads}
    return tuple(Piece(f"{disk}in_proj_{name}.weight", (size, hidden)) for name, size in rows.items())


def _interleaved_inputs(delta: GatedDelta, hidden: int, disk: str) -> tuple[Piece, ...]:
    """[q k v z] of the first key head, of the second, …, and [b a] likewise."""
    heads = delta.value_heads // delta.key_heads
    values = heads * delta.value_dim
    pieces: list[Piece] = []
    for name, widths in {"qkvz": (delta.key_dim, delta.key_dim, values, values), "ba": (heads, heads)}.items():
        shape = (delta.key_heads * sum(widths), hidden)
        start = 0
        for width in widths:
            pieces.append(Piece(f"{disk}in_proj_{name}.weight", shape, delta.key_heads, start, start + width))
            start += width
    return tuple(pieces)


def _moe_pieces(moe: Moe, hidden: int, ours: str, disk: str, stored: Collection[str]) -> Pieces:
    yield f"{ours}router.weight", (Piece(f"{disk}gate.weight", (moe.experts, hidden)),)
    yield f"{ours}shared_gate.weight", (Piece(f"{disk}shared_expert_gate.weight", (1, hidden)),)
    yield from mlp_pieces(moe.shared, hidden, f"{ours}shared.", f"{disk}shared_expert.")
    size = moe.intermediate
    if f"{disk}experts.gate_up_proj" in stored:
        yield f"{ours}gate_up", (Piece(f"{disk}experts.gate_up_proj", (moe.experts, 2 * size, hidden)),)
        yield f"{ours}down", (Piece(f"{disk}experts.down_proj", (moe.experts, hidden, size)),)
        return
    experts = [f"{disk}experts.{expert}." for expert in range(moe.experts)]
    rows = [f"{expert}{name}.weight" for expert in experts for name in ("gate_proj", "up_proj")]
    yield f"{ours}gate_up", tuple(Piece(name, (size, hidden)) for name in rows)
    yield f"{ours}down", tuple(Piece(f"{expert}down_proj.weight", (hidden, size)) for expert in experts)


QWEN3_NEXT = Family("qwen3_next", qwen3_next, manifest, IGNORED)
QWEN3_5 = Family("qwen3_5", qwen3_5, manifest, IGNORED)
QWEN3_5_TEXT = Family("qwen3_5_text", qwen3_5, manifest, IGNORED)
QWEN3_5_MOE = Family("qwen3_5_moe", qwen3_5_moe, manifest, IGNORED)
QWEN3_5_MOE_TEXT = Family("qwen3_5_moe_text", qwen3_5_moe, manifest, IGNORED)
