"""Tiny checkpoints of every family, written by transformers itself, with weights that give logits real margins.

Each file in `checkpoints/` is a family: its `MODELS` say how to make its variants.
"""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

VOCAB = 131


def rope(kind: str, **parameters: float) -> dict[str, Any]:
    """A config's fields for rotary positions of a kind."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **parameters}}


def _models() -> dict[str, Callable[[], Any]]:
    models: dict[str, Callable[[], Any]] = {}
    for path in sorted((Path(__file__).parent / "checkpoints").glob("*.py")):
        models |= importlib.import_module(f"tests.models.checkpoints.{path.stem}").MODELS
    return models


@dataclass(frozen=True)
class Twin:
    """A checkpoint folder and the transformers model that wrote it, in float32."""

    folder: Path
    model: Any

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """(T, vocab): one full forward pass without a cache, the oracle."""
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Zoo:
    """Makes each twin once."""

    root: Path

    @cached_property
    def _made(self) -> dict[str, Twin]:
        return {}

    def __getitem__(self, name: str) -> Twin:
        if name not in self._made:
            self._made[name] = make(name, self.root / name)
        return self._made[name]


def make(name: str, folder: Path) -> Twin:
    torch.manual_seed(zlib.crc32(name.encode()))
    model = MODELS[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        _fill(parameter_name, parameter.data)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("bias"):  # of a router's choice, which is not trained by gradients
            _fill(buffer_name, buffer)
    model.save_pretrained(folder)
    return Twin(folder, model)


@torch.no_grad()
def _fill(name: str, weight: torch.Tensor) -> None:
    """Weights under which every part of the model matters to the logits."""
    if name.endswith("A_log"):
        weight.uniform_(math.log(0.05), math.log(2.0))
    elif name.endswith("dt_bias"):
        weight.uniform_(-3.0, 0.5)
    elif name.endswith("lm_head.weight") or name.endswith("embed_tokens.weight"):
        weight.normal_(0, 3.0 * weight.shape[-1] ** -0.5)
    elif "conv1d" in name:
        weight.normal_(0, 0.6)
    elif name.endswith("bias"):
        weight.normal_(0, 0.3)
    elif "adapter" in name:  # full-sized ones make transformers' own float32 2.5e-3 off its float64
        weight.normal_(0, 0.6 * weight.shape[-1] ** -0.5)
    elif weight.dim() == 1:  # norms, around their default; the skip of Mamba2
        weight.add_(torch.randn_like(weight) * 0.3)
    else:
        weight.normal_(0, 1.2 * weight.shape[-1] ** -0.5)


MODELS = _models()
