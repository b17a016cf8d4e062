"""Multi-head latent attention (DeepSeek-V2 2024, arXiv:2405.04434)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.parts.basics import Norm, Part, divided
from pools.spec import DType, Segment, TensorSpec


@dataclass(frozen=True, slots=True)
class LatentAttention(Part):
    """Attention whose keys and values follow, for every head, from one latent vector a token.

    A key is `key_dim` channels out of the latent and `shared_dim` channels that are the same for all heads, without
    positions. `query_latent`: the width of a bottleneck for queries, if any. `norm` acts on the latents.
    """

    heads: int
    key_dim: int
    shared_dim: int
    value_dim: int
    latent: int
    query_latent: int | None
    norm: Norm
    bias: bool

    @property
    def query_dim(self) -> int:
        """Channels of a head's query and key."""
        return self.key_dim + self.shared_dim

    def share(self, ranks: int) -> LatentAttention:  # noqa: D102
        return replace(self, heads=divided("num_attention_heads", self.heads, ranks))

    def paged(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """The latent and the shared channels of one token: every rank has all of them."""
        widths = {"latent": self.latent, "shared": self.shared_dim}
        return tuple(
            TensorSpec(name, (width,), dtype, 0, (Segment(name, 1, width),)) for name, width in widths.items()
        )
