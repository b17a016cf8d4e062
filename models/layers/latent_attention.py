"""Multi-head latent attention (DeepSeek-V2 2024, arXiv:2405.04434), as in Kimi Linear: without positions.

Keys and values are never expanded. What would make a head's key out of a latent is applied to the query instead, and
what would make its value, to the sum of latents; so attention runs on latents, with one K/V head for all heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from models.batch import Batch
from models.layers.attention import attend_paged
from models.layers.norms import RmsNorm
from models.layers.ranks import Ranks, SumLinear
from models.layers.rotary import Rotations
from models.parts.latent_attention import LatentAttention


class LatentAttentionLayer(nn.Module):
    """State: `latent` (pages, page_size, latent) and `shared` (pages, page_size, shared_dim)."""

    def __init__(self, part: LatentAttention, hidden_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.attention = attention = part.share(ranks.size)
        queries = attention.heads * attention.query_dim
        if attention.query_latent:
            self.query_in = nn.Linear(hidden_size, attention.query_latent, bias=attention.bias)
            self.query_norm = RmsNorm(attention.query_latent, attention.norm)
        self.query = nn.Linear(attention.query_latent or hidden_size, queries, bias=False)
        self.compress = nn.Linear(hidden_size, attention.latent + attention.shared_dim, bias=attention.bias)
        self.norm = RmsNorm(attention.latent, attention.norm)
        self.to_key = nn.Parameter(torch.empty(attention.heads, attention.key_dim, attention.latent))
        self.to_value = nn.Parameter(torch.empty(attention.heads, attention.value_dim, attention.latent))
        self.out = SumLinear(attention.heads * attention.value_dim, hidden_size, bias=attention.bias, ranks=ranks)

    def forward(
        self, x: torch.Tensor, batch: Batch, state: Mapping[str, torch.Tensor], rotations: Rotations
    ) -> torch.Tensor:
        """(T, hidden) to (T, hidden); writes this step's latents into their pages."""
        attention = self.attention
        latent, shared = torch.split(self.compress(x), [attention.latent, attention.shared_dim], dim=-1)
        state["latent"][batch.write_pages, batch.write_offsets] = self.norm(latent)
        state["shared"][batch.write_pages, batch.write_offsets] = shared

        def read(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            latents = state["latent"][pages].unsqueeze(-2)
            return torch.cat([latents, state["shared"][pages].unsqueeze(-2)], dim=-1), latents

        y = attend_paged(self._queries(x), read, batch, state["latent"].shape[1], attention.query_dim**-0.5)
        output: torch.Tensor = self.out(torch.einsum("thl,hvl->thv", y, self.to_value).flatten(1))
        return output

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        """(T, heads, latent + shared_dim): queries for latents and shared channels."""
        attention = self.attention
        x = self.query_norm(self.query_in(x)) if attention.query_latent else x
        q = self.query(x).reshape(len(x), attention.heads, attention.query_dim)
        own, shared = torch.split(q, [attention.key_dim, attention.shared_dim], dim=-1)
        return torch.cat([torch.einsum("thk,hkl->thl", own, self.to_key), shared], dim=-1)
