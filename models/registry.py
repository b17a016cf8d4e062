"""Which family implements which `model_type`."""

from __future__ import annotations

from models.errors import UnknownModelError
from models.families.bamba import BAMBA
from models.families.falcon_h1 import FALCON_H1
from models.families.family import Family
from models.families.gemma3 import GEMMA3, GEMMA3_TEXT
from models.families.granitemoehybrid import GRANITEMOEHYBRID
from models.families.jamba import JAMBA
from models.families.kimi_linear import KIMI_LINEAR
from models.families.lfm2 import LFM2, LFM2_MOE
from models.families.llama import LLAMA
from models.families.mamba import FALCON_MAMBA, MAMBA
from models.families.mamba2 import MAMBA2
from models.families.mistral import MISTRAL
from models.families.nemotron_h import NEMOTRON_H
from models.families.olmo_hybrid import OLMO_HYBRID
from models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from models.families.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from models.families.zamba2 import ZAMBA2

# One line a file of `models.families`.
ALL = (
    BAMBA,
    FALCON_H1,
    *(GEMMA3, GEMMA3_TEXT),
    GRANITEMOEHYBRID,
    JAMBA,
    KIMI_LINEAR,
    *(LFM2, LFM2_MOE),
    LLAMA,
    *(FALCON_MAMBA, MAMBA),
    MAMBA2,
    MISTRAL,
    NEMOTRON_H,
    OLMO_HYBRID,
    *(QWEN2, QWEN3, QWEN3_MOE),
    *(QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT),
    ZAMBA2,
)
FAMILIES = {family.model_type: family for family in ALL}


def find_family(model_type: object) -> Family:
    """The family of config.json's `model_type`. Raises UnknownModelError, which lists those implemented."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnknownModelError(f"model_type is {model_type!r}; implemented: {', '.join(sorted(FAMILIES))}")
    return family
