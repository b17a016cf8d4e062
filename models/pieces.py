"""The spellings of parameters on disk that several families share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.manifest import Piece, Pieces
from models.parts.attention import Attention
from models.parts.feed_forward import Mlp, Moe
from models.parts.mamba1 import Mamba1
from models.parts.mamba2 import Mamba2


def attention_pieces(
    attention: Attention,
    hidden: int,
    ours: str,
    disk: str,
    *,
    out: str = "o_proj",
    norm: str = "norm",
    inputs: int | None = None,
) -> Pieces:
    """The spelling that nearly every family uses: `q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`.

    `inputs`: the width of what is projected, where it is not the hidden size.
    """
    dim = attention.head_dim
    queries = attention.heads * dim * (2 if attention.output_gate else 1)
    keys = attention.kv_heads * dim
    rows = {
        "q_proj": (queries, attention.heads),
        "k_proj": (keys, attention.kv_heads),
        "v_proj": (keys, attention.kv_heads),
    }
    width = inputs or hidden
    projections = [Piece(f"{disk}{name}.weight", (size, width), units=heads) for name, (size, heads) in rows.items()]
    yield f"{ours}qkv.weight", tuple(projections)
    shape = (hidden, attention.heads * dim)
    yield f"{ours}out.weight", (Piece(f"{disk}{out}.weight", shape, units=attention.heads, axis=1),)
    if attention.qkv_bias:
        biases = [Piece(f"{disk}{name}.bias", (size,), units=heads) for name, (size, heads) in rows.items()]
        yield f"{ours}qkv.bias", tuple(biases)
    if attention.out_bias:
        yield f"{ours}out.bias", (Piece(f"{disk}{out}.bias", (hidden,)),)
    if attention.qk_norm:
        for name, heads in {"q": attention.heads, "k": attention.kv_heads}.items():
            whole = attention.norm_over_heads
            piece = Piece(
                f"{disk}{name}_{norm}.weight", (heads * dim if whole else dim,), units=heads if whole else 0
            )
            yield f"{ours}{name}_norm.weight", (piece,)


@dataclass(frozen=True, slots=True)
class MlpNames:
    """How an MLP's matrices are called."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def mlp_pieces(mlp: Mlp, hidden: int, ours: str, disk: str, names: MlpNames = MlpNames()) -> Pieces:
    """Gate and up in tensors of their own."""
    size = mlp.intermediate
    rows = (names.gate, names.up) if mlp.gated else (names.up,)
    yield f"{ours}up.weight", tuple(Piece(f"{disk}{name}.weight", (size, hidden), units=size) for name in rows)
    yield f"{ours}down.weight", (Piece(f"{disk}{names.down}.weight", (hidden, size), units=size, axis=1),)
    if mlp.bias:
        yield f"{ours}up.bias", tuple(Piece(f"{disk}{name}.bias", (size,), units=size) for name in rows)
        yield f"{ours}down.bias", (Piece(f"{disk}{names.down}.bias", (hidden,)),)


def expert_pieces(moe: Moe, hidden: int, ours: str, disk: str, names: MlpNames = MlpNames()) -> Pieces:
    """Experts stored one by one: `{disk}N.gate_proj.weight` and so on."""
    count, size = moe.router.experts, moe.expert.intermediate
    rows = (names.gate, names.up) if moe.expert.gated else (names.up,)
    ups, downs = [], []
    for expert in range(count):
        member = (expert, count)
        ups += [Piece(f"{disk}{expert}.{name}.weight", (size, hidden), member=member) for name in rows]
        downs.append(Piece(f"{disk}{expert}.{names.down}.weight", (hidden, size), member=member))
    yield f"{ours}up", tuple(ups)
    yield f"{ours}down", tuple(downs)


