"""Nemotron-H and Nemotron 3: one part a layer, which is Mamba2, attention without positions, an MLP or experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import mamba_names
from models.families.family import Family
from models.manifest import Manifest, Piece, Pieces, decoder_manifest
from models.parts.attention import Attention
from models.parts.basics import Activation, Norm, Part
from models.parts.feed_forward import Mlp, Moe, Router, Scoring
from models.parts.mamba2 import Mamba2
from models.pieces import attention_pieces, expert_pieces, mamba2_pieces, mlp_pieces

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.NemotronHConfig`, which never ties the embeddings."""
    norm = Norm(config.number("layer_norm_epsilon", 1e-5))
    kinds = _kinds(config)
    parts = _parts(config, norm, frozenset(kinds))
    if unknown := sorted(set(kinds) - parts.keys()):
        config.refuse("layers_block_type", f"{unknown} is not among {', '.join(PATTERN.values())}")
    return Architecture(
        model_type="nemotron_h",
        vocab_size=config.integer("vocab_size", 131072),
        hidden_size=config.integer("hidden_size", 4096),
        max_context_tokens=config.integer("max_position_embeddings", 4096),
        layers=tuple(Layer((Block(parts[kind], norm),)) for kind in kinds),
        norm=norm,
        tied=False,
    )


def _kinds(config: Config) -> tuple[str, ...]:
    """A list of kinds, or in older files a pattern of one letter a layer."""
    default = ("linear_attention", "moe", "full_attention", "mlp")
    if config.has("hybrid_override_pattern") and not config.has("layers_block_type"):
        pattern = str(config.read("hybrid_override_pattern", ""))
        return tuple(PATTERN.get(letter, letter) for letter in pattern)
    kinds = config.strings("layers_block_type", config.strings("layer_types", default))
    return tuple(OLD_NAMES.get(kind, kind) for kind in kinds)


def _parts(config: Config, norm: Norm, kinds: frozenset[str]) -> Mapping[str, Part]:
    """The parts of those kinds that the model has: fields of others may hold anything."""
    makers = {"linear_attention": _mamba, "full_attention": _attention, "mlp": _mlp, "moe": _moe}
    return {kind: make(config, norm) for kind, make in makers.items() if kind in kinds}


def _mamba(config: Config, norm: Norm) -> Mamba2:
    config.one_of("mamba_hidden_act", "silu", "silu")
    config.one_of("mamba_ssm_cache_dtype", "float32", "float32")
    bias = config.flag("use_bias", False)
    return Mamba2(
        heads=config.integer("mamba_num_heads", 128),
        head_dim=config.integer("mamba_head_dim", 64),
        state=config.integer("ssm_state_size", 128),
        groups=config.integer("n_groups", config.integer("mamba_n_groups", 8)),
        conv_width=config.integer("conv_kernel", config.integer("mamba_d_conv", 4), minimum=2),
        # transformers' full forward has a floor and no ceiling; its cached step has neither. The full forward holds.
        step_limits=(config.number("time_step_min", 0.001), float("inf")),
        norm=norm,
        conv_bias=config.flag("use_conv_bias", config.flag("mamba_conv_bias", True)),
        input_bias=bias,
        out_bias=bias,
    )


def _attention(config: Config, norm: Norm) -> Attention:
    config.one_of("attention_bias", False, False)
    config.one_of("sliding_window", None, None)
    heads, head_dim = config.integer("num_attention_heads", 32), config.integer("head_dim", 128)
    kv_heads = config.integer("num_key_value_heads", 8)
    return Attention(heads, kv_heads, head_dim, scale=head_dim**-0.5, rope=None)


def _mlp(config: Config, norm: Norm) -> Mlp:
    return _plain_mlp(config, config.integer("intermediate_size", 21504))


def _plain_mlp(config: Config, size: int, bias: bool | None = None) -> Mlp:
    activation = Activation(config.one_of("mlp_hidden_act", "relu2", *(kind.value for kind in Activation)))
    return Mlp(size, activation, gated=False, bias=config.flag("mlp_bias", False) if bias is None else bias)


def _moe(config: Config, norm: Norm) -> Moe:
    config.one_of("n_shared_experts", 1, 1)
    router = Router(
        experts=config.integer("n_routed_experts", 8),
        per_token=config.integer("num_experts_per_tok", 2),
        scoring=Scoring.SIGMOID,
        renormalize=config.flag("norm_topk_prob", True),
        renormalize_eps=1e-20,
        choice_bias=True,
        groups=config.integer("n_group", 1),
        groups_taken=config.integer("topk_group", 1),
        scale=config.number("routed_scaling_factor", 1.0),
    )
    latent = config.integer("moe_latent_size", 0, minimum=0) or None
    return Moe(
        router,
        _plain_mlp(config, config.integer("moe_intermediate_size", 7688), bias=False),
        shared=_plain_mlp(config, config.integer("moe_shared_expert_intermediate_size", 7688)),
        latent=latent,
        latent_bias=latent is not None and config.flag("mlp_bias", False),
    )


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published: `backbone.layers.N.mixer`, whatever the part."""
    hidden = architecture.hidden_size

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body, disk = architecture.layers[index].blocks[block].body, f"{disk}mixer."
        if isinstance(body, Mamba2):
            yield from mamba2_pieces(body, hidden, ours, disk)
        elif isinstance(body, Attention):
            yield from attention_pieces(body, hidden, ours, disk)
        elif isinstance(body, Mlp):
            yield from mlp_pieces(body, hidden, ours, disk)
        elif isinstance(body, Moe):
            yield from _moe_pieces(body, hidden, ours, disk)

    return decoder_manifest(architecture, mamba_names(stored), layer)


def _moe_pieces(moe: Moe, hidden: int, ours: str, disk: str) -> Pieces:
    experts = moe.router.experts
    yield f"{ours}router.weight", (Piece(f"{disk}gate.weight", (experts, hidden)),)
    yield f"{ours}choice_bias", (Piece(f"{disk}gate.e_score_correction_bias", (experts,)),)
    yield from expert_pieces(moe, moe.latent or hidden, ours, f"{disk}experts.")
    if moe.shared:
        yield from mlp_pieces(moe.shared, hidden, f"{ours}shared.", f"{disk}shared_experts.")
    if moe.latent:
        shapes = {"latent_in": (moe.latent, hidden), "latent_out": (hidden, moe.latent)}
        for (name, shape), stored in zip(shapes.items(), ("fc1_latent_proj", "fc2_latent_proj"), strict=True):
            yield f"{ours}{name}.weight", (Piece(f"{disk}{stored}.weight", shape),)
            if moe.latent_bias:
                yield f"{ours}{name}.bias", (Piece(f"{disk}{stored}.bias", shape[:1]),)


NEMOTRON_H = Family("nemotron_h", architecture, manifest, ignored=r"mtp\..*")
