"""Feed-forward layers: one MLP, or a mixture of experts. Neither keeps any state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from models.errors import ConfigError
from models.parts.basics import Activation, Part, divided, divides


@dataclass(frozen=True, slots=True)
class Mlp(Part):
    """down(act(gate_multiplier × gate(x)) × up(x)); where not `gated`, down(act(up(x)))."""

    intermediate: int
    activation: Activation = Activation.SILU
    gated: bool = True
    bias: bool = False
    gate_multiplier: float = 1.0

    def share(self, ranks: int) -> Mlp:  # noqa: D102
        return replace(self, intermediate=divided("the MLP's intermediate size", self.intermediate, ranks))


class Scoring(Enum):
    """How a router turns its logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a token takes, and with what weights.

    The `per_token` experts with the highest scores are taken; a learned `choice_bias` is added to the scores for that
    choice only. With `groups` above 1 only experts out of the `groups_taken` best groups count, a group being worth
    its two best experts (DeepSeek-V3, arXiv:2412.19437). Weights are the scores of those taken; with `renormalize`
    divided by their sum plus `renormalize_eps`; times `scale`.
    """

    experts: int
    per_token: int
    scoring: Scoring = Scoring.SOFTMAX
    renormalize: bool = True
    renormalize_eps: float = 0.0
    choice_bias: bool = False
    groups: int = 1
    groups_taken: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.per_token > self.experts:
            raise ConfigError(f"num_experts_per_tok is {self.per_token}, but there are only {self.experts} experts")
        divides("the number of expert groups", self.groups, "the number of experts", self.experts)


@dataclass(frozen=True, slots=True)
class Moe(Part):
    """A mixture of experts, and optionally an MLP that every token takes.

    `expert` is one expert. `shared_gate`: the shared MLP's output is multiplied by the sigmoid of one logit. With
    `latent` the experts work on that many channels, between two projections (LatentMoE; Nemotron 3).
    """

    router: Router
    expert: Mlp
    shared: Mlp | None = None
    shared_gate: bool = False
    latent: int | None = None
    latent_bias: bool = False

    def __post_init__(self) -> None:
        if self.expert.bias or self.expert.gate_multiplier != 1.0:
            raise ConfigError("experts with biases or multipliers are not implemented")

    def share(self, ranks: int) -> Moe:
        """But for the number of experts: all ranks route alike, among all of them, and each has some."""
        divided("the number of experts", self.router.experts, ranks)
        return replace(self, shared=self.shared.share(ranks) if self.shared else None)
