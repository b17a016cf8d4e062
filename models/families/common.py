"""What the families of plain decoders share: attention, then a feed-forward layer, in the spelling of Llama."""

from __future__ import annotations

from collections.abc import Callable, Collection

from models.architecture import Architecture
from models.config import Config
from models.errors import ConfigError
from models.manifest import Manifest, Names, Piece, Pieces, decoder_manifest
from models.parts.attention import Attention
from models.parts.feed_forward import Mlp, Moe
from models.pieces import attention_pieces, expert_pieces, mlp_pieces

LLAMA_NAMES = Names()
# Old checkpoints store the rotary frequencies, which follow from config.json.
IGNORED = r".*\.rotary_emb\.inv_freq"


NO_POSITIONS = 1 << 20
"""The longest context of a model that knows no positions: none is too long for it, but waiting has to be bounded."""


def mamba_names(stored: Collection[str]) -> Names:
    """`backbone.*` with `embeddings` (or `embedding`, in the first checkpoints) and `norm_f`; one norm a layer."""
    body = "model." if any(name.startswith("model.") for name in stored) else "backbone."
    embedding = "embedding.weight" if f"{body}embedding.weight" in stored else "embeddings.weight"
    return Names(body, embedding=embedding, norm="norm_f.weight", norms=("norm.weight",), post_norms=(None,))


def heads_of(config: Config, *, hidden: int, heads: int, kv_heads: int | None = None) -> tuple[int, int, int]:
    """Heads, K/V heads and the size of a head, which may follow from the others. Defaults are the family's."""
    heads = config.integer("num_attention_heads", heads)
    head_dim = config.integer("head_dim", max(1, config.integer("hidden_size", hidden) // heads))
    return heads, config.integer("num_key_value_heads", kv_heads or heads), head_dim


def layer_types(
    config: Config, implemented: Collection[str], default: Callable[[int], str], layers: int
) -> list[str]:
    """The kind of every layer: `layer_types`, or else `default(index)`. Raises ConfigError for unknown ones."""
    kinds = list(config.strings("layer_types", tuple(default(index) for index in range(layers))))
    if len(kinds) != layers:
        raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
    if unknown := set(kinds) - set(implemented):
        raise ConfigError(f"layer_types has {sorted(unknown)}; implemented: {', '.join(implemented)}")
    return kinds


def plain_manifest(architecture: Architecture, stored: Collection[str], names: Names = LLAMA_NAMES) -> Manifest:
    """`self_attn.*`, and `mlp.*`, which is an MLP or a mixture of experts with its router `gate`."""
    hidden = architecture.hidden_size

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body = architecture.layers[index].blocks[block].body
        if isinstance(body, Attention):
            yield from attention_pieces(body, hidden, ours, f"{disk}self_attn.")
        elif isinstance(body, Mlp):
            yield from mlp_pieces(body, hidden, ours, f"{disk}mlp.")
        elif isinstance(body, Moe):
            yield from gated_moe_pieces(body, hidden, ours, f"{disk}mlp.", stored)

    return decoder_manifest(architecture, names, layer)


def gated_moe_pieces(moe: Moe, hidden: int, ours: str, disk: str, stored: Collection[str]) -> Pieces:
    """A router `gate` and experts `experts`, one by one or all in one tensor, as `stored` shows."""
    experts, size = moe.router.experts, moe.expert.intermediate
    yield f"{ours}router.weight", (Piece(f"{disk}gate.weight", (experts, hidden)),)
    if f"{disk}experts.gate_up_proj" in stored:
        yield f"{ours}up", (Piece(f"{disk}experts.gate_up_proj", (experts, 2 * size, hidden), units=experts),)
        yield f"{ours}down", (Piece(f"{disk}experts.down_proj", (experts, hidden, size), units=experts),)
    else:
        yield from expert_pieces(moe, hidden, ours, f"{disk}experts.")
