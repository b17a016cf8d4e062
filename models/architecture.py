"""What a decoder is made of, as values: no weights, no torch.

A family turns config.json into an `Architecture`, and `models.decoder` runs any of them. Everything that
distinguishes one model from another is a field here; each mixer also declares its own state.

    embedding × multiplier → layers → norm → head ÷ logits_scaling
    layer:  x + mixer(norm(x)) × residual_multiplier,  then  x + feed_forward(norm(x)) × residual_multiplier
"""

from __future__ import annotations

from dataclasses import dataclass

from models.errors import ConfigError
from pools.spec import DType, PagedGroup, Segment, SlotGroup, StateSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm. `unit_offset`: the weight on disk is the difference from one."""

    eps: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions over the first `2 * len(frequencies)` dimensions of a head.

    `frequencies` are in radians per token; `magnitude` multiplies both cosine and sine (YaRN).
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the whole context.

    `qk_norm` normalises every head of q and k before the rotation. With `output_gate` the query projection gives
    [q | gate] for each head and the output is multiplied by sigmoid(gate). No `rope` means no positions at all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    qk_norm: Norm | None = None
    output_gate: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        _divides("num_key_value_heads", self.kv_heads, "num_attention_heads", self.heads)

    def paged(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """K and V of one token."""
        shape = (self.kv_heads, self.head_dim)
        segments = (Segment("heads", self.kv_heads),)
        return tuple(TensorSpec(name, shape, dtype, 0, segments) for name in ("k", "v"))

    def slotted(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """Nothing of fixed size."""
        return ()


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet: a short convolution over [q | k | v], then the gated delta rule.

    Each key head serves `value_heads / key_heads` consecutive value heads. `norm` acts on each head's output, before
    the gate.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm: Norm

    def __post_init__(self) -> None:
        _divides("linear_num_key_heads", self.key_heads, "linear_num_value_heads", self.value_heads)

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, k and v end to end."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def paged(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """Nothing that grows."""
        return ()

    def slotted(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """The newest inputs of the convolution, and the delta rule's matrix per head in float32."""
        conv = (
            Segment("q", self.key_heads, self.key_dim),
            Segment("k", self.key_heads, self.key_dim),
            Segment("v", self.value_heads, self.value_dim),
        )
        recurrent = (self.value_heads, self.key_dim, self.value_dim)
        return (
            TensorSpec("conv", (self.conv_channels, self.conv_width - 1), dtype, 0, conv),
            TensorSpec("recurrent", recurrent, DType.FLOAT32, 0, (Segment("heads", self.value_heads),)),
        )


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba2: a short convolution over [x | B | C], then the selective state space scan.

    Each of `groups` pairs (B, C) serves `heads / groups` consecutive heads. `step_limits` bound the time step.
    `norm` acts on each group of channels, after the gate.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    conv_width: int
    step_limits: tuple[float, float]
    norm: Norm
    conv_bias: bool
    bias: bool

    def __post_init__(self) -> None:
        _divides("mamba_n_groups", self.groups, "mamba_n_heads", self.heads)

    @property
    def channels(self) -> int:
        """Channels of x, of the gate and of the output."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x, B and C end to end."""
        return self.channels + 2 * self.groups * self.state

    def paged(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """Nothing that grows."""
        return ()

    def slotted(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """The newest inputs of the convolution, and the state space's matrix per head in float32."""
        conv = (
            Segment("x", self.heads, self.head_dim),
            Segment("B", self.groups, self.state),
            Segment("C", self.groups, self.state),
        )
        ssm = (self.heads, self.head_dim, self.state)
        return (
            TensorSpec("conv", (self.conv_channels, self.conv_width - 1), dtype, 0, conv),
            TensorSpec("ssm", ssm, DType.FLOAT32, 0, (Segment("heads", self.heads),)),
        )


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(silu(gate(x)) × up(x))."""

    intermediate: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of `experts` MLPs of which each token takes the `per_token` likeliest, and one that all take.

    Weights are the softmax over all experts, with `renormalize` divided by the sum of those taken (which is the
    softmax over those taken). `shared_gate`: the shared MLP's output is multiplied by the sigmoid of one logit.
    """

    experts: int
    per_token: int
    intermediate: int
    renormalize: bool
    shared: Mlp
    shared_gate: bool

    def __post_init__(self) -> None:
        if self.per_token > self.experts:
            raise ConfigError(f"num_experts_per_tok is {self.per_token}, but there are only {self.experts} experts")


Mixer = Attention | GatedDelta | Mamba2
FeedForward = Mlp | Moe


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    mixer: Mixer
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class Architecture:
    """A whole decoder. `max_context_tokens` is the longest context that the model was made for."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_context_tokens: int
    layers: tuple[Layer, ...]
    norm: Norm
    tied: bool
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def state_spec(self, dtype: DType) -> StateSpec:
        """What one request's state is made of when activations are `dtype`: one group for each kind of layer."""
        paged = _groups([layer.mixer.paged(dtype) for layer in self.layers])
        slots = _groups([layer.mixer.slotted(dtype) for layer in self.layers])
        return StateSpec(
            paged=tuple(PagedGroup(_group_name(tensors), layers, tensors) for tensors, layers in paged),
            slots=tuple(SlotGroup(_group_name(tensors), layers, tensors) for tensors, layers in slots),
        )


_Tensors = tuple[TensorSpec, ...]


def _groups(declared: list[_Tensors]) -> list[tuple[_Tensors, tuple[int, ...]]]:
    layers: dict[_Tensors, list[int]] = {}
    for index, tensors in enumerate(declared):
        if tensors:
            layers.setdefault(tensors, []).append(index)
    return [(tensors, tuple(indices)) for tensors, indices in layers.items()]


def _group_name(tensors: _Tensors) -> str:
    return "+".join(tensor.name for tensor in tensors)


def _divides(small_name: str, small: int, large_name: str, large: int) -> None:
    if large % small:
        raise ConfigError(f"{small_name} is {small}, which does not divide {large_name} ({large})")
