"""Mamba and Falcon-Mamba: Mamba layers alone. Their state does not grow, so there are no pages at all."""

from __future__ import annotations

from collections.abc import Collection

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import NO_POSITIONS, mamba_names
from models.families.family import Family
from models.families.mamba_fields import step_rank
from models.manifest import Manifest, Pieces, decoder_manifest
from models.parts.basics import Norm
from models.parts.mamba1 import Mamba1
from models.pieces import mamba1_pieces


def mamba(config: Config) -> Architecture:
    """Defaults are those of `transformers.MambaConfig`. The residual has the activations' type, always."""
    return _architecture(config, "mamba", None)


def falcon_mamba(config: Config) -> Architecture:
    """Defaults are those of `transformers.FalconMambaConfig`: norms without weights on time step, B and C."""
    return _architecture(config, "falcon_mamba", Norm(config.number("mixer_rms_eps", 1e-6), weighted=False))


def _architecture(config: Config, model_type: str, inner_norm: Norm | None) -> Architecture:
    config.one_of("hidden_act", "silu", "silu")
    config.flag("residual_in_fp32", True)
    hidden = config.integer("hidden_size", 768)
    norm = Norm(config.number("layer_norm_epsilon", 1e-5))
    mixer = Mamba1(
        # transformers lets a stored `intermediate_size` win over `expand`, and always stores one.
        channels=config.integer("intermediate_size", int(config.number("expand", 2) * hidden)),
        state=config.integer("state_size", 16),
        step_rank=step_rank(config, "time_step_rank", hidden),
        conv_width=config.integer("conv_kernel", 4, minimum=2),
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
        norm=inner_norm,
    )
    return Architecture(
        model_type=model_type,
        vocab_size=config.integer("vocab_size", 50280),
        hidden_size=hidden,
        max_context_tokens=NO_POSITIONS,
        layers=(Layer((Block(mixer, norm),)),) * config.integer("num_hidden_layers", 32),
        norm=norm,
        tied=config.flag("tie_word_embeddings", True),
    )


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published: `backbone.layers.N.mixer`."""
    hidden = architecture.hidden_size

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body = architecture.layers[index].blocks[block].body
        assert isinstance(body, Mamba1)
        return mamba1_pieces(body, hidden, ours, f"{disk}mixer.")

    return decoder_manifest(architecture, mamba_names(stored), layer)


MAMBA = Family("mamba", mamba, manifest, ignored=r"")
FALCON_MAMBA = Family("falcon_mamba", falcon_mamba, manifest, ignored=r"")
