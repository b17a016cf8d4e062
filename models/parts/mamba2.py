"""Mamba2 (Dao & Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.parts.basics import Norm, Part, divided, divides, shared_out
from pools.spec import DType, Segment, TensorSpec


@dataclass(frozen=True, slots=True)
class Mamba2(Part):
    """A short convolution over [x | B | C], then the selective state space scan.

    Each of `groups` pairs (B, C) serves `heads / groups` consecutive heads. `step_limits` bound the time step.
    `norm`, if any, acts on each group of channels, after the gate or with `norm_before_gate` before it.
    `multipliers` scale what the input projection gives: gate, x, B, C and time step (Falcon-H1).
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    conv_width: int
    step_limits: tuple[float, float]
    norm: Norm | None
    conv_bias: bool
    input_bias: bool
    out_bias: bool
    norm_before_gate: bool = False
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        divides("the number of Mamba groups", self.groups, "the number of Mamba heads", self.heads)

    @property
    def channels(self) -> int:
        """Channels of x, of the gate and of the output."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x, B and C end to end."""
        return self.channels + 2 * self.groups * self.state

    def share(self, ranks: int) -> Mamba2:  # noqa: D102
        return replace(
            self,
            heads=divided("the number of Mamba heads", self.heads, ranks),
            groups=shared_out("the number of Mamba groups", self.groups, ranks),
        )

    def slotted(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """The newest inputs of the convolution, and the state space's matrix per head in float32."""
        conv = (
            Segment("x", self.heads, self.head_dim),
            Segment("B", self.groups, self.state),
            Segment("C", self.groups, self.state),
        )
        ssm = (self.heads, self.head_dim, self.state)
        return (
            TensorSpec("conv", (self.conv_channels, self.conv_width - 1), dtype, 0, conv),
            TensorSpec("ssm", ssm, DType.FLOAT32, 0, (Segment("heads", self.heads),)),
        )
