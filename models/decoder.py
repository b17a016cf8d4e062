"""The one decoder: runs whatever an Architecture describes, on state that lies in the pools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from models.architecture import Architecture, Block, Layer
from models.batch import Batch
from models.layers.attention import AttentionLayer
from models.layers.gated_delta import GatedDeltaLayer
from models.layers.injection import InjectionLayer, SharedBlock
from models.layers.kimi_delta import KimiDeltaLayer
from models.layers.latent_attention import LatentAttentionLayer
from models.layers.mamba1 import Mamba1Layer
from models.layers.mamba2 import Mamba2Layer
from models.layers.mlp import MlpLayer
from models.layers.moe import MoeLayer
from models.layers.norms import RmsNorm
from models.layers.parallel import ParallelLayer
from models.layers.ranks import SINGLE, Ranks, SharedEmbedding
from models.layers.rotary import Rotations, rotation
from models.layers.short_conv import ShortConvLayer
from models.parts.attention import Attention
from models.parts.basics import Part, Rope
from models.parts.feed_forward import Mlp, Moe
from models.parts.gated_delta import GatedDelta
from models.parts.injection import Injection
from models.parts.kimi_delta import KimiDelta
from models.parts.latent_attention import LatentAttention
from models.parts.mamba1 import Mamba1
from models.parts.mamba2 import Mamba2
from models.parts.parallel import Parallel
from models.parts.short_conv import ShortConv

LayerState = Mapping[str, torch.Tensor]  # a layer's state tensors by name: all pages, or all slots


class DecoderBlock(nn.Module):
    """A mixer or feed-forward layer, behind a norm, before one or both, and beside a residual."""

    def __init__(self, block: Block, hidden: int, ranks: Ranks, shared: dict[int, SharedBlock]) -> None:
        super().__init__()
        self.multiplier = block.multiplier
        self.injection = _injection(block.injection, hidden, ranks, shared) if block.injection else None
        self.norm = RmsNorm(hidden, block.norm) if block.norm else None
        self.body = make_layer(block.body, hidden, ranks)
        self.post_norm = RmsNorm(hidden, block.post_norm) if block.post_norm else None
        self.mixes = not isinstance(block.body, Mlp | Moe)

    def forward(
        self, x: torch.Tensor, embedded: torch.Tensor, batch: Batch, state: LayerState, rotations: Rotations
    ) -> torch.Tensor:
        """(T, hidden) to (T, hidden)."""
        y = x + self.injection(x, embedded, batch, state, rotations) if self.injection else x
        y = self.norm(y) if self.norm else y
        y = self.body(y, batch, state, rotations) if self.mixes else self.body(y)
        return torch.add(x, self.post_norm(y) if self.post_norm else y, alpha=self.multiplier)


def _injection(part: Injection, hidden: int, ranks: Ranks, shared: dict[int, SharedBlock]) -> InjectionLayer:
    """One use of a shared block, whose weights the first use makes."""
    if part.shared not in shared:
        shared[part.shared] = SharedBlock(part, hidden, ranks)
    return InjectionLayer(part, shared[part.shared], hidden, ranks)


class DecoderLayer(nn.Module):
    """A chain of blocks that share one layer's state."""

    def __init__(self, layer: Layer, hidden: int, ranks: Ranks, shared: dict[int, SharedBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecoderBlock(block, hidden, ranks, shared) for block in layer.blocks)

    def forward(
        self, x: torch.Tensor, embedded: torch.Tensor, batch: Batch, state: LayerState, rotations: Rotations
    ) -> torch.Tensor:
        """(T, hidden) to (T, hidden)."""
        for block in self.blocks:
            x = block(x, embedded, batch, state, rotations)
        return x


class Decoder(nn.Module):
    """Embedding, layers, head. Parameters are left unset: `models.weights` fills them.

    `ranks`: this process's place in a tensor-parallel group, which decides its part of every layer.
    """

    def __init__(self, architecture: Architecture, ranks: Ranks = SINGLE) -> None:
        super().__init__()
        hidden, vocab = architecture.hidden_size, architecture.vocab_size
        self.architecture = architecture
        self.ranks = ranks
        self.embedding = SharedEmbedding(vocab, hidden, ranks)
        shared: dict[int, SharedBlock] = {}
        self.layers = nn.ModuleList(DecoderLayer(layer, hidden, ranks, shared) for layer in architecture.layers)
        self.norm = RmsNorm(hidden, architecture.norm)
        self._ropes = set(_ropes(architecture))
        if not architecture.tied:
            self.head = SharedEmbedding(vocab, hidden, ranks)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embedding.weight.dtype

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> torch.Tensor:
        """Logits after each chunk's last token: (B, vocab) float32. Reads and writes `states`, one for each layer."""
        architecture = self.architecture
        x = embedded = self.embedding(batch.token_ids) * architecture.embedding_multiplier
        rotations = {rope: rotation(rope, batch.positions, x.dtype) for rope in self._ropes}
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, embedded, batch, state, rotations)
        x = self.norm(x[batch.last])
        head = self.embedding if architecture.tied else self.head
        logits = head.logits(x).float() / architecture.logits_scaling
        cap = architecture.logits_soft_cap
        return cap * torch.tanh(logits / cap) if cap else logits


def make_layer(part: Part, hidden: int, ranks: Ranks) -> nn.Module:
    """The layer that computes a part. All but feed-forward layers are called with (x, batch, state, rotations)."""
    match part:
        case Attention():
            return AttentionLayer(part, hidden, ranks)
        case GatedDelta():
            return GatedDeltaLayer(part, hidden, ranks)
        case KimiDelta():
            return KimiDeltaLayer(part, hidden, ranks)
        case LatentAttention():
            return LatentAttentionLayer(part, hidden, ranks)
        case Mamba1():
            return Mamba1Layer(part, hidden, ranks)
        case ShortConv():
            return ShortConvLayer(part, hidden, ranks)
        case Mamba2():
            return Mamba2Layer(part, hidden, ranks)
        case Mlp():
            return MlpLayer(part, hidden, ranks)
        case Moe():
            return MoeLayer(part, hidden, ranks)
        case Parallel():
            return ParallelLayer(part, [make_layer(branch.body, hidden, ranks) for branch in part.branches])
    raise TypeError(f"no layer computes a {type(part).__name__}")


def _ropes(architecture: Architecture) -> Iterator[Rope]:
    """Every distinct rotary embedding, computed once a step."""
    parts: list[Part] = [part for layer in architecture.layers for block in layer.blocks for part in block.parts]
    while parts:
        part = parts.pop()
        if isinstance(part, Parallel):
            parts += [branch.body for branch in part.branches]
        elif isinstance(part, Injection):
            parts.append(part.attention)
        elif isinstance(part, Attention) and part.rope:
            yield part.rope
