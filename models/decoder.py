"""The one decoder: runs whatever an Architecture describes, on state that lies in the pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from models.architecture import Architecture, Attention, FeedForward, GatedDelta, Layer, Mamba2, Mixer, Mlp, Moe, Rope
from models.batch import Batch
from models.layers.attention import AttentionLayer
from models.layers.gated_delta import GatedDeltaLayer
from models.layers.mamba2 import Mamba2Layer
from models.layers.mlp import MlpLayer
from models.layers.moe import MoeLayer
from models.layers.norms import RmsNorm
from models.layers.rotary import Rotation, rotation

LayerState = Mapping[str, torch.Tensor]  # a layer's state tensors by name: all pages, or all slots


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, layer: Layer, architecture: Architecture) -> None:
        super().__init__()
        hidden = architecture.hidden_size
        self.rope = layer.mixer.rope if isinstance(layer.mixer, Attention) else None
        self.multiplier = architecture.residual_multiplier
        self.mixer_norm = RmsNorm(hidden, architecture.norm)
        self.mixer = _mixer(layer.mixer, hidden)
        self.feed_forward_norm = RmsNorm(hidden, architecture.norm)
        self.feed_forward = _feed_forward(layer.feed_forward, hidden)

    def forward(
        self, x: torch.Tensor, batch: Batch, state: LayerState, rotations: Mapping[Rope, Rotation]
    ) -> torch.Tensor:
        """(T, hidden) to (T, hidden)."""
        by = rotations[self.rope] if self.rope else None
        x = torch.add(x, self.mixer(self.mixer_norm(x), batch, state, by), alpha=self.multiplier)
        return torch.add(x, self.feed_forward(self.feed_forward_norm(x)), alpha=self.multiplier)


class Decoder(nn.Module):
    """Embedding, layers, head. Parameters are left unset: `models.weights` fills them."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, vocab = architecture.hidden_size, architecture.vocab_size
        self.architecture = architecture
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(DecoderLayer(layer, architecture) for layer in architecture.layers)
        self.norm = RmsNorm(hidden, architecture.norm)
        mixers = [layer.mixer for layer in architecture.layers]
        self._ropes = {mixer.rope for mixer in mixers if isinstance(mixer, Attention) and mixer.rope}
        if not architecture.tied:
            self.head = nn.Linear(hidden, vocab, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embedding.weight.dtype

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> torch.Tensor:
        """Logits after each chunk's last token: (B, vocab) float32. Reads and writes `states`, one for each layer."""
        architecture = self.architecture
        x = self.embedding(batch.token_ids) * architecture.embedding_multiplier
        rotations = {rope: rotation(rope, batch.positions, x.dtype) for rope in self._ropes}
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, batch, state, rotations)
        x = self.norm(x[batch.last])
        head = self.embedding if architecture.tied else self.head
        return nn.functional.linear(x, head.weight).float() / architecture.logits_scaling


def _mixer(mixer: Mixer, hidden: int) -> nn.Module:
    match mixer:
        case Attention():
            return AttentionLayer(mixer, hidden)
        case GatedDelta():
            return GatedDeltaLayer(mixer, hidden)
        case Mamba2():
            return Mamba2Layer(mixer, hidden)


def _feed_forward(feed_forward: FeedForward, hidden: int) -> nn.Module:
    match feed_forward:
        case Mlp():
            return MlpLayer(feed_forward, hidden)
        case Moe():
            return MoeLayer(feed_forward, hidden)
