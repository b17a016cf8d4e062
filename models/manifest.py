"""Where the decoder's parameters lie on disk, as values: no torch, no files.

A parameter of the decoder is pieces of one or more stored tensors laid end to end, seen in the parameter's shape.
That one rule covers plain names, fused projections (q, k and v in one matrix), experts stored one by one or
together, projections that are interleaved head by head on disk, and what one tensor-parallel rank takes of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from models.architecture import Architecture
from pools.spec import share, share_unevenly


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the stored tensor `name`, whose shape on disk is `shape`: some positions along one of its axes.

    The stretch `begin` to `end` of that axis (all of it by default) forms `runs` equal runs; the piece is positions
    `start` to `stop` of every run (all by default), one after the other. These form `units` equal units (heads,
    groups, channels), which tensor-parallel ranks share out as `pools.spec.share` says, or where `uneven` as
    `share_unevenly`; 0: every rank takes all. `member` (i, n): ranks share n such pieces, of which this is the i-th.
    """

    name: str
    shape: tuple[int, ...]
    units: int = 0
    axis: int = 0
    begin: int = 0
    end: int | None = None
    runs: int = 1
    start: int = 0
    stop: int | None = None
    uneven: bool = False
    member: tuple[int, int] | None = None

    def spans(self, rank: int, ranks: int) -> list[range]:
        """The positions along `axis` that one rank takes, as runs of neighbours. Raises ValueError."""
        if self.member is not None and self.member[0] not in share(self.member[1], rank, ranks):
            return []
        stretch = (self.shape[self.axis] if self.end is None else self.end) - self.begin
        run = stretch // self.runs
        width = (run if self.stop is None else self.stop) - self.start
        first, last = 0, self.runs * width
        if self.units:
            mine = (share_unevenly if self.uneven else share)(self.units, rank, ranks)
            unit = last // self.units
            first, last = mine.start * unit, mine.stop * unit
        spans: list[range] = []
        while first < last:
            index, offset = divmod(first, width)
            length = min(width - offset, last - first)
            at = self.begin + index * run + self.start + offset
            if spans and spans[-1].stop == at:
                spans[-1] = range(spans[-1].start, at + length)
            else:
                spans.append(range(at, at + length))
            first += length
        return spans

    def numel(self, rank: int, ranks: int) -> int:
        """Elements that one rank takes."""
        across = prod(size for axis, size in enumerate(self.shape) if axis != self.axis)
        return across * sum(len(span) for span in self.spans(rank, ranks))


Manifest = Mapping[str, tuple[Piece, ...]]
Pieces = Iterator[tuple[str, tuple[Piece, ...]]]


@dataclass(frozen=True, slots=True)
class Names:
    """How a checkpoint spells the names outside the layers' bodies.

    `body` is the prefix of embedding, layers and norm; `norms` are the norms of a layer's blocks, in order, and
    `post_norms` those behind a body. None where a block has none.
    """

    body: str = "model."
    head: str = "lm_head.weight"
    embedding: str = "embed_tokens.weight"
    norm: str = "norm.weight"
    layers: str = "layers."
    norms: Sequence[str | None] = ("input_layernorm.weight", "post_attention_layernorm.weight")
    post_norms: Sequence[str | None] = (None, None)


def decoder_manifest(
    architecture: Architecture,
    names: Names | Callable[[int], Names],
    layer: Callable[[int, int, str, str], Pieces],
) -> Manifest:
    """The whole decoder.

    `layer(index, block, ours, disk)` yields the parameters of one block's body under these two prefixes, of which
    `disk` is the layer's. `names` may differ from layer to layer.
    """
    of_layer = names if callable(names) else lambda _: names
    outside = of_layer(0)
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    rows = Piece(f"{outside.body}{outside.embedding}", (vocab, hidden), units=vocab, uneven=True)
    manifest: dict[str, tuple[Piece, ...]] = {
        "embedding.weight": (rows,),
        "norm.weight": (Piece(f"{outside.body}{outside.norm}", (hidden,)),),
    }
    if not architecture.tied:
        manifest["head.weight"] = (Piece(outside.head, (vocab, hidden), units=vocab, uneven=True),)
    for index, described in enumerate(architecture.layers):
        spelled = of_layer(index)
        disk = f"{spelled.body}{spelled.layers}{index}."
        for number, block in enumerate(described.blocks):
            ours = f"layers.{index}.blocks.{number}."
            if block.norm:
                manifest[f"{ours}norm.weight"] = (Piece(f"{disk}{spelled.norms[number]}", (hidden,)),)
            if block.post_norm:
                manifest[f"{ours}post_norm.weight"] = (Piece(f"{disk}{spelled.post_norms[number]}", (hidden,)),)
            manifest.update(layer(index, number, f"{ours}body.", disk))
    return manifest
