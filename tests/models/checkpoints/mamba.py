"""transformers starts every chunk of several tokens but the first from zero: only its full forward is held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

MAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "state_size": 10,
    "time_step_rank": 5,
    "pad_token_id": None,
}


def _mamba(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**MAMBA | fields))


def _falcon(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(**MAMBA | fields))


MODELS: dict[str, Callable[[], Any]] = {
    "mamba": _mamba(),
    "mamba-biases-untied": _mamba(
        use_bias=True, use_conv_bias=False, tie_word_embeddings=False, conv_kernel=3, time_step_rank="auto"
    ),
    "falcon_mamba": _falcon(tie_word_embeddings=False),
    "falcon_mamba-biases": _falcon(use_bias=True, mixer_rms_eps=1e-3, expand=16, intermediate_size=72),
}
