"""A whole decoder, as values: no weights, no torch.

A family turns config.json into an `Architecture`, and `models.decoder` runs any of them. Everything that
distinguishes one model from another is a field here or in one of `models.parts`; each part declares its own state.

    embedding × multiplier → layers, each a chain of blocks → norm → head ÷ logits_scaling
    block:  x + post_norm(body(norm(x + injection(x)))) × multiplier
"""

from __future__ import annotations

from dataclasses import dataclass

from models.parts.basics import Norm, Part
from models.parts.injection import Injection
from pools.spec import DType, PagedGroup, SlotGroup, StateSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class Block:
    """A part behind a norm (or before one, or both) and beside a residual.

    What an `injection` gives is added to the body's input, but not to the residual.
    """

    body: Part
    norm: Norm | None
    post_norm: Norm | None = None
    multiplier: float = 1.0
    injection: Injection | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything in it that may have state."""
        return (self.body, self.injection) if self.injection else (self.body,)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: usually a mixer, then a feed-forward layer. At most one block has paged state."""

    blocks: tuple[Block, ...]

    def paged(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """State that grows by token."""
        return tuple(tensor for block in self.blocks for part in block.parts for tensor in part.paged(dtype))

    def slotted(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """State of fixed size."""
        return tuple(tensor for block in self.blocks for part in block.parts for tensor in part.slotted(dtype))


@dataclass(frozen=True, slots=True)
class Architecture:
    """A whole decoder. `max_context_tokens` is the longest context that the model was made for.

    `logits_soft_cap` c: logits become c × tanh(logits / c).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    max_context_tokens: int
    layers: tuple[Layer, ...]
    norm: Norm
    tied: bool
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    logits_soft_cap: float | None = None

    def state_spec(self, dtype: DType) -> StateSpec:
        """What one request's state is made of when activations are `dtype`: one group for each kind of layer."""
        paged = _groups([layer.paged(dtype) for layer in self.layers])
        slots = _groups([layer.slotted(dtype) for layer in self.layers])
        return StateSpec(
            paged=tuple(PagedGroup(_group_name(tensors), layers, tensors) for tensors, layers in paged),
            slots=tuple(SlotGroup(_group_name(tensors), layers, tensors) for tensors, layers in slots),
        )

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError, naming the dimension, when `ranks` tensor-parallel ranks cannot share this model."""
        for layer in self.layers:
            for block in layer.blocks:
                for part in block.parts:
                    part.share(ranks)


_Tensors = tuple[TensorSpec, ...]


def _groups(declared: list[_Tensors]) -> list[tuple[_Tensors, tuple[int, ...]]]:
    layers: dict[_Tensors, list[int]] = {}
    for index, tensors in enumerate(declared):
        if tensors:
            layers.setdefault(tensors, []).append(index)
    return [(tensors, tuple(indices)) for tensors, indices in layers.items()]


def _group_name(tensors: _Tensors) -> str:
    return "+".join(tensor.name for tensor in tensors)
