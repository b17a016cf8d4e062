"""What a model family must say about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from models.architecture import Architecture
from models.config import Config
from models.manifest import Manifest
from models.tensorfile import StoredTensor


@dataclass(frozen=True, slots=True)
class Family:
    """One value of `model_type`.

    `architecture` reads config.json; `manifest` says where the decoder's parameters lie among the names on disk.
    Stored tensors that match the regular expression `ignored` are not part of the text decoder.
    """

    model_type: str
    architecture: Callable[[Config], Architecture]
    manifest: Callable[[Architecture, Mapping[str, StoredTensor]], Manifest]
    ignored: str
