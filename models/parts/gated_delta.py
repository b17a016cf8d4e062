"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.parts.basics import Norm, Part, divided, divides, shared_out
from pools.spec import DType, Segment, TensorSpec


@dataclass(frozen=True, slots=True)
class GatedDelta(Part):
    """A short convolution over [q | k | v], then the gated delta rule.

    Each key head serves `value_heads / key_heads` consecutive value heads. `norm` acts on each head's output, before
    the gate. `write_scale` is the most that a token may write: 2 lets it turn what the state holds around.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm: Norm
    write_scale: float = 1.0

    def __post_init__(self) -> None:
        divides("linear_num_key_heads", self.key_heads, "linear_num_value_heads", self.value_heads)

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, k and v end to end."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def share(self, ranks: int) -> GatedDelta:  # noqa: D102
        return replace(
            self,
            key_heads=shared_out("linear_num_key_heads", self.key_heads, ranks),
            value_heads=divided("linear_num_value_heads", self.value_heads, ranks),
        )

    def slotted(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """The newest inputs of the convolution, and the delta rule's matrix per head in float32."""
        conv = (
            Segment("q", self.key_heads, self.key_dim),
            Segment("k", self.key_heads, self.key_dim),
            Segment("v", self.value_heads, self.value_dim),
        )
        recurrent = (self.value_heads, self.key_dim, self.value_dim)
        return (
            TensorSpec("conv", (self.conv_channels, self.conv_width - 1), dtype, 0, conv),
            TensorSpec("recurrent", recurrent, DType.FLOAT32, 0, (Segment("heads", self.value_heads),)),
        )
