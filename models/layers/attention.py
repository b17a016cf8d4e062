"""Grouped-query attention over paged K and V."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from models.batch import Batch
from models.layers.norms import GroupedRmsNorm, RmsNorm
from models.layers.ranks import Ranks, SumLinear
from models.layers.rotary import Rotations, rotate
from models.parts.attention import Attention


class AttentionLayer(nn.Module):
    """Projections around `attend_one` and `attend_many`.

    State: `k` and `v`, both (pages, page_size, kv_heads, head_dim).
    """

    def __init__(self, attention: Attention, hidden_size: int, ranks: Ranks, inputs: int | None = None) -> None:
        """`inputs`: the width of x, where it is not the hidden size."""
        super().__init__()
        if attention.qk_norm and attention.norm_over_heads:
            for name, heads in {"q_norm": attention.heads, "k_norm": attention.kv_heads}.items():
                setattr(self, name, GroupedRmsNorm(heads * attention.head_dim, 1, heads, attention.qk_norm, ranks))
        self.attention = attention = attention.share(ranks.size)
        head_dim, queries, keys = attention.head_dim, attention.heads, attention.kv_heads
        self.widths = [queries * head_dim * (2 if attention.output_gate else 1), keys * head_dim, keys * head_dim]
        self.qkv = nn.Linear(inputs or hidden_size, sum(self.widths), bias=attention.qkv_bias)
        self.out = SumLinear(queries * head_dim, hidden_size, bias=attention.out_bias, ranks=ranks)
        if attention.qk_norm and not attention.norm_over_heads:
            self.q_norm = RmsNorm(head_dim, attention.qk_norm)
            self.k_norm = RmsNorm(head_dim, attention.qk_norm)

    def forward(
        self, x: torch.Tensor, batch: Batch, state: Mapping[str, torch.Tensor], rotations: Rotations
    ) -> torch.Tensor:
        """(T, hidden) to (T, hidden); writes this step's k and v into their pages."""
        return self.attend(self.qkv(x), batch, state, rotations)

    def attend(
        self, projected: torch.Tensor, batch: Batch, state: Mapping[str, torch.Tensor], rotations: Rotations
    ) -> torch.Tensor:
        """As `forward`, from what `qkv` has given."""
        attention = self.attention
        q, k, v = torch.split(projected, self.widths, dim=-1)
        if attention.norm_over_heads:
            q, k = self.q_norm(q.float()).to(q.dtype), self.k_norm(k.float()).to(k.dtype)
        q, k, v = (part.reshape(len(part), -1, attention.head_dim) for part in (q, k, v))
        gate = None
        if attention.output_gate:
            q, gate = q.reshape(len(q), attention.heads, 2, -1).unbind(2)
        if attention.qk_norm and not attention.norm_over_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        if attention.rope:
            q, k = rotate(q, rotations[attention.rope]), rotate(k, rotations[attention.rope])
        state["k"][batch.write_pages, batch.write_offsets] = k
        state["v"][batch.write_pages, batch.write_offsets] = v

        def read(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return state["k"][pages], state["v"][pages]

        y = attend_paged(q, read, batch, state["k"].shape[1], attention.scale, attention.window)
        if gate is not None:
            y = y * torch.sigmoid(gate)
        output: torch.Tensor = self.out(y.flatten(1))
        return output


# Keys and values of pages: (…, pages) int64 to (…, pages, page_size, kv_heads, d and e).
ReadPages = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def attend_paged(
    q: torch.Tensor, read: ReadPages, batch: Batch, page_size: int, scale: float, window: int | None = None
) -> torch.Tensor:
    """Every token of the step attends to its request's context in the pages. q: (T, heads, d) to (T, heads, e)."""
    outputs = []
    if ones := batch.ones.count:
        keys, values = (part.flatten(1, 2) for part in read(batch.ones.pages))
        outputs.append(attend_one(q[:ones], keys, values, hide(batch.ones.unwritten, window), scale))
    for chunk in batch.longer:
        context = chunk.start + chunk.end - chunk.begin
        # Pages that lie wholly behind the first token's window are not read.
        unseen = max(0, chunk.start + 1 - window) // page_size if window else 0
        seen = slice(0, context - unseen * page_size)
        keys, values = (part.flatten(0, 1)[seen] for part in read(chunk.pages[unseen:]))
        outputs.append(attend_many(q[chunk.begin : chunk.end], keys, values, scale, window))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def hide(unwritten: torch.Tensor, window: int | None) -> torch.Tensor:
    """(B, L) bool: positions that a context's last token does not look at, given those `unwritten` behind it."""
    if window is None:
        return unwritten
    contexts = (~unwritten).sum(-1, keepdim=True)
    return unwritten | (torch.arange(unwritten.shape[1], device=unwritten.device) < contexts - window)


def attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query for each of B contexts.

    q: (B, heads, d); keys, values: (B, L, kv_heads, d and e), values changed in place; hidden: (B, L) bool, positions
    not to look at, which may hold any bytes, NaN too. Returns (B, heads, e).
    """
    batch, _, kv_heads, _ = keys.shape
    # Weights of hidden positions are 0, but 0 × NaN is NaN: the values have to go as well.
    values.masked_fill_(hidden[:, :, None, None], 0)
    grouped = q.reshape(batch, kv_heads, -1, q.shape[-1])
    scores = (grouped @ keys.permute(0, 2, 3, 1)).float() * scale
    scores.masked_fill_(hidden[:, None, None, :], -torch.inf)
    weights = scores.softmax(-1).to(values.dtype)
    return (weights @ values.transpose(1, 2)).reshape(batch, q.shape[1], -1)


def attend_many(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """The last T positions of one context attend to it, each to itself and what came before, within the window.

    q: (T, heads, d); keys, values: (L, kv_heads, d and e). Returns (T, heads, e).
    """
    tokens, context = len(q), len(keys)
    allowed = torch.ones(tokens, context, dtype=torch.bool, device=q.device).tril(context - tokens)
    if window is not None:
        allowed = allowed.triu(context - tokens - window + 1)
    q, keys, values = (part.transpose(0, 1)[None] for part in (q, keys, values))
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed, scale=scale, enable_gqa=True)
    return y[0].transpose(0, 1)


def attention_reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """As `attend_many`, token by token and head by head, straight from the definition."""
    output = torch.empty_like(q)
    group = q.shape[1] // keys.shape[1]
    for token in range(len(q)):
        context = len(keys) - len(q) + token + 1
        first = 0 if window is None else max(0, context - window)
        for head in range(q.shape[1]):
            scores = keys[first:context, head // group] @ q[token, head] * scale
            output[token, head] = scores.softmax(0) @ values[first:context, head // group]
    return output
