"""Forward steps of a decoder on a worker's pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.batch import Chunk, check_chunks, make_batch
from models.decoder import Decoder
from pools.storage import Storage


class Runner:
    """Binds a decoder's layers to the state tensors of `storage`.

    The pools must have been laid out for `decoder.architecture.state_spec` in the decoder's dtype. A request's
    slot must be zero before its first chunk.
    """

    def __init__(self, decoder: Decoder, storage: Storage) -> None:
        self._decoder = decoder
        self._storage = storage
        self._states: list[dict[str, torch.Tensor]] = [{} for _ in decoder.architecture.layers]
        for group in storage.layout.spec.paged:
            for layer in group.layers:
                self._states[layer] |= {tensor.name: storage.paged(layer, tensor.name) for tensor in group.tensors}
        for slots in storage.layout.spec.slots:
            for layer in slots.layers:
                self._states[layer] |= {tensor.name: storage.slotted(layer, tensor.name) for tensor in slots.tensors}

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute the chunks' tokens; keep their state in the pages and slots of their rows.

        Returns logits after each chunk's last token, in the order given: (len(chunks), vocab) float32. Raises
        ValueError for an empty chunk, a row given twice, tokens behind the page table or unknown token ids.
        """
        self.check(chunks)
        logits: torch.Tensor = self._decoder(make_batch(chunks, self._storage), self._states)
        return logits

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Raise what `forward` would raise for these chunks."""
        check_chunks(chunks, self._storage)
        vocab = self._decoder.architecture.vocab_size
        for chunk in chunks:
            if not 0 <= min(chunk.token_ids) <= max(chunk.token_ids) < vocab:
                raise ValueError(f"row {chunk.row}: a token id is outside the vocabulary of {vocab}")
