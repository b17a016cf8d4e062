"""Qwen2, Qwen3 and Qwen3-MoE: Llama with biases on q, k and v, or with norms on q and k; windows in upper layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import IGNORED, heads_of, layer_types, plain_manifest
from models.families.family import Family
from models.parts.attention import Attention
from models.parts.basics import Norm, Part
from models.parts.feed_forward import Mlp, Moe, Router
from models.rope import read_rope

FULL, SLIDING = "full_attention", "sliding_attention"


def qwen2(config: Config) -> Architecture:
    """Defaults are those of `transformers.Qwen2Config`."""
    heads, kv_heads, head_dim = heads_of(config, hidden=4096, heads=32)
    attention = replace(_attention(config, heads, kv_heads, head_dim), qkv_bias=True)
    return _dense(config, "qwen2", attention)


def qwen3(config: Config) -> Architecture:
    """Defaults are those of `transformers.Qwen3Config`."""
    heads, kv_heads, _ = heads_of(config, hidden=4096, heads=32)
    attention = _attention(config, heads, kv_heads, config.integer("head_dim", 128))
    return _dense(config, "qwen3", _normed(config, attention))


def qwen3_moe(config: Config) -> Architecture:
    """Defaults are those of `transformers.Qwen3MoeConfig`. One window, if any, for all layers."""
    heads, kv_heads, head_dim = heads_of(config, hidden=2048, heads=32, kv_heads=4)
    attention = replace(_normed(config, _attention(config, heads, kv_heads, head_dim)), window=_window(config))
    layers = config.integer("num_hidden_layers", 24)
    experts = config.integer("num_experts", config.integer("num_local_experts", 128))
    renormalize = config.flag("norm_topk_prob", False)
    sparse = Moe(
        Router(experts, config.integer("num_experts_per_tok", 8), renormalize=renormalize),
        Mlp(config.integer("moe_intermediate_size", 768)),
    )
    dense = Mlp(config.integer("intermediate_size", 6144))
    step, dense_layers = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers", ())
    feed_forwards = [dense if index in dense_layers or (index + 1) % step else sparse for index in range(layers)]
    return _architecture(config, "qwen3_moe", 2048, [attention] * layers, feed_forwards)


def _attention(config: Config, heads: int, kv_heads: int, head_dim: int) -> Attention:
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, _max_positions(config)),
    )


def _normed(config: Config, attention: Attention) -> Attention:
    bias = config.flag("attention_bias", False)
    return replace(attention, qk_norm=Norm(config.number("rms_norm_eps", 1e-6)), qkv_bias=bias, out_bias=bias)


def _window(config: Config) -> int | None:
    return config.optional_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None


def _max_positions(config: Config) -> int:
    return config.integer("max_position_embeddings", 32768)


def _dense(config: Config, model_type: str, attention: Attention) -> Architecture:
    """With the window, if any, in layers from `max_window_layers` on, or where `layer_types` says so."""
    layers, window = config.integer("num_hidden_layers", 32), _window(config)
    full_layers = config.integer("max_window_layers", 28, minimum=0)

    def default(index: int) -> str:
        return SLIDING if window is not None and index >= full_layers else FULL

    of_kind = {FULL: attention, SLIDING: replace(attention, window=window)}
    attentions = [of_kind[kind] for kind in layer_types(config, of_kind, default, layers)]
    mlp = Mlp(config.integer("intermediate_size", 22016))
    return _architecture(config, model_type, 4096, attentions, [mlp] * layers)


def _architecture(
    config: Config, model_type: str, hidden: int, attentions: Sequence[Attention], feed_forwards: Sequence[Part]
) -> Architecture:
    config.one_of("hidden_act", "silu", "silu")
    norm = Norm(config.number("rms_norm_eps", 1e-6))
    return Architecture(
        model_type=model_type,
        vocab_size=config.integer("vocab_size", 151936),
        hidden_size=config.integer("hidden_size", hidden),
        max_context_tokens=_max_positions(config),
        layers=tuple(
            Layer((Block(attention, norm), Block(feed_forward, norm)))
            for attention, feed_forward in zip(attentions, feed_forwards, strict=True)
        ),
        norm=norm,
        tied=config.flag("tie_word_embeddings", False),
    )


QWEN2 = Family("qwen2", qwen2, plain_manifest, IGNORED)
QWEN3 = Family("qwen3", qwen3, plain_manifest, IGNORED)
QWEN3_MOE = Family("qwen3_moe", qwen3_moe, plain_manifest, IGNORED)
