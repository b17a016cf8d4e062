"""Small state specs of every kind, with sizes that make alignment padding necessary."""

from __future__ import annotations

from pools.spec import DType, PagedGroup, Segment, SlotGroup, StateSpec, TensorSpec


def _kv(name: str, heads: int, head_dim: int, dtype: DType) -> TensorSpec:
    return TensorSpec(name, (heads, head_dim), dtype, 0, (Segment("heads", heads),))


def _conv(channels: int, dtype: DType) -> TensorSpec:
    return TensorSpec("conv", (channels, 3), dtype, 0, (Segment("channels", channels),))


def _state(heads: int, dtype: DType) -> TensorSpec:
    return TensorSpec("state", (heads, 3, 2), dtype, 0, (Segment("heads", heads),))


# Attention only: no slots.
LLAMA = StateSpec(
    paged=(
        PagedGroup("attention", (0, 1), (_kv("k", 1, 6, DType.BFLOAT16), _kv("v", 1, 6, DType.BFLOAT16))),
    )
)  # fmt: skip

# Attention at layers 1 and 3, recurrent layers between, and a second kind of each.
HYBRID = StateSpec(
    paged=(
        PagedGroup("full", (1,), (_kv("k", 2, 3, DType.FLOAT32), _kv("v", 2, 3, DType.FLOAT32))),
        PagedGroup("sliding", (3,), (_kv("k", 1, 5, DType.FLOAT16), _kv("v", 1, 5, DType.FLOAT16)), window=8),
    ),
    slots=(
        SlotGroup("mamba2", (0, 2), (_conv(7, DType.BFLOAT16), _state(5, DType.FLOAT32))),
        SlotGroup("short_conv", (4,), (_conv(5, DType.FLOAT16),)),
    ),
)

# Recurrent only: no pages.
RECURRENT = StateSpec(slots=(SlotGroup("mamba", (0, 1, 2), (_conv(9, DType.FLOAT32), _state(2, DType.FLOAT32))),))

ALL = {"llama": LLAMA, "hybrid": HYBRID, "recurrent": RECURRENT}
