"""Values that several parts of a decoder have in common."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Self

from models.errors import ConfigError
from pools.spec import DType, TensorSpec, share


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm. `unit_offset`: the weight on disk is the difference from one."""

    eps: float
    unit_offset: bool = False
    weighted: bool = True


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions over the first `2 * len(frequencies)` dimensions of a head.

    `frequencies` are in radians per token; `magnitude` multiplies both cosine and sine (YaRN).
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0


class Part:
    """Anything that a block of a decoder layer can be: it knows its state, and how ranks share it."""

    __slots__ = ()

    def share(self, ranks: int) -> Self:
        """What one of `ranks` computes: the same part with fewer heads or channels.

        Raises ConfigError, naming what cannot be split.
        """
        raise NotImplementedError

    def paged(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """State that grows by token, for activations of `dtype`."""
        return ()

    def slotted(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """State of fixed size, for activations of `dtype`."""
        return ()


class Activation(Enum):
    """The nonlinearity of a feed-forward layer, as config.json spells it."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU2 = "relu2"


def divides(small_name: str, small: int, large_name: str, large: int) -> None:
    """Raise ConfigError unless `small` divides `large`."""
    if large % small:
        raise ConfigError(f"{small_name} is {small}, which does not divide {large_name} ({large})")


def divided(name: str, units: int, ranks: int) -> int:
    """One rank's part of `units` that must be split evenly. Raises ConfigError."""
    if units % ranks:
        raise ConfigError(f"{name} is {units}, which {ranks} tensor-parallel ranks cannot share evenly")
    return units // ranks


def shared_out(name: str, units: int, ranks: int) -> int:
    """As `divided`, but fewer units than ranks are replicated."""
    try:
        return len(share(units, 0, ranks))
    except ValueError as error:
        raise ConfigError(f"{name} is {units}, which {ranks} tensor-parallel ranks cannot share: {error}") from error
