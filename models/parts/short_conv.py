"""The gated short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.parts.basics import Part, divided
from pools.spec import DType, Segment, TensorSpec


@dataclass(frozen=True, slots=True)
class ShortConv(Part):
    """C × conv(B × x) of [B | C | x], channel by channel; its only state is the convolution's window."""

    channels: int
    conv_width: int
    bias: bool

    def share(self, ranks: int) -> ShortConv:  # noqa: D102
        return replace(self, channels=divided("hidden_size", self.channels, ranks))

    def slotted(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """The newest inputs of the convolution."""
        shape = (self.channels, self.conv_width - 1)
        return (TensorSpec("conv", shape, dtype, 0, (Segment("x", self.channels),)),)
