"""What one request's state is made of, declared by the model and read by everything else.

A `StateSpec` holds *paged groups* (tensors that grow by token: K and V) and *slot groups* (tensors of a fixed
shape per request: convolution windows, recurrent states). Sizes, layouts, hand-offs and handshakes follow from it
alone, so a new model family changes nothing in `pools` or `transfer`.

A family declares the shapes of the whole model; `of_rank` gives those of one tensor-parallel rank. Sizes are in bytes
unless a name says otherwise.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from enum import Enum
from math import prod


class DType(Enum):
    """A tensor's element type, named as torch names it, without needing torch."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT32 = "int32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 2 if self in (DType.BFLOAT16, DType.FLOAT16) else 4


def share(units: int, rank: int, ranks: int) -> range:
    """The units (heads, groups) of one of `ranks` tensor-parallel ranks: equal shares, in order.

    With fewer units than ranks each unit is replicated over neighbouring ranks. Raises ValueError when neither
    number divides the other.
    """
    if units % ranks and ranks % units:
        raise ValueError(f"neither of {units} and {ranks} divides the other")
    if units >= ranks:
        each = units // ranks
        return range(rank * each, (rank + 1) * each)
    return range(rank * units // ranks, rank * units // ranks + 1)


@dataclass(frozen=True, slots=True)
class TpRank:
    """A place among the `size` tensor-parallel ranks of one worker."""

    rank: int = 0
    size: int = 1


def share_unevenly(units: int, rank: int, ranks: int) -> range:
    """The same for units of any number, a vocabulary's tokens: the last ranks have fewer, or none."""
    each = -(-units // ranks)
    return range(min(rank * each, units), min((rank + 1) * each, units))


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a sharded axis that is split on its own: `units` heads or groups of `width` channels each.

    A convolution over [x|B|C] has three. Ranks share out whole units; with fewer units than ranks, units replicate.
    """

    name: str
    units: int
    width: int = 1

    @property
    def size(self) -> int:
        """Elements along the axis."""
        return self.units * self.width


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One state tensor: per token in a paged group, per request in a slot group.

    `axis` is the dimension that tensor parallelism splits; `segments` lie end to end along it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    axis: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.axis < len(self.shape):
            raise ValueError(f"tensor {self.name!r}: axis {self.axis} is not in shape {self.shape}")
        covered = sum(segment.size for segment in self.segments)
        if covered != self.shape[self.axis]:
            raise ValueError(
                f"tensor {self.name!r}: segments cover {covered} of {self.shape[self.axis]} "
                f"elements along axis {self.axis}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of one token's (paged) or one request's (slot) worth of this tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def of_rank(self, rank: int, ranks: int) -> TensorSpec:
        """One tensor-parallel rank's part. Raises ValueError when ranks cannot share a segment."""
        parts = [len(share(segment.units, rank, ranks)) for segment in self.segments]
        segments = tuple(replace(segment, units=units) for segment, units in zip(self.segments, parts, strict=True))
        shape = list(self.shape)
        shape[self.axis] = sum(segment.size for segment in segments)
        return replace(self, shape=tuple(shape), segments=segments)


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Layers whose tensors grow by one entry a token. `window`: how many tokens back attention looks, if bounded."""

    name: str
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers of the group."""
        return len(self.layers) * sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Layers whose tensors have one fixed shape per request."""

    name: str
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one request takes over all layers of the group."""
        return len(self.layers) * sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Everything that one request's state is made of."""

    paged: tuple[PagedGroup, ...] = ()
    slots: tuple[SlotGroup, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Paged bytes per token, over all groups and layers, before any alignment."""
        return sum(group.bytes_per_token for group in self.paged)

    @property
    def bytes_per_slot(self) -> int:
        """Slot bytes per request, over all groups and layers, before any alignment."""
        return sum(group.bytes_per_slot for group in self.slots)

    def of_rank(self, rank: int, ranks: int) -> StateSpec:
        """What one tensor-parallel rank keeps of it. Raises ValueError when ranks cannot share it."""

        def part(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            return tuple(tensor.of_rank(rank, ranks) for tensor in tensors)

        return StateSpec(
            tuple(replace(group, tensors=part(group.tensors)) for group in self.paged),
            tuple(replace(group, tensors=part(group.tensors)) for group in self.slots),
        )

    def digest(self) -> str:
        """A short name for this exact declaration; equal digests mean equal specs."""
        text = json.dumps(asdict(self), default=lambda dtype: dtype.value, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
