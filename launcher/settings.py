"""From the command line's values to the frozen configurations that the processes take."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import LaunchError
from launcher.options import DEFAULT_PREFILL_RUNNING, default_memory
from models.serving import ServingConfig
from pools.sizing import DEFAULT_MAX_RUNNING_REQUESTS, Phase
from pools.spec import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values of the options that describe a model and its pools, as click gives them; named like the options."""

    model: str
    dtype: str
    served_model_name: str | None
    max_running_requests: int | None
    pre_alloc_size: int
    mamba_size: int | None
    page_size: int
    memory: int | None
    reserve: int
    max_context: int | None
    threads: int | None = None
    poison: bool = False
    tp: int = 1
    check_weights: bool = False

    def model_path(self) -> Path:
        """The checkpoint folder. Raises LaunchError when there is none."""
        return model_folder(self.model)

    def serving(self, phase: Phase, processes: int) -> ServingConfig:
        """The configuration of one worker, each rank of which is one of `processes` that share this machine."""
        running = DEFAULT_PREFILL_RUNNING if phase is Phase.PREFILL else DEFAULT_MAX_RUNNING_REQUESTS
        path = self.model_path()
        return ServingConfig(
            model_path=path,
            served_model_name=self.served_model_name or path.name,
            dtype=DType.FLOAT32 if self.dtype == "auto" else DType(self.dtype),
            page_size=self.page_size,
            max_running_requests=self.max_running_requests or running,
            pre_alloc_size=self.pre_alloc_size,
            mamba_size=self.mamba_size,
            max_context_tokens=self.max_context,
            memory_bytes=self.memory if self.memory is not None else default_memory(processes),
            reserve_bytes=self.reserve,
            threads=self.threads or max(1, (os.cpu_count() or 1) // processes),
            poison=self.poison,
            tp=self.tp,
            check_weights=self.check_weights,
        )

    def arguments(self, serving: ServingConfig) -> tuple[str, ...]:
        """The options that make a worker's own command line mean `serving`, which came from these settings."""
        options = {
            "--dtype": serving.dtype.value,
            "--served-model-name": serving.served_model_name,
            "--max-running-requests": serving.max_running_requests,
            "--pre-alloc-size": serving.pre_alloc_size,
            "--mamba-size": serving.mamba_size,
            "--page-size": serving.page_size,
            "--memory": serving.memory_bytes,
            "--reserve": serving.reserve_bytes,
            "--max-context": serving.max_context_tokens,
            "--threads": serving.threads,
            "--tp": serving.tp,
        }
        flags = {"--poison": serving.poison, "--check-weights": serving.check_weights}
        given = [(flag, str(value)) for flag, value in options.items() if value is not None]
        return (*(word for pair in given for word in pair), *(flag for flag, is_set in flags.items() if is_set))


def model_folder(model: str) -> Path:
    """The checkpoint folder that a MODEL argument names. Raises LaunchError when there is none."""
    path = Path(model).expanduser()
    if not path.exists():
        raise LaunchError(
            f"there is no model folder {model!r}: give the path of a Hugging Face checkpoint (a folder with "
            "config.json, *.safetensors and tokenizer files)"
        )
    return path.resolve()


def new_incarnation() -> str:
    """A name for one start of one process."""
    return f"{os.getpid():x}-{secrets.token_hex(6)}"
