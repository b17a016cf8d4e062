"""From a checkpoint folder and a few choices to a memory plan, and from the plan to a model that can run.

Planning needs no torch and no weights; `load` allocates exactly what the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from models.checkpoint import Checkpoint
from pools.sizing import MemoryPlan, Phase, SizingRequest, plan_memory
from pools.spec import DType, StateSpec, TpRank

if TYPE_CHECKING:
    import torch

    from models.decoder import Decoder
    from models.layers.ranks import Ranks
    from models.runner import Runner
    from models.weights import Progress
    from pools.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """What to serve, how its numbers are kept, and how large the pools shall be.

    Sizes are those of `pools.sizing.SizingRequest`; `max_context_tokens` None is the model's own limit. `threads`:
    CPU threads of one rank. `poison`: fill free memory with NaN. `tp`: tensor-parallel ranks of the worker, to which
    `memory_bytes` and `threads` apply one by one. `check_weights`: refuse weights that are not finite.
    """

    model_path: Path
    served_model_name: str
    dtype: DType
    page_size: int
    max_running_requests: int
    pre_alloc_size: int
    mamba_size: int | None
    max_context_tokens: int | None
    memory_bytes: int
    reserve_bytes: int
    threads: int = 1
    poison: bool = False
    tp: int = 1
    check_weights: bool = False


def plan_worker(config: ServingConfig, phase: Phase) -> MemoryPlan:
    """The memory of one rank of a worker, the first, which has the most. Reads headers only.

    Raises CheckpointError, ConfigError when the ranks cannot share the model, and PlanRefused.
    """
    checkpoint = Checkpoint.open(config.model_path)
    checkpoint.architecture.check_ranks(config.tp)
    limit = checkpoint.architecture.max_context_tokens
    return plan_memory(
        SizingRequest(
            phase=phase,
            spec=checkpoint.architecture.state_spec(config.dtype).of_rank(0, config.tp),
            max_context_tokens=min(limit, config.max_context_tokens or limit),
            memory_bytes=config.memory_bytes,
            weights_bytes=checkpoint.weight_bytes(config.dtype, 0, config.tp),
            reserve_bytes=config.reserve_bytes,
            page_size=config.page_size,
            max_running_requests=config.max_running_requests,
            pre_alloc_size=config.pre_alloc_size,
            mamba_size=config.mamba_size,
        )
    )


@dataclass(frozen=True, slots=True)
class Served:
    """One rank's part of a loaded model, on its pools.

    `fingerprint` names weights, config and tokenizer; only the first rank takes the time to compute it. `spec` is the
    state of the whole model.
    """

    name: str
    fingerprint: str
    vocab_size: int
    spec: StateSpec
    rank: TpRank
    plan: MemoryPlan
    storage: Storage
    decoder: Decoder

    def unfit(self, token_ids: Sequence[int]) -> str | None:
        """Why this can be no prompt of the model, in words; None when it can."""
        if not token_ids:
            return "the prompt has no tokens"
        if wrong := [token for token in token_ids if not 0 <= token < self.vocab_size]:
            return f"token id {wrong[0]} is outside the model's vocabulary of {self.vocab_size}"
        return None

    def runner(self) -> Runner:
        """Forward steps of the decoder on the pools."""
        from models.runner import Runner

        return Runner(self.decoder, self.storage)


def load(
    config: ServingConfig,
    phase: Phase,
    make_block: Callable[[int], torch.Tensor] | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Served:
    """Load one rank's weights and allocate its planned pools.

    `make_block` provides the pool memory, uint8 of the given number of bytes, where it must be of a special kind.
    `ranks`: this process's place in the worker, None for the only one. `progress` hears of the weights. Raises
    CheckpointError and PlanRefused.
    """
    import torch

    from models.layers.ranks import SINGLE
    from models.weights import load_decoder
    from pools.storage import Storage

    torch.set_num_threads(config.threads)
    ranks = ranks or SINGLE
    plan = plan_worker(config, phase)
    checkpoint = Checkpoint.open(config.model_path)
    block = make_block(plan.block_bytes) if make_block else None
    storage = Storage.from_plan(plan, block=block, poison=config.poison)
    return Served(
        name=config.served_model_name,
        fingerprint=checkpoint.fingerprint() if ranks.rank == 0 else "",
        vocab_size=checkpoint.architecture.vocab_size,
        spec=checkpoint.architecture.state_spec(config.dtype),
        rank=TpRank(ranks.rank, ranks.size),
        plan=plan,
        storage=storage,
        decoder=load_decoder(
            checkpoint,
            config.dtype,
            ranks=ranks,
            progress=progress or (lambda done, total: None),
            check=config.check_weights,
        ),
    )
