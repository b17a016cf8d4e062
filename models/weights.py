"""From the tensors of a checkpoint to a decoder that can run."""

from __future__ import annotations

from collections import defaultdict

import torch
from safetensors import safe_open

from models.checkpoint import Checkpoint
from models.decoder import Decoder
from models.manifest import Piece
from pools.spec import DType
from pools.storage import TORCH_DTYPE


def load_decoder(checkpoint: Checkpoint, dtype: DType, device: str = "cpu") -> Decoder:
    """The checkpoint's decoder, with weights converted to `dtype`.

    Each file is read once and each stored tensor is held only while it is copied, so the peak is the weights plus
    one tensor.
    """
    with torch.device("meta"):
        decoder = Decoder(checkpoint.architecture)
    decoder = decoder.to(TORCH_DTYPE[dtype]).to_empty(device=device).requires_grad_(False)
    for name, copies in _copies(checkpoint, decoder).items():
        with safe_open(checkpoint.tensors[name].file, framework="pt") as file:
            stored = file.get_tensor(name)
        for piece, target in copies:
            target.copy_(_rows(stored, piece).reshape(target.shape))
    return decoder.eval()


def _copies(checkpoint: Checkpoint, decoder: Decoder) -> dict[str, list[tuple[Piece, torch.Tensor]]]:
    """For each stored tensor, the parts of parameters that it fills."""
    parameters = dict(decoder.named_parameters())
    if parameters.keys() != checkpoint.manifest.keys():
        raise RuntimeError(
            f"the manifest and the decoder differ in {sorted(parameters.keys() ^ checkpoint.manifest.keys())}"
        )
    copies: dict[str, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
    for name, pieces in checkpoint.manifest.items():
        parts = torch.split(parameters[name].data.view(-1), [piece.numel for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            copies[piece.name].append((piece, part))
    return copies


def _rows(stored: torch.Tensor, piece: Piece) -> torch.Tensor:
    runs = stored.reshape(piece.groups, -1, *stored.shape[1:])
    return runs[:, piece.start : piece.stop]
