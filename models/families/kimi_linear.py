"""Kimi Linear: Kimi Delta Attention with latent attention among it, without positions, and experts."""

from __future__ import annotations

from collections.abc import Callable, Collection

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import IGNORED, layer_types
from models.families.family import Family
from models.manifest import Manifest, Names, Piece, Pieces, decoder_manifest
from models.parts.basics import Norm, Part
from models.parts.feed_forward import Mlp, Moe, Router, Scoring
from models.parts.kimi_delta import KimiDelta
from models.parts.latent_attention import LatentAttention
from models.pieces import MlpNames, expert_pieces, mlp_pieces

LATENT_NORM = Norm(1e-6)  # whatever the file says about other norms
EXPERT_NAMES = MlpNames("w1", "w3", "w2")


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.KimiLinearConfig`. Never tied: transformers ignores what the file says."""
    config.one_of("hidden_act", "silu", "silu")
    config.one_of("mla_use_nope", True, True)
    layers = config.integer("num_hidden_layers", 27)
    norm = Norm(config.number("rms_norm_eps", 1e-5))
    mixers: dict[str, Part] = {"full_attention": _attention(config), "linear_attention": _delta(config, norm)}
    feed_forwards: dict[str, Part] = {
        "dense": Mlp(config.integer("intermediate_size", 9216)),
        "sparse": _moe(config),
    }
    kinds = layer_types(config, mixers, _default_kind(config), layers)
    first_sparse = config.integer("first_k_dense_replace", 1, minimum=0)
    default = tuple("dense" if index < first_sparse else "sparse" for index in range(layers))
    feeds = config.strings("mlp_layer_types", default)
    if len(feeds) != layers or set(feeds) - feed_forwards.keys():
        config.refuse("mlp_layer_types", f"it must name {layers} layers, each one of {', '.join(feed_forwards)}")
    return Architecture(
        model_type="kimi_linear",
        vocab_size=config.integer("vocab_size", 163840),
        hidden_size=config.integer("hidden_size", 2304),
        max_context_tokens=config.integer("model_max_length", config.integer("max_position_embeddings", 1048576)),
        layers=tuple(
            Layer((Block(mixers[kind], norm), Block(feed_forwards[feed], norm)))
            for kind, feed in zip(kinds, feeds, strict=True)
        ),
        norm=norm,
        tied=False,
    )


def _default_kind(config: Config) -> Callable[[int], str]:
    """Published files list the layers, from 1; otherwise every fourth is attention, but not the first."""
    listed = config.section("linear_attn_config")
    if listed.has("full_attn_layers"):
        attention = {number - 1 for number in listed.integers("full_attn_layers", ())}
        return lambda index: "full_attention" if index in attention else "linear_attention"
    return lambda index: "full_attention" if index and index % 4 == 0 else "linear_attention"


def _attention(config: Config) -> LatentAttention:
    return LatentAttention(
        heads=config.integer("num_attention_heads", 32),
        key_dim=config.integer("qk_nope_head_dim", 128),
        shared_dim=config.integer("qk_rope_head_dim", 64),
        value_dim=config.integer("v_head_dim", 128),
        latent=config.integer("kv_lora_rank", 512),
        query_latent=config.integer("q_lora_rank", 0, minimum=0) or None,
        norm=LATENT_NORM,
        bias=config.flag("attention_bias", False),
    )


def _delta(config: Config, norm: Norm) -> KimiDelta:
    listed = config.section("linear_attn_config")
    width = listed.integer("short_conv_kernel_size", config.integer("linear_conv_kernel_dim", 4), minimum=2)
    return KimiDelta(
        heads=listed.integer("num_heads", config.integer("linear_num_heads", 32)),
        dim=listed.integer("head_dim", config.integer("linear_head_dim", 128)),
        conv_width=width,
        norm=norm,
    )


def _moe(config: Config) -> Moe:
    """Every field has two spellings: the published one and transformers'."""
    config.one_of("moe_router_activation_func", "sigmoid", "sigmoid")
    config.one_of("moe_layer_freq", 1, 1)
    router = Router(
        experts=config.integer("num_experts", config.integer("num_local_experts", 256)),
        per_token=config.integer("num_experts_per_token", config.integer("num_experts_per_tok", 8)),
        scoring=Scoring.SIGMOID,
        renormalize=config.flag("moe_renormalize", config.flag("norm_topk_prob", True)),
        renormalize_eps=1e-20,
        choice_bias=True,
        groups=config.integer("num_expert_group", config.integer("n_group", 1)),
        groups_taken=config.integer("topk_group", 1),
        scale=config.number("routed_scaling_factor", 2.446),
    )
    size = config.integer("moe_intermediate_size", 1024)
    shared = config.integer("num_shared_experts", config.integer("n_shared_experts", 1))
    return Moe(router, Mlp(size), shared=Mlp(size * shared))


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published, and as transformers 5 saves them: it renames dense MLPs as well."""
    hidden = architecture.hidden_size

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body = architecture.layers[index].blocks[block].body
        renamed = any(name.startswith(f"{disk}block_sparse_moe.") for name in stored)
        feed_forward = f"{disk}block_sparse_moe." if renamed else f"{disk}mlp."
        if isinstance(body, LatentAttention):
            yield from _attention_pieces(body, hidden, ours, f"{disk}self_attn.")
        elif isinstance(body, KimiDelta):
            yield from _delta_pieces(body, hidden, ours, f"{disk}self_attn.")
        elif isinstance(body, Mlp):
            yield from mlp_pieces(body, hidden, ours, feed_forward)
        elif isinstance(body, Moe) and body.shared:
            experts = body.router.experts
            yield f"{ours}router.weight", (Piece(f"{feed_forward}gate.weight", (experts, hidden)),)
            yield f"{ours}choice_bias", (Piece(f"{feed_forward}gate.e_score_correction_bias", (experts,)),)
            yield from expert_pieces(body, hidden, ours, f"{feed_forward}experts.", EXPERT_NAMES)
            yield from mlp_pieces(body.shared, hidden, f"{ours}shared.", f"{feed_forward}shared_experts.")

    return decoder_manifest(architecture, Names(), layer)


def _attention_pieces(attention: LatentAttention, hidden: int, ours: str, disk: str) -> Pieces:
    heads, latent, queries = attention.heads, attention.latent, attention.heads * attention.query_dim
    if attention.query_latent:
        narrow = attention.query_latent
        yield f"{ours}query_in.weight", (Piece(f"{disk}q_a_proj.weight", (narrow, hidden)),)
        yield f"{ours}query_norm.weight", (Piece(f"{disk}q_a_layernorm.weight", (narrow,)),)
        yield f"{ours}query.weight", (Piece(f"{disk}q_b_proj.weight", (queries, narrow), units=heads),)
    else:
        yield f"{ours}query.weight", (Piece(f"{disk}q_proj.weight", (queries, hidden), units=heads),)
    compressed = latent + attention.shared_dim
    yield f"{ours}compress.weight", (Piece(f"{disk}kv_a_proj_with_mqa.weight", (compressed, hidden)),)
    yield f"{ours}norm.weight", (Piece(f"{disk}kv_a_layernorm.weight", (latent,)),)
    values = heads * attention.value_dim
    yield f"{ours}out.weight", (Piece(f"{disk}o_proj.weight", (hidden, values), units=heads, axis=1),)
    if attention.bias:
        biases = {"compress": ("kv_a_proj_with_mqa", compressed), "out": ("o_proj", hidden)}
        if attention.query_latent:
            biases["query_in"] = ("q_a_proj", attention.query_latent)
        for name, (stored, size) in biases.items():
            yield f"{ours}{name}.bias", (Piece(f"{disk}{stored}.bias", (size,)),)
    # [key | value] of the first head, of the second, …
    both, shape = f"{disk}kv_b_proj.weight", (heads * (attention.key_dim + attention.value_dim), latent)
    yield f"{ours}to_key", (Piece(both, shape, units=heads, runs=heads, stop=attention.key_dim),)
    yield f"{ours}to_value", (Piece(both, shape, units=heads, runs=heads, start=attention.key_dim),)


def _delta_pieces(delta: KimiDelta, hidden: int, ours: str, disk: str) -> Pieces:
    heads, channels, dim = delta.heads, delta.channels, delta.dim
    inputs = [Piece(f"{disk}{name}_proj.weight", (channels, hidden), units=heads) for name in "qkv"]
    yield f"{ours}input.weight", (*inputs, Piece(f"{disk}b_proj.weight", (heads, hidden), units=heads))
    conv = (channels, 1, delta.conv_width)
    yield f"{ours}conv.weight", tuple(Piece(f"{disk}{name}_conv1d.weight", conv, units=heads) for name in "qkv")
    for name, stored in {"forget": "f", "gate": "g"}.items():
        yield f"{ours}{name}.0.weight", (Piece(f"{disk}{stored}_a_proj.weight", (dim, hidden)),)
        yield f"{ours}{name}.1.weight", (Piece(f"{disk}{stored}_b_proj.weight", (channels, dim), units=heads),)
    yield f"{ours}log_rate", (Piece(f"{disk}A_log", (1, 1, heads, 1), units=heads, axis=2),)
    yield f"{ours}step_bias", (Piece(f"{disk}dt_bias", (channels,), units=heads),)
    yield f"{ours}norm.weight", (Piece(f"{disk}o_norm.weight", (dim,)),)
    yield f"{ours}out.weight", (Piece(f"{disk}o_proj.weight", (hidden, channels), units=heads, axis=1),)


KIMI_LINEAR = Family("kimi_linear", architecture, manifest, IGNORED)
