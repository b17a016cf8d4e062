"""Gemma 3, text: windows in five layers of six, each kind with its own rotary frequencies, and norms on both sides.

The larger sizes are published with a vision tower; the text decoder is then read from `text_config`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import IGNORED, heads_of, layer_types, plain_manifest
from models.families.family import Family
from models.manifest import Manifest, Names
from models.parts.attention import Attention
from models.parts.basics import Activation, Norm, Rope
from models.parts.feed_forward import Mlp
from models.rope import rope_of

FULL, SLIDING = "full_attention", "sliding_attention"
BODIES = ("language_model.model.", "model.language_model.", "model.")  # as published, in memory, text alone
VISION = r"|(model\.)?(vision_tower|multi_modal_projector)\..*"
NORMS = ("input_layernorm.weight", "pre_feedforward_layernorm.weight")
POST_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.Gemma3TextConfig`."""
    if config.has("text_config"):
        config = config.section("text_config", inherited=("tie_word_embeddings",))
    config.one_of("use_bidirectional_attention", False, False)
    config.one_of("attn_logit_softcapping", None, None)
    hidden, layers = config.integer("hidden_size", 2304), config.integer("num_hidden_layers", 26)
    max_positions = config.integer("max_position_embeddings", 131072)
    norm = Norm(config.number("rms_norm_eps", 1e-6), unit_offset=True)
    full = _attention(config, norm, max_positions)
    sliding = replace(
        full,
        rope=_rope(config, SLIDING, full.head_dim, max_positions),
        window=config.optional_integer("sliding_window", 4096),
    )
    every = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    of_kind = {FULL: full, SLIDING: sliding}
    kinds = layer_types(config, of_kind, lambda index: SLIDING if (index + 1) % every else FULL, layers)
    activation = Activation(config.one_of("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh"))
    mlp = Block(Mlp(config.integer("intermediate_size", 9216), activation), norm, norm)
    return Architecture(
        model_type="gemma3_text",
        vocab_size=config.integer("vocab_size", 262208),
        hidden_size=hidden,
        max_context_tokens=max_positions,
        layers=tuple(Layer((Block(of_kind[kind], norm, norm), mlp)) for kind in kinds),
        norm=norm,
        tied=config.flag("tie_word_embeddings", True),
        embedding_multiplier=hidden**0.5,
        logits_soft_cap=config.number("final_logit_softcapping", 0.0) or None,
    )


def _attention(config: Config, norm: Norm, max_positions: int) -> Attention:
    heads, kv_heads, _ = heads_of(config, hidden=2304, heads=8, kv_heads=4)
    head_dim = config.integer("head_dim", 256)
    bias = config.flag("attention_bias", False)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        rope=_rope(config, FULL, head_dim, max_positions),
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
    )


def _rope(config: Config, kind: str, head_dim: int, max_positions: int) -> Rope:
    """One object for each kind of layer; in files of earlier versions scaling concerns full attention alone."""
    full = kind == FULL
    theta = config.number(*(("rope_theta", 1e6) if full else ("rope_local_base_freq", 1e4)))
    parameters = config.section("rope_parameters").section(kind)
    if full and config.has("rope_scaling"):
        parameters = config.section("rope_scaling")
    return rope_of(parameters, head_dim, max_positions, theta)


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published, with or without a vision tower."""
    body = next((body for body in BODIES if f"{body}embed_tokens.weight" in stored), BODIES[-1])
    head = "language_model.lm_head.weight" if body == BODIES[0] else "lm_head.weight"
    return plain_manifest(architecture, stored, Names(body, head, norms=NORMS, post_norms=POST_NORMS))


GEMMA3_TEXT = Family("gemma3_text", architecture, manifest, IGNORED + VISION)
GEMMA3 = Family("gemma3", architecture, manifest, IGNORED + VISION)