def mamba2_pieces(mamba: Mamba2, hidden: int, ours: str, disk: str) -> Pieces:
    """The spelling of all families with Mamba2: `in_proj` gives [gate | x | B | C | step]."""
    heads, shared = mamba.heads, mamba.groups * mamba.state
    convolved = [(mamba.channels, heads), (shared, mamba.groups), (shared, mamba.groups)]
    inputs = [(mamba.channels, heads), *convolved, (heads, heads)]
    rows = sum(size for size, _ in inputs)
    yield f"{ours}input.weight", stretches(f"{disk}in_proj.weight", (rows, hidden), inputs)
    yield f"{ours}out.weight", (Piece(f"{disk}out_proj.weight", (hidden, mamba.channels), units=heads, axis=1),)
    if mamba.input_bias:
        yield f"{ours}input.bias", stretches(f"{disk}in_proj.bias", (rows,), inputs)
    if mamba.out_bias:
        yield f"{ours}out.bias", (Piece(f"{disk}out_proj.bias", (hidden,)),)
    shape = (mamba.conv_channels, 1, mamba.conv_width)
    yield f"{ours}conv.weight", stretches(f"{disk}conv1d.weight", shape, convolved)
    if mamba.conv_bias:
        yield f"{ours}conv.bias", stretches(f"{disk}conv1d.bias", shape[:1], convolved)
    for name, stored in {"log_rate": "A_log", "step_bias": "dt_bias", "skip": "D"}.items():
        yield f"{ours}{name}", (Piece(f"{disk}{stored}", (heads,), units=heads),)
    if mamba.norm:
        yield f"{ours}norm.weight", (Piece(f"{disk}norm.weight", (mamba.channels,), units=heads),)


def mamba1_pieces(mamba: Mamba1, hidden: int, ours: str, disk: str, norms: Sequence[str] = ()) -> Pieces:
    """The spelling of all families with Mamba. `norms`: names of those of time step, B, C, if weighted."""
    channels, small = mamba.channels, mamba.step_rank + 2 * mamba.state
    halves = [(channels, channels)] * 2
    yield f"{ours}input.weight", stretches(f"{disk}in_proj.weight", (2 * channels, hidden), halves)
    yield f"{ours}out.weight", (Piece(f"{disk}out_proj.weight", (hidden, channels), units=channels, axis=1),)
    if mamba.bias:
        yield f"{ours}input.bias", stretches(f"{disk}in_proj.bias", (2 * channels,), halves)
        yield f"{ours}out.bias", (Piece(f"{disk}out_proj.bias", (hidden,)),)
    conv = (channels, 1, mamba.conv_width)
    yield f"{ours}conv.weight", (Piece(f"{disk}conv1d.weight", conv, units=channels),)
    if mamba.conv_bias:
        yield f"{ours}conv.bias", (Piece(f"{disk}conv1d.bias", (channels,), units=channels),)
    yield f"{ours}select.weight", (Piece(f"{disk}x_proj.weight", (small, channels), units=channels, axis=1),)
    yield f"{ours}step.weight", (Piece(f"{disk}dt_proj.weight", (channels, mamba.step_rank), units=channels),)
    yield f"{ours}step.bias", (Piece(f"{disk}dt_proj.bias", (channels,), units=channels),)
    yield f"{ours}log_rate", (Piece(f"{disk}A_log", (channels, mamba.state), units=channels),)
    yield f"{ours}skip", (Piece(f"{disk}D", (channels,), units=channels),)
    for number, (name, width) in enumerate(zip(norms, (mamba.step_rank, mamba.state, mamba.state), strict=False)):
        yield f"{ours}norms.{number}.weight", (Piece(f"{disk}{name}.weight", (width,)),)


def stretches(name: str, shape: tuple[int, ...], parts: Sequence[tuple[int, int]]) -> tuple[Piece, ...]:
    """The first axis of one tensor as parts laid end to end, of (positions, units) each."""
    pieces, begin = [], 0
    for size, units in parts:
        pieces.append(Piece(name, shape, units=units, begin=begin, end=begin + size))
        begin += size
    return tuple(pieces)
