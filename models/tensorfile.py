"""The header of one safetensors file, read without its data.

The format: eight bytes with the header's length, the header as JSON (name → dtype, shape, byte range in the data),
then the data. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from models.errors import BrokenCheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: its bytes are `begin` to `end` of `file`. `dtype` as safetensors spells it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises BrokenCheckpointError when the file is truncated or not safetensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise BrokenCheckpointError(f"{path} has only {size} bytes; it is not a safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise BrokenCheckpointError(
                f"{path} has {size} bytes and announces a header of {length}; it is truncated or not safetensors"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpointError(f"{path} has a broken safetensors header: {error!r}") from error
    if (end := max((tensor.end for tensor in tensors.values()), default=0)) > size:
        raise BrokenCheckpointError(f"{path} is truncated: it has {size} bytes of {end}")
    return tensors


def _stored(path: Path, data: int, entry: dict[str, object]) -> StoredTensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError(f"entry {entry}")
    begin, end = offsets
    nbytes = prod(shape) * ITEM_BYTES[dtype]
    if not 0 <= begin <= end or end - begin != nbytes:
        raise ValueError(f"{dtype} {shape} needs {nbytes} bytes, its range is {offsets}")
    return StoredTensor(path, dtype, tuple(shape), data + begin, data + end)
