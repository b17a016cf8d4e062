from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.models.zoo import VOCAB

MAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 12,
    "state_size": 10,
    "n_groups": 1,
    "chunk_size": 32,
    "pad_token_id": None,
}


def _mamba2(**fields: Any) -> Callable[[], Any]:
    return lambda: transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**MAMBA | fields))


# transformers' one-token step has no time_step_limit, its full forward has: the full forward holds.
MODELS: dict[str, Callable[[], Any]] = {
    "mamba2": _mamba2(),
    "mamba2-groups-biases": _mamba2(n_groups=4, use_bias=True, use_conv_bias=False, tie_word_embeddings=True),
    "mamba2-limited": _mamba2(n_groups=2, time_step_limit=[0.05, 0.5]),
}
