"""Where the decoder's parameters lie on disk, as values: no torch, no files.

A parameter of the decoder is the rows of one or more stored tensors laid end to end, seen in the parameter's shape.
That one rule covers plain names, fused projections (q, k and v in one matrix), experts stored one by one or
together, and projections that are interleaved head by head on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from models.architecture import Architecture, Attention, Mlp


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of the stored tensor `name`, whose shape on disk is `shape`.

    The rows form `groups` equal runs; the piece is rows `start` to `stop` of every run (all rows by default).
    """

    name: str
    shape: tuple[int, ...]
    groups: int = 1
    start: int = 0
    stop: int | None = None

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        run = self.shape[0] // self.groups
        rows = (run if self.stop is None else self.stop) - self.start
        return self.groups * rows * prod(self.shape[1:])


Manifest = Mapping[str, tuple[Piece, ...]]
Pieces = Iterator[tuple[str, tuple[Piece, ...]]]


@dataclass(frozen=True, slots=True)
class Names:
    """How a checkpoint spells the names outside the layers. `body` is the prefix of embedding, layers and norm."""

    body: str
    head: str = "lm_head.weight"


def decoder_manifest(architecture: Architecture, names: Names, layer: Callable[[int, str, str], Pieces]) -> Manifest:
    """The whole decoder. `layer(index, ours, disk)` yields one layer's parameters under these two prefixes."""
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    manifest: dict[str, tuple[Piece, ...]] = {
        "embedding.weight": (Piece(f"{names.body}embed_tokens.weight", (vocab, hidden)),),
        "norm.weight": (Piece(f"{names.body}norm.weight", (hidden,)),),
    }
    if not architecture.tied:
        manifest["head.weight"] = (Piece(names.head, (vocab, hidden)),)
    for index in range(len(architecture.layers)):
        ours, disk = f"layers.{index}.", f"{names.body}layers.{index}."
        manifest[f"{ours}mixer_norm.weight"] = (Piece(f"{disk}input_layernorm.weight", (hidden,)),)
        manifest[f"{ours}feed_forward_norm.weight"] = (Piece(f"{disk}post_attention_layernorm.weight", (hidden,)),)
        manifest.update(layer(index, ours, disk))
    return manifest


def attention_pieces(attention: Attention, hidden: int, ours: str, disk: str) -> Pieces:
    """The spelling that nearly every family uses: `q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`."""
    dim = attention.head_dim
    queries = attention.heads * dim * (2 if attention.output_gate else 1)
    keys = attention.kv_heads * dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    yield f"{ours}qkv.weight", tuple(Piece(f"{disk}{name}.weight", (size, hidden)) for name, size in rows.items())
    yield f"{ours}out.weight", (Piece(f"{disk}o_proj.weight", (hidden, attention.heads * dim)),)
    if attention.bias:
        yield f"{ours}qkv.bias", tuple(Piece(f"{disk}{name}.bias", (size,)) for name, size in rows.items())
        yield f"{ours}out.bias", (Piece(f"{disk}o_proj.bias", (hidden,)),)
    if attention.qk_norm:
        yield f"{ours}q_norm.weight", (Piece(f"{disk}q_norm.weight", (dim,)),)
        yield f"{ours}k_norm.weight", (Piece(f"{disk}k_norm.weight", (dim,)),)


def mlp_pieces(mlp: Mlp, hidden: int, ours: str, disk: str) -> Pieces:
    """`gate_proj`, `up_proj` and `down_proj`."""
    rows = ("gate_proj", "up_proj")
    yield f"{ours}gate_up.weight", tuple(Piece(f"{disk}{name}.weight", (mlp.intermediate, hidden)) for name in rows)
    yield f"{ours}down.weight", (Piece(f"{disk}down_proj.weight", (hidden, mlp.intermediate)),)
    if mlp.bias:
        yield f"{ours}gate_up.bias", tuple(Piece(f"{disk}{name}.bias", (mlp.intermediate,)) for name in rows)
        yield f"{ours}down.bias", (Piece(f"{disk}down_proj.bias", (hidden,)),)
