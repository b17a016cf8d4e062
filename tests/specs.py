"""A small hybrid state to try layouts and transfers with."""

from __future__ import annotations

from pools.spec import DType, PagedGroup, Segment, SlotGroup, StateSpec, TensorSpec


def hybrid_spec(layers: int, kv_heads: int, head_dim: int, dtype: DType, slots: bool) -> StateSpec:
    kv = tuple(TensorSpec(name, (kv_heads, head_dim), dtype, 0, (Segment("heads", kv_heads),)) for name in ("k", "v"))
    paged = PagedGroup("attention", tuple(range(0, 2 * layers, 2)), kv)
    conv = TensorSpec("conv", (6, 3), dtype, 0, (Segment("q", 2), Segment("k", 2), Segment("v", 2)))
    recurrent = TensorSpec("recurrent", (2, 4, 5), DType.FLOAT32, 0, (Segment("heads", 2),))
    odd = tuple(range(1, 2 * layers, 2))
    return StateSpec((paged,), (SlotGroup("delta", odd, (conv, recurrent)),) if slots else ())
