"""Zamba2: Mamba2 in every layer; some take in what one of a few shared transformer blocks makes of their input."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from models.architecture import Architecture, Block, Layer
from models.config import Config
from models.families.common import IGNORED, heads_of, layer_types
from models.families.family import Family
from models.manifest import Manifest, Names, Piece, Pieces, decoder_manifest
from models.parts.attention import Attention
from models.parts.basics import Activation, Norm
from models.parts.feed_forward import Mlp
from models.parts.injection import Injection
from models.parts.mamba2 import Mamba2
from models.pieces import attention_pieces, mamba2_pieces, stretches
from models.rope import read_rope

MAMBA, HYBRID = "linear_attention", "hybrid"
DEFAULT = (MAMBA, *((MAMBA,) * 5 + (HYBRID,)) * 7, *(MAMBA,) * 4, HYBRID, *(MAMBA,) * 3, HYBRID, *(MAMBA,) * 2)
OUTPUT_NORM = Norm(1e-5)  # of the Mamba layers, whatever the file says


def architecture(config: Config) -> Architecture:
    """Defaults are those of `transformers.Zamba2Config`."""
    config.one_of("use_long_context", False, False)
    hidden = config.integer("hidden_size", 2560)
    norm = Norm(config.number("rms_norm_eps", 1e-5))
    max_positions = config.integer("max_position_embeddings", 4096)
    mamba = _mamba(config, hidden)
    tied = config.flag("tie_word_embeddings", True)
    # transformers ties blocks where it ties embeddings; otherwise every use has a block of its own.
    kinds = _kinds(config)
    blocks = config.integer("num_mem_blocks", 1) if tied else max(1, kinds.count(HYBRID))
    uses = 0
    layers: list[Layer] = []
    for kind in kinds:
        injection = _injection(config, hidden, norm, max_positions, uses % blocks) if kind == HYBRID else None
        uses += injection is not None
        layers.append(Layer((Block(mamba, norm, injection=injection),)))
    return Architecture(
        model_type="zamba2",
        vocab_size=config.integer("vocab_size", 32000),
        hidden_size=hidden,
        max_context_tokens=max_positions,
        layers=tuple(layers),
        norm=norm,
        tied=tied,
    )


def _kinds(config: Config) -> list[str]:
    named = config.strings("layers_block_type", config.strings("layer_types", DEFAULT))
    kinds = tuple(MAMBA if kind == "mamba" else kind for kind in named)
    layers = config.integer("num_hidden_layers", 54)
    return layer_types(Config({"layer_types": kinds}), (MAMBA, HYBRID), lambda _: MAMBA, layers)


def _mamba(config: Config, hidden: int) -> Mamba2:
    channels = config.integer("mamba_expand", 2) * hidden
    heads = config.integer("n_mamba_heads", 8)
    if channels % heads:
        config.refuse("n_mamba_heads", f"it must divide {channels} channels")
    bias = config.flag("add_bias_linear", False)
    return Mamba2(
        heads=heads,
        head_dim=channels // heads,
        state=config.integer("mamba_d_state", 64),
        groups=config.integer("mamba_ngroups", 1),
        conv_width=config.integer("mamba_d_conv", 4, minimum=2),
        # transformers' full forward has a floor; its cached step has none. The full forward holds.
        step_limits=(config.number("time_step_min", 0.001), float("inf")),
        norm=OUTPUT_NORM,
        conv_bias=True,  # use_conv_bias is read by nobody
        input_bias=bias,
        out_bias=bias,
    )


def _injection(config: Config, hidden: int, norm: Norm, max_positions: int, shared: int) -> Injection:
    heads, kv_heads, _ = heads_of(config, hidden=hidden, heads=32)
    head_dim = 2 * hidden // heads
    adapters = config.flag("use_shared_attention_adapter", False)
    if adapters and kv_heads != heads:
        config.refuse("num_key_value_heads", f"attention adapters need as many as there are heads, {heads}")
    activation = Activation(config.one_of("hidden_act", "gelu", *(kind.value for kind in Activation)))
    return Injection(
        shared=shared,
        attention=Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=(head_dim / 2) ** -0.5,
            rope=read_rope(config, head_dim, max_positions) if config.flag("use_mem_rope", False) else None,
        ),
        mlp=Mlp(
            config.integer("intermediate_size", 4 * hidden), activation, bias=config.flag("add_bias_linear", False)
        ),
        norm=norm,
        adapter_rank=config.integer("adapter_rank", 128),
        attention_adapters=adapters,
    )


def manifest(architecture: Architecture, stored: Collection[str]) -> Manifest:
    """Names as published. A shared block lies under the first layer that uses it, with the adapters of all uses."""
    hidden = architecture.hidden_size
    injections = {i: inj for i, layer in enumerate(architecture.layers) if (inj := layer.blocks[0].injection)}
    first: dict[int, int] = {}
    for index, injection in injections.items():
        first.setdefault(injection.shared, index)

    def names(index: int) -> Names:
        inside = "mamba_decoder." if index in injections else ""
        return Names(norm="final_layernorm.weight", norms=(f"{inside}input_layernorm.weight",))

    def layer(index: int, block: int, ours: str, disk: str) -> Pieces:
        body, injection = architecture.layers[index].blocks[block].body, injections.get(index)
        assert isinstance(body, Mamba2)
        yield from mamba2_pieces(body, hidden, ours, f"{disk}{'mamba_decoder.' if injection else ''}mamba.")
        if injection:
            ours = ours.replace("body.", "injection.")
            yield f"{ours}linear.weight", (Piece(f"{disk}linear.weight", (hidden, hidden)),)
            shared = f"model.layers.{first[injection.shared]}.shared_transformer."
            use = list(injections).index(index)
            yield from _adapter_pieces(injection, hidden, ours, shared, use)
            if index == first[injection.shared]:
                yield from _shared_pieces(injection, hidden, f"{ours}block.", shared)

    return decoder_manifest(architecture, names, layer)


def _adapter_pieces(injection: Injection, hidden: int, ours: str, disk: str, use: int) -> Pieces:
    rank, size = injection.adapter_rank, injection.mlp.intermediate
    stored = f"{disk}feed_forward.gate_up_proj_adapter_list.{use}."
    yield f"{ours}mlp_adapter.0.weight", (Piece(f"{stored}0.weight", (rank, hidden)),)
    yield f"{ours}mlp_adapter.1.weight", _halves(f"{stored}1.weight", (2 * size, rank), size)
    if injection.attention_adapters:
        heads, width = injection.attention.heads, injection.attention.heads * injection.attention.head_dim
        for number, name in enumerate("qkv"):
            stored = f"{disk}self_attn.linear_{name}_adapter_list.{use}."
            yield f"{ours}qkv_adapters.{number}.0.weight", (Piece(f"{stored}0.weight", (rank, 2 * hidden)),)
            yield f"{ours}qkv_adapters.{number}.1.weight", (Piece(f"{stored}1.weight", (width, rank), units=heads),)


def _shared_pieces(injection: Injection, hidden: int, ours: str, disk: str) -> Pieces:
    size, feed_forward = injection.mlp.intermediate, f"{disk}feed_forward."
    yield f"{ours}norm.weight", (Piece(f"{disk}input_layernorm.weight", (2 * hidden,)),)
    yield f"{ours}mlp_norm.weight", (Piece(f"{disk}pre_ff_layernorm.weight", (hidden,)),)
    attention, names = injection.attention, f"{disk}self_attn."
    yield from attention_pieces(attention, hidden, f"{ours}attention.", names, inputs=2 * hidden)
    yield f"{ours}mlp.up.weight", _halves(f"{feed_forward}gate_up_proj.weight", (2 * size, hidden), size)
    yield f"{ours}mlp.down.weight", (Piece(f"{feed_forward}down_proj.weight", (hidden, size), units=size, axis=1),)
    if injection.mlp.bias:
        yield f"{ours}mlp.up.bias", _halves(f"{feed_forward}gate_up_proj.bias", (2 * size,), size)
        yield f"{ours}mlp.down.bias", (Piece(f"{feed_forward}down_proj.bias", (hidden,)),)


def _halves(name: str, shape: Sequence[int], size: int) -> tuple[Piece, ...]:
    """[gate | up] in one tensor."""
    return stretches(name, tuple(shape), [(size, size)] * 2)


# Blocks that are not tied are saved with adapters for uses that are not theirs.
ZAMBA2 = Family("zamba2", architecture, manifest, IGNORED + r"|.*_adapter_list\..*")
