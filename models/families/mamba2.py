"""Mamba2 alone: Codestral-Mamba and the original models. Its state does not grow, so there are no pages at all."""

from __future__ import annotations

from collections.abc import Collection

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import NO_POSITIONS, mamba_names
from models.families.family import Family
from models.families.mamba_fields import step_limits
from models.manifest import Manifest, Pieces, decoder_manifest
from models.parts.basics import Norm
from models.parts.mamba2 import Mamba2
from models.pieces import mamba2_pieces


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.Mamba2Config`. The residual has the activations' type, always."""
    config.one_of("hidden_act", "silu", "silu")
    config.flag("residual_in_fp32", True)
    hidden, expand = config.integer("hidden_size", 4096), config.integer("expand", 2)
    norm = Norm(config.number("layer_norm_epsilon", 1e-5))
    bias = config.flag("use_bias", False)
    mamba = Mamba2(
        heads=config.integer("num_heads", 128),
        head_dim=config.integer("head_dim", 64),
        state=config.integer("state_size", 128),
        groups=config.integer("n_groups", 8),
        conv_width=config.integer("conv_kernel", 4, minimum=2),
        step_limits=step_limits(config, "time_step_limit"),
        norm=norm,
        conv_bias=config.flag("use_conv_bias", True),
        input_bias=bias,
        out_bias=bias,
    )
    if mamba.channels != expand * hidden:
        config.refuse("num_heads", f"with head_dim {mamba.head_dim} it must make {expand * hidden} channels")
    return Architecture(
        model_type="mamba2",
        vocab_size=config.integer("vocab_size", 32768),
        hidden_size=hidden,
        max_context_tokens=NO_POSITIONS,
        layers=(Layer((Block(mamba, norm),)),) * config.integer("num_hidden_layers", 64),
        norm=norm,
        tied=config.flag("tie_word_embeddings", False),
    )


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published: `backbone.layers.N.mixer`."""
    hidden = architecture.hidden_size

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body = architecture.layers[index].blocks[block].body
        assert isinstance(body, Mamba2)
        return mamba2_pieces(body, hidden, ours, f"{disk}mixer.")

    return decoder_manifest(architecture, mamba_names(stored), layer)


MAMBA2 = Family("mamba2", architecture, manifest, ignored=r"")
