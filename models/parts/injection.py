"""A transformer block whose weights several layers share (Zamba2: Glorioso et al. 2024, arXiv:2411.15242)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.parts.attention import Attention
from models.parts.basics import Norm, Part
from models.parts.feed_forward import Mlp
from pools.spec import DType, TensorSpec


@dataclass(frozen=True, slots=True)
class Injection(Part):
    """linear(mlp(norm(attention(norm([x | e]))))), where e is the token's embedding and x what layers made of it.

    Blocks with the same `shared` number have the same weights, but for those of `linear` and of the adapters. These
    are products of two narrow matrices of rank `adapter_rank`, added to the MLP's first projection, and with
    `attention_adapters` to those of q, k and v. Each use has K and V of its own.
    """

    shared: int
    attention: Attention
    mlp: Mlp
    norm: Norm
    adapter_rank: int
    attention_adapters: bool

    def share(self, ranks: int) -> Injection:  # noqa: D102
        return replace(self, attention=self.attention.share(ranks), mlp=self.mlp.share(ranks))

    def paged(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """K and V of one token."""
        return self.attention.paged(dtype)
