"""Kimi Delta Attention (Kimi Linear 2025, arXiv:2510.26692)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.parts.basics import Norm, Part, divided
from pools.spec import DType, Segment, TensorSpec


@dataclass(frozen=True, slots=True)
class KimiDelta(Part):
    """A short convolution over [q | k | v], then the gated delta rule with a decay for each channel of the keys.

    Decays and the output's gate come through projections of width `dim`. `norm` acts on each head's output, before
    the gate.
    """

    heads: int
    dim: int
    conv_width: int
    norm: Norm

    @property
    def channels(self) -> int:
        """Of q, of k and of v."""
        return self.heads * self.dim

    def share(self, ranks: int) -> KimiDelta:  # noqa: D102
        return replace(self, heads=divided("the number of linear attention heads", self.heads, ranks))

    def slotted(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """The newest inputs of the convolution, and the delta rule's matrix per head in float32."""
        conv = tuple(Segment(name, self.heads, self.dim) for name in ("q", "k", "v"))
        recurrent = (self.heads, self.dim, self.dim)
        return (
            TensorSpec("conv", (3 * self.channels, self.conv_width - 1), dtype, 0, conv),
            TensorSpec("recurrent", recurrent, DType.FLOAT32, 0, (Segment("heads", self.heads),)),
        )
