"""Several parts side by side, on the same input."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.parts.basics import Part
from pools.spec import DType, TensorSpec


@dataclass(frozen=True, slots=True)
class Branch:
    """One of them: body(x × input_multiplier) × output_multiplier."""

    body: Part
    input_multiplier: float = 1.0
    output_multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class Parallel(Part):
    """The sum of its branches. No two may have a state tensor of the same name."""

    branches: tuple[Branch, ...]

    def share(self, ranks: int) -> Parallel:  # noqa: D102
        return Parallel(tuple(replace(branch, body=branch.body.share(ranks)) for branch in self.branches))

    def paged(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """Those of the branches, one after the other."""
        return tuple(tensor for branch in self.branches for tensor in branch.body.paged(dtype))

    def slotted(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """Those of the branches, one after the other."""
        return tuple(tensor for branch in self.branches for tensor in branch.body.slotted(dtype))
