"""Checkpoint folders: what is accepted, and what is said of the rest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.checkpoint import Checkpoint
from models.config import Config
from models.errors import (
    BrokenCheckpointError,
    ConfigError,
    MissingCheckpointError,
    UnknownModelError,
    WeightsError,
)
from models.registry import FAMILIES
from models.weights import load_decoder
from pools.spec import DType
from tests.tiny import CONFIGS, make_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_next", tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """A field that a file leaves out means what transformers' config class says."""
    written = transformers.CONFIG_MAPPING[model_type]().to_dict()
    family = FAMILIES[model_type]
    stated = json.loads(json.dumps(written, default=str))
    bare: dict[str, Any] = {"model_type": model_type}
    if "text_config" in stated:
        bare["text_config"] = {"model_type": stated["text_config"]["model_type"]}
    assert family.architecture(Config(bare)) == family.architecture(Config(stated))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_planned_weight_bytes_are_the_loaded_ones(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(family, tmp_path / "model"))
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        decoder = load_decoder(checkpoint, dtype)
        assert sum(parameter.nbytes for parameter in decoder.parameters()) == checkpoint.weight_bytes(dtype)


def test_several_files_are_read_as_one(original: Path, folder: Path) -> None:
    with safe_open(original / "model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for part, mine in parts.items():
        save_file({name: weights[name] for name in mine}, folder / part)
    weight_map = {name: part for part, mine in parts.items() for name in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    one, two = Checkpoint.open(original), Checkpoint.open(folder)
    assert one.fingerprint() == two.fingerprint()
    for a, b in zip(
        load_decoder(one, DType.FLOAT32).parameters(), load_decoder(two, DType.FLOAT32).parameters(), strict=True
    ):
        assert torch.equal(a, b)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(MissingCheckpointError, match=r"lacks model-2\.safetensors"):
        Checkpoint.open(folder)


def test_the_fingerprint_names_weights_config_and_tokenizer(folder: Path) -> None:
    seen = {Checkpoint.open(folder).fingerprint()}

    def nudge(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"][3] += 1e-6

    edit_weights(folder, nudge)
    seen.add(Checkpoint.open(folder).fingerprint())
    edit_config(folder, eos_token_id=5)
    seen.add(Checkpoint.open(folder).fingerprint())
    (folder / "tokenizer.json").write_text("{}")
    seen.add(Checkpoint.open(folder).fingerprint())
    assert len(seen) == 4


def test_missing_unexpected_and_misshapen_weights_are_listed(folder: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.layers.0.linear_attn.dt_bias"]
        weights["model.layers.9.surprise"] = torch.zeros(3)
        weights["model.norm.weight"] = torch.zeros(7)

    edit_weights(folder, spoil)
    with pytest.raises(WeightsError) as caught:
        Checkpoint.open(folder)
    text = str(caught.value)
    assert "1 missing: model.layers.0.linear_attn.dt_bias" in text
    assert "1 unexpected: model.layers.9.surprise" in text
    assert "model.norm.weight is F32 [7], expected a float [48]" in text


def test_draft_layers_are_ignored(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"mtp.layers.0.norm.weight": torch.zeros(3)}))
    Checkpoint.open(folder)


def test_a_truncated_file_is_said_to_be(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for size in (0, 5, 200, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(BrokenCheckpointError, match=r"model\.safetensors"):
            Checkpoint.open(folder)


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(MissingCheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(MissingCheckpointError, match="tandem convert"):
        Checkpoint.open(tmp_path / "model.gguf")
    with pytest.raises(MissingCheckpointError, match=r"has no config\.json"):
        Checkpoint.open(tmp_path)
    for text in ("{", "[1]", '"x"'):
        (folder / "config.json").write_text(text)
        with pytest.raises(BrokenCheckpointError, match=r"config\.json"):
            Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model_type": "rwkv9"}, UnknownModelError, "model_type is 'rwkv9'; implemented: .*granitemoehybrid.*llama"),
        ({"model_type": None}, UnknownModelError, "model_type is None"),
        ({"hidden_act": "gelu"}, ConfigError, "hidden_act is 'gelu'"),
        ({"hidden_size": "wide"}, ConfigError, "hidden_size is 'wide'"),
        ({"hidden_size": 0}, ConfigError, "hidden_size is 0"),
        ({"layer_types": ["full_attention"]}, ConfigError, "layer_types names 1 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, ConfigError, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "spiral"}}, ConfigError, "spiral"),
        ({"quantization_config": {"quant_method": "fp8"}}, ConfigError, "quantization_config"),
        ({"num_experts_per_tok": 9}, ConfigError, "num_experts_per_tok"),
        ({"num_key_value_heads": 4}, ConfigError, "num_key_value_heads"),
        ({"linear_num_value_heads": 5}, ConfigError, "linear_num_value_heads"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused_by_name(
    folder: Path, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(error, match=says):
        Checkpoint.open(folder)


def test_weights_that_are_not_finite_are_named_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        weights[name].view(-1)[3] = torch.nan
    save_file(weights, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    load_decoder(checkpoint, DType.FLOAT32)
    with pytest.raises(WeightsError, match=r"2 weights .*: model.layers.1.mlp.down_proj.weight, model.norm.weight$"):
        load_decoder(checkpoint, DType.FLOAT32, check=True)


def test_progress_is_told_to_the_end(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint("llama", tmp_path))
    told: list[tuple[int, int]] = []
    load_decoder(checkpoint, DType.FLOAT32, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == checkpoint.weight_bytes(DType.FLOAT32) // 4
