"""From the tensors of a checkpoint to a decoder that can run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open

from models.checkpoint import Checkpoint, listing
from models.decoder import Decoder
from models.errors import WeightsError
from models.layers.ranks import SINGLE, Ranks
from models.manifest import Piece
from pools.spec import DType
from pools.storage import TORCH_DTYPE

Progress = Callable[[int, int], None]
"""Called with the elements loaded so far and those there are."""


def load_decoder(
    checkpoint: Checkpoint,
    dtype: DType,
    device: str = "cpu",
    ranks: Ranks = SINGLE,
    *,
    progress: Progress = lambda done, total: None,
    check: bool = False,
) -> Decoder:
    """The checkpoint's decoder, or one rank's part of it, with weights converted to `dtype`.

    Files are mapped, each is opened once, and only the slices that this rank needs are read, one after the other: the
    peak is the weights plus one slice. With `check`, weights that are not finite raise WeightsError, naming them.
    """
    with torch.device("meta"):
        decoder = Decoder(checkpoint.architecture, ranks)
    decoder = decoder.to(TORCH_DTYPE[dtype]).to_empty(device=device).requires_grad_(False)
    files = _copies(checkpoint, decoder, ranks)
    total = sum(target.numel() for copies in files.values() for _, target in copies)
    done, broken = 0, set()
    for file, copies in files.items():
        with safe_open(file, framework="pt") as stored:
            for piece, target in copies:
                _fill(target, stored.get_slice(piece.name), piece, ranks)
                if check and not target.isfinite().all():
                    broken.add(piece.name)
                done += target.numel()
                progress(done, total)
    if broken:
        raise WeightsError(f"{len(broken)} weights have NaN or infinite values: {listing(sorted(broken))}")
    return decoder.eval()


def _copies(checkpoint: Checkpoint, decoder: Decoder, ranks: Ranks) -> dict[str, list[tuple[Piece, torch.Tensor]]]:
    """For each file, the pieces in it and the parts of parameters that they fill."""
    parameters = dict(decoder.named_parameters())
    if parameters.keys() != checkpoint.manifest.keys():
        raise RuntimeError(
            f"the manifest and the decoder differ in {sorted(parameters.keys() ^ checkpoint.manifest.keys())}"
        )
    copies: dict[str, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
    for name, pieces in checkpoint.manifest.items():
        sizes = [piece.numel(ranks.rank, ranks.size) for piece in pieces]
        parts = torch.split(parameters[name].data.view(-1), sizes)
        for piece, part in zip(pieces, parts, strict=True):
            copies[str(checkpoint.tensors[piece.name].file)].append((piece, part))
    return copies


def _fill(target: torch.Tensor, stored: Any, piece: Piece, ranks: Ranks) -> None:
    """Copy one piece's spans into `target` (flat), which they fill."""
    spans = piece.spans(ranks.rank, ranks.size)
    shape = list(piece.shape)
    shape[piece.axis] = sum(len(span) for span in spans)
    target = target.view(shape)
    done = 0
    for span in spans:
        where = (slice(None),) * piece.axis
        target[(*where, slice(done, done + len(span)))].copy_(stored[(*where, slice(span.start, span.stop))])
        done += len(span)
