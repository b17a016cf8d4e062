"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.parts.basics import Norm, Part, Rope, divided, divides, shared_out
from pools.spec import DType, Segment, TensorSpec


@dataclass(frozen=True, slots=True)
class Attention(Part):
    """Attention over the whole context, or over the last `window` tokens (the present one among them).

    `qk_norm` normalises every head of q and k before the rotation, or with `norm_over_heads` all heads as one. With
    `output_gate` the query projection gives [q | gate] for each head and the output is multiplied by sigmoid(gate).
    No `rope` means no positions at all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    qk_norm: Norm | None = None
    norm_over_heads: bool = False
    output_gate: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        divides("num_key_value_heads", self.kv_heads, "num_attention_heads", self.heads)

    def share(self, ranks: int) -> Attention:  # noqa: D102
        return replace(
            self,
            heads=divided("num_attention_heads", self.heads, ranks),
            kv_heads=shared_out("num_key_value_heads", self.kv_heads, ranks),
        )

    def paged(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """K and V of one token."""
        shape = (self.kv_heads, self.head_dim)
        segments = (Segment("heads", self.kv_heads),)
        return tuple(TensorSpec(name, shape, dtype, 0, segments) for name in ("k", "v"))
