"""Mamba (Gu & Dao 2023, arXiv:2312.00752)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.parts.basics import Norm, Part, divided
from pools.spec import DType, Segment, TensorSpec


@dataclass(frozen=True, slots=True)
class Mamba1(Part):
    """A short convolution over x, then the selective scan: a channel has `state` numbers, each with its own decay.

    `step_rank`: the width through which time steps are projected. `norm`, if any, acts on time step, B and C, each on
    its own.
    """

    channels: int
    state: int
    step_rank: int
    conv_width: int
    conv_bias: bool
    bias: bool
    norm: Norm | None = None

    def share(self, ranks: int) -> Mamba1:  # noqa: D102
        return replace(self, channels=divided("the number of Mamba channels", self.channels, ranks))

    def slotted(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """The newest inputs of the convolution, and the scan's numbers in float32."""
        channels = (Segment("x", self.channels),)
        return (
            TensorSpec("conv", (self.channels, self.conv_width - 1), dtype, 0, channels),
            TensorSpec("ssm", (self.channels, self.state), DType.FLOAT32, 0, channels),
        )
