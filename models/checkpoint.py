"""A checkpoint folder in Hugging Face layout, read without torch: config.json and the headers of its safetensors.

    checkpoint = Checkpoint.open("path/to/folder")
    checkpoint.architecture, checkpoint.weight_bytes(DType.BFLOAT16), checkpoint.fingerprint()

Opening checks that the weights on disk are the ones that config.json describes: names, shapes and file sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import xxhash

from models.architecture import Architecture
from models.config import Config
from models.errors import BrokenCheckpointError, ConfigError, MissingCheckpointError, WeightsError
from models.families.family import Family
from models.manifest import Manifest
from models.registry import find_family
from models.tensorfile import StoredTensor, read_header
from pools.spec import DType

FLOATS = ("F32", "BF16", "F16")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_LISTED = 12  # names in an error message
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened and checked folder. `tensors` are those that the decoder uses, by their names on disk."""

    folder: Path
    architecture: Architecture
    manifest: Manifest
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read and check a folder. Raises CheckpointError or ConfigError, naming what is wrong."""
        folder = Path(folder)
        config = read_config(folder)
        family = find_family(config.read("model_type", None))
        if config.has("quantization_config"):
            raise ConfigError("quantization_config is set; quantized checkpoints are not implemented")
        architecture = family.architecture(config)
        stored = _stored_tensors(folder)
        manifest = family.manifest(architecture, stored)
        return cls(folder, architecture, manifest, _used(folder, family, architecture, manifest, stored))

    def weight_bytes(self, dtype: DType, rank: int = 0, ranks: int = 1) -> int:
        """Exact bytes of one rank's weights when served in `dtype`."""
        pieces = [piece for pieces in self.manifest.values() for piece in pieces]
        return dtype.itemsize * sum(piece.numel(rank, ranks) for piece in pieces)

    def fingerprint(self) -> str:
        """A name for exactly this model: xxh3_128 over config.json, the tokenizer's files and all weights' bytes.

        How the weights are divided into files does not matter. Reads every byte of them.
        """
        digest = xxhash.xxh3_128()
        for name in ("config.json", *TOKENIZER_FILES):
            if (path := self.folder / name).is_file():
                content = path.read_bytes()
                digest.update(f"{name}\0{len(content)}\0".encode())
                digest.update(content)
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
            for block in _blocks(tensor):
                digest.update(block)
        return digest.hexdigest()


def read_config(folder: Path) -> Config:
    """config.json of a checkpoint folder."""
    if folder.suffix == ".gguf" and folder.is_file():
        raise MissingCheckpointError(
            f"{folder} is a GGUF file; turn it into a checkpoint folder first: tandem convert {folder} FOLDER"
        )
    if not folder.is_dir():
        raise MissingCheckpointError(f"{folder} is not a folder; give one with config.json and safetensors files")
    return Config(_read_json(folder / "config.json"))


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise MissingCheckpointError(f"{path.parent} has no {path.name}")
    try:
        content = json.loads(path.read_bytes(), object_hook=_plain_floats)
    except ValueError as error:
        raise BrokenCheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BrokenCheckpointError(f"{path} holds {type(content).__name__}, not an object")
    return content


def _plain_floats(fields: dict[str, object]) -> object:
    """The number in `{"__float__": "Infinity"}`: JSON has no such number, and transformers writes it so."""
    if fields.keys() == {"__float__"} and fields["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(str(fields["__float__"]))
    return fields


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        path = folder / "model.safetensors"
        if not path.is_file():
            raise MissingCheckpointError(f"{folder} has neither model.safetensors nor {index.name}")
        return read_header(path)
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise BrokenCheckpointError(f"{index} has no weight_map from tensor names to file names")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise MissingCheckpointError(f"{folder} lacks {name}, which {index.name} names")
        tensors |= read_header(path)
    if lost := sorted(weight_map.keys() - tensors.keys()):
        raise WeightsError(f"{index} names tensors that are in no file: {listing(lost)}")
    return tensors


def _used(
    folder: Path, family: Family, architecture: Architecture, manifest: Manifest, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    expected = {piece.name: piece.shape for pieces in manifest.values() for piece in pieces}
    ignored = re.compile(family.ignored)
    missing = sorted(expected.keys() - stored.keys())
    unexpected = sorted(name for name in stored.keys() - expected.keys() if not ignored.fullmatch(name))
    if architecture.tied:  # a copy of the embedding, which some checkpoints store all the same
        unexpected = [name for name in unexpected if name != "lm_head.weight"]
    used = {name: stored[name] for name in expected.keys() & stored.keys()}
    misshapen = [
        f"{name} is {tensor.dtype} {list(tensor.shape)}, expected a float {list(expected[name])}"
        for name, tensor in sorted(used.items())
        if tensor.shape != expected[name] or tensor.dtype not in FLOATS
    ]
    found = {"missing": missing, "unexpected": unexpected, "of the wrong shape or type": misshapen}
    if any(found.values()):
        lines = [f"{len(names)} {what}: {listing(names)}" for what, names in found.items() if names]
        raise WeightsError("\n  ".join([f"the weights in {folder} do not fit its config.json:", *lines]))
    return used


def _blocks(tensor: StoredTensor) -> Iterator[bytes]:
    """The tensor's bytes, piece by piece."""
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left:
            block = file.read(min(left, _BLOCK_BYTES))
            if not block:
                raise BrokenCheckpointError(f"{tensor.file} became shorter while it was read")
            left -= len(block)
            yield block


def listing(names: Iterable[str]) -> str:
    """The first few names, for an error message."""
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(islice(names, _LISTED)) + more
