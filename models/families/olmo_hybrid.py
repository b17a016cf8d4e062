"""OLMo Hybrid: Gated DeltaNet layers with norms before their blocks, attention layers with norms behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import IGNORED, heads_of, layer_types
from models.families.family import Family
from models.manifest import Manifest, Names, Piece, Pieces, decoder_manifest
from models.parts.attention import Attention
from models.parts.basics import Norm
from models.parts.feed_forward import Mlp
from models.parts.gated_delta import GatedDelta
from models.pieces import attention_pieces, mlp_pieces
from models.rope import read_rope
from models.tensorfile import StoredTensor

OUTPUT_NORM = Norm(1e-5)  # whatever the file says: the reference kernels fix it


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.OlmoHybridConfig`."""
    config.one_of("hidden_act", "silu", "silu")
    layers, max_positions = config.integer("num_hidden_layers", 32), config.integer("max_position_embeddings", 65536)
    norm = Norm(config.number("rms_norm_eps", 1e-6))
    mlp = Mlp(config.integer("intermediate_size", 11008))
    attention, delta = _attention(config, norm, max_positions), _delta(config)
    of_kind = {
        "full_attention": Layer((Block(attention, None, norm), Block(mlp, None, norm))),
        "linear_attention": Layer((Block(delta, norm), Block(mlp, norm))),
    }

    def default(index: int) -> str:
        return "full_attention" if index % 4 == 3 or (layers < 4 and index == layers - 1) else "linear_attention"

    return Architecture(
        model_type="olmo_hybrid",
        vocab_size=config.integer("vocab_size", 100352),
        hidden_size=config.integer("hidden_size", 3840),
        max_context_tokens=max_positions,
        layers=tuple(of_kind[kind] for kind in layer_types(config, of_kind, default, layers)),
        norm=norm,
        tied=config.flag("tie_word_embeddings", False),
    )


def _attention(config: Config, norm: Norm, max_positions: int) -> Attention:
    """Without positions where the file says that theta is null; one that is left out means the default."""
    heads, kv_heads, head_dim = heads_of(config, hidden=3840, heads=30)
    bias = config.flag("attention_bias", False)
    positions = not config.section("rope_parameters").null("rope_theta")
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, max_positions) if positions else None,
        qk_norm=norm,
        norm_over_heads=True,
        qkv_bias=bias,
        out_bias=bias,
    )


def _delta(config: Config) -> GatedDelta:
    heads = config.integer("num_attention_heads", 30)
    key_heads = config.integer("linear_num_key_heads", heads)
    key_dim = config.integer("linear_key_head_dim", int(0.75 * config.integer("hidden_size", 3840) / key_heads))
    return GatedDelta(
        key_heads=key_heads,
        value_heads=config.integer("linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=config.integer("linear_value_head_dim", 2 * key_dim),
        conv_width=config.integer("linear_conv_kernel_dim", 4, minimum=2),
        norm=OUTPUT_NORM,
        write_scale=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
    )


def manifest(architecture: Architecture, stored: Mapping[str, StoredTensor]) -> Manifest:
    """Names as published, and as transformers 5 saves them: it renames one norm of the attention layers as well."""
    hidden = architecture.hidden_size

    def names(index: int) -> Names:
        layer = f"model.layers.{index}."
        norms = ("attention_layer_norm.weight", "feedforward_layer_norm.weight")
        if f"{layer}{norms[0]}" not in stored:
            norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        renamed = f"{layer}feedforward_layer_norm.weight" in stored
        behind_attention = "feedforward_layer_norm.weight" if renamed else "post_attention_layernorm.weight"
        return Names(norms=norms, post_norms=(behind_attention, "post_feedforward_layernorm.weight"))

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body = architecture.layers[index].blocks[block].body
        if isinstance(body, GatedDelta):
            yield from _delta_pieces(body, hidden, ours, f"{disk}linear_attn.", stored)
        elif isinstance(body, Attention):
            yield from attention_pieces(body, hidden, ours, f"{disk}self_attn.")
        elif isinstance(body, Mlp):
            yield from mlp_pieces(body, hidden, ours, f"{disk}mlp.")

    return decoder_manifest(architecture, names, layer)


def _delta_pieces(delta: GatedDelta, hidden: int, ours: str, disk: str, stored: Mapping[str, StoredTensor]) -> Pieces:
    """Every projection and every convolution in a tensor of its own."""
    heads, keys, values = delta.value_heads, delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    convolved = {"q": (keys, delta.key_heads), "k": (keys, delta.key_heads), "v": (values, heads)}
    inputs = {**convolved, "g": (values, heads), "b": (heads, heads), "a": (heads, heads)}
    yield (
        f"{ours}input.weight",
        tuple(Piece(f"{disk}{name}_proj.weight", (rows, hidden), units) for name, (rows, units) in inputs.items()),
    )
    yield f"{ours}conv.weight", tuple(_conv_pieces(list(convolved.values()), delta.conv_width, disk, stored))
    yield f"{ours}log_rate", (Piece(f"{disk}A_log", (heads,), units=heads),)
    yield f"{ours}step_bias", (Piece(f"{disk}dt_bias", (heads,), units=heads),)
    yield f"{ours}norm.weight", (Piece(f"{disk}o_norm.weight", (delta.value_dim,)),)
    yield f"{ours}out.weight", (Piece(f"{disk}o_proj.weight", (hidden, values), units=heads, axis=1),)


def _conv_pieces(
    segments: Sequence[tuple[int, int]], width: int, disk: str, stored: Mapping[str, StoredTensor]
) -> Iterator[Piece]:
    """[q | k | v] channels, head by head, out of three tensors.

    As published, each of the three has its own segment. transformers 5 saves thirds of all channels instead, whatever
    the segments' sizes, so that a head's channels may lie in two of them.
    """
    names = [f"{disk}{name}_conv1d.weight" for name in "qkv"]
    rows = [
        stored[name].shape[0] if name in stored else size for name, (size, _) in zip(names, segments, strict=True)
    ]
    first = 0
    for size, heads in segments:
        for head in range(heads):
            begin, end = first + head * size // heads, first + (head + 1) * size // heads
            at = 0
            for name, count in zip(names, rows, strict=True):
                low, high = max(begin, at), min(end, at + count)
                if low < high:
                    shape = (count, 1, width)
                    yield Piece(name, shape, begin=low - at, end=high - at, member=(head, heads))
                at += count
        first += size


OLMO_HYBRID = Family("olmo_hybrid", architecture, manifest, IGNORED)
