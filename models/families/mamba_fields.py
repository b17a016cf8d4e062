"""Fields by which several families describe their Mamba layers."""

from __future__ import annotations

from models.config import Config
from models.errors import ConfigError
from models.parts.basics import Norm
from models.parts.mamba2 import Mamba2


def mamba2_of(config: Config, hidden: int, norm: Norm | None, channels: int | None = None) -> Mamba2:
    """The fields `mamba_*` of Granite, Bamba and Falcon-H1.

    `channels`: where they do not follow from `mamba_expand`. Raises ConfigError when sizes contradict.
    """
    channels = channels or config.integer("mamba_expand", 2) * hidden
    heads = config.integer("mamba_n_heads", 128)
    head_dim = channels // heads
    stated = config.read("mamba_d_head", "auto")
    if stated not in ("auto", head_dim) or heads * head_dim != channels:
        raise ConfigError(f"mamba_d_head is {stated!r} with {heads} heads, which must make {channels} channels")
    bias = config.flag("mamba_proj_bias", False)
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        state=config.integer("mamba_d_state", 256),
        groups=config.integer("mamba_n_groups", 1),
        conv_width=config.integer("mamba_d_conv", 4, minimum=2),
        step_limits=step_limits(config, "time_step_limit"),
        norm=norm,
        conv_bias=config.flag("mamba_conv_bias", True),
        input_bias=bias,
        out_bias=bias,
    )


def step_limits(config: Config, name: str) -> tuple[float, float]:
    """The bounds of the time step. transformers keeps to them in full forwards and forgets them in cached steps."""
    limits = config.read(name, (0.0, float("inf")))
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise ConfigError(f"{name} is {limits!r}; it must be two numbers")
    return float(limits[0]), float(limits[1])


def step_rank(config: Config, name: str, hidden: int) -> int:
    """The width of the time steps' projection, which may be left to the hidden size."""
    return -(-hidden // 16) if config.read(name, "auto") == "auto" else config.integer(name, 1)
