"""Qwen3-Next and Qwen3.5 (dense and MoE): Gated DeltaNet layers and gated attention layers.

The generations differ in how the Gated DeltaNet's input projection lies on disk and in which layers are sparse.
Qwen3.5 is published with a vision tower; the text decoder is read from `text_config` and `model.language_model.*`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.errors import ConfigError
from models.families.common import gated_moe_pieces
from models.families.family import Family
from models.manifest import Manifest, Names, Piece, Pieces, decoder_manifest
from models.parts.attention import Attention
from models.parts.basics import Norm, Part
from models.parts.feed_forward import Mlp, Moe, Router
from models.parts.gated_delta import GatedDelta
from models.pieces import attention_pieces, mlp_pieces, stretches
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

    def feed_forward(index: int) -> Part:
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
    config: Config, model_type: str, vocab: int, hidden: int, kv_heads: int, feed_forwards: Sequence[Part]
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
    mixers: dict[str, Part] = {
        "linear_attention": _gated_delta(config, eps),
        "full_attention": _attention(config, kv_heads, eps, max_positions),
    }
    if unknown := set(kinds) - mixers.keys():
        raise ConfigError(f"layer_types has {sorted(unknown)}; implemented: {', '.join(mixers)}")
    if len(kinds) != len(feed_forwards):
        raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {len(feed_forwards)}")
    norm = Norm(eps, unit_offset=True)
    return Architecture(
        model_type=model_type,
        vocab_size=config.integer("vocab_size", vocab),
        hidden_size=hidden,
        max_context_tokens=max_positions,
        layers=tuple(
            Layer((Block(mixers[kind], norm), Block(feed_forward, norm)))
            for kind, feed_forward in zip(kinds, feed_forwards, strict=True)
        ),
        norm=norm,
        tied=config.flag("tie_word_embeddings", False),
    )


def _attention(config: Config, kv_heads: int, eps: float, max_positions: int) -> Attention:
    head_dim = config.integer("head_dim", 256)
    config.one_of("attn_output_gate", True, True)
    # Interleaved multimodal rotary sections equal plain rotary positions when all three coordinates are the same.
    rope = read_rope(config, head_dim, max_positions, partial=0.25, unused=("mrope_section", "mrope_interleaved"))
    bias = config.flag("attention_bias", False)
    return Attention(
        heads=config.integer("num_attention_heads", 16),
        kv_heads=config.integer("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        qk_norm=Norm(eps, unit_offset=True),
        output_gate=True,
        qkv_bias=bias,
        out_bias=bias,
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
    router = Router(
        config.integer("num_experts", experts),
        config.integer("num_experts_per_tok", per_token),
        renormalize=renormalize,
    )
    return Moe(
        router,
        Mlp(config.integer("moe_intermediate_size", 512)),
        shared=Mlp(config.integer("shared_expert_intermediate_size", 512)),
        shared_gate=True,
    )


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published, in the spellings that `stored` shows."""
    hidden = architecture.hidden_size
    multimodal = "model.language_model.embed_tokens.weight" in stored

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body = architecture.layers[index].blocks[block].body
        if isinstance(body, GatedDelta):
            yield from _delta_pieces(body, hidden, ours, f"{disk}linear_attn.", architecture.model_type)
        elif isinstance(body, Attention):
            yield from attention_pieces(body, hidden, ours, f"{disk}self_attn.")
        elif isinstance(body, Moe):
            yield from _moe_pieces(body, hidden, ours, f"{disk}mlp.", stored)
        elif isinstance(body, Mlp):
            yield from mlp_pieces(body, hidden, ours, f"{disk}mlp.")

    return decoder_manifest(architecture, Names("model.language_model." if multimodal else "model."), layer)


def _delta_pieces(delta: GatedDelta, hidden: int, ours: str, disk: str, model_type: str) -> Pieces:
    inputs = _interleaved_inputs if model_type == "qwen3_next" else _plain_inputs
    heads, values = delta.value_heads, delta.value_heads * delta.value_dim
    yield f"{ours}input.weight", inputs(delta, hidden, disk)
    shape = (delta.conv_channels, 1, delta.conv_width)
    yield f"{ours}conv.weight", stretches(f"{disk}conv1d.weight", shape, _convolved(delta))
    yield f"{ours}log_rate", (Piece(f"{disk}A_log", (heads,), units=heads),)
    yield f"{ours}step_bias", (Piece(f"{disk}dt_bias", (heads,), units=heads),)
    yield f"{ours}norm.weight", (Piece(f"{disk}norm.weight", (delta.value_dim,)),)
    yield f"{ours}out.weight", (Piece(f"{disk}out_proj.weight", (hidden, values), units=heads, axis=1),)


def _convolved(delta: GatedDelta) -> list[tuple[int, int]]:
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    return [(keys, delta.key_heads), (keys, delta.key_heads), (values, delta.value_heads)]


def _plain_inputs(delta: GatedDelta, hidden: int, disk: str) -> tuple[Piece, ...]:
    """[q k v] and z, b, a in tensors of their own."""
    heads = delta.value_heads
    qkv = stretches(f"{disk}in_proj_qkv.weight", (delta.conv_channels, hidden), _convolved(delta))
    rows = {"z": heads * delta.value_dim, "b": heads, "a": heads}
    rest = [Piece(f"{disk}in_proj_{name}.weight", (size, hidden), units=heads) for name, size in rows.items()]
    return (*qkv, *rest)


def _interleaved_inputs(delta: GatedDelta, hidden: int, disk: str) -> tuple[Piece, ...]:
    """[q k v z] of the first key head, of the second, …, and [b a] likewise."""
    heads = delta.value_heads // delta.key_heads
    values = (heads * delta.value_dim, delta.value_heads)
    keys = (delta.key_dim, delta.key_heads)
    pieces: list[Piece] = []
    for name, parts in {
        "qkvz": (keys, keys, values, values),
        "ba": ((heads, delta.value_heads), (heads, delta.value_heads)),
    }.items():
        shape = (delta.key_heads * sum(width for width, _ in parts), hidden)
        start = 0
        for width, units in parts:
            name_on_disk, stop = f"{disk}in_proj_{name}.weight", start + width
            pieces.append(Piece(name_on_disk, shape, units=units, runs=delta.key_heads, start=start, stop=stop))
            start = stop
    return tuple(pieces)


def _moe_pieces(moe: Moe, hidden: int, ours: str, disk: str, stored: Collection[str]) -> Pieces:
    yield from gated_moe_pieces(moe, hidden, ours, disk, stored)
    yield f"{ours}shared_gate.weight", (Piece(f"{disk}shared_expert_gate.weight", (1, hidden)),)
    if moe.shared:
        yield from mlp_pieces(moe.shared, hidden, f"{ours}shared.", f"{disk}shared_expert.")


QWEN3_NEXT = Family("qwen3_next", qwen3_next, manifest, IGNORED)
QWEN3_5 = Family("qwen3_5", qwen3_5, manifest, IGNORED)
QWEN3_5_TEXT = Family("qwen3_5_text", qwen3_5, manifest, IGNORED)
QWEN3_5_MOE = Family("qwen3_5_moe", qwen3_5_moe, manifest, IGNORED)
QWEN3_5_MOE_TEXT = Family("qwen3_5_moe_text", qwen3_5_moe, manifest, IGNORED)
