"""One forward step: which tokens are computed, and where in the pools they read and write.

Tokens of the step lie end to end: first those of all one-token chunks (decode, mostly), which layers compute
together, then the longer chunks, which attention and scans compute one by one:

    [ a | b | c | d d d d d | e e e ]     ones = 3, longer = (Longer(3, 8, …), Longer(8, 11, …))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pools.storage import Storage


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's share of a forward step.

    `row` is its place in the request pool; `token_ids` are the tokens to compute now; `start` tokens are already in
    its pages and slot.
    """

    row: int
    token_ids: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """Tokens in the request's pages and slot after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Ones:
    """What the one-token chunks read. `count` may be 0.

    pages: (count, width) int64, the pages of each chunk's context, padded with a page of its own.
    unwritten: (count, width * page_size) bool, the positions behind the context's end.
    slots: (count,) int64.
    """

    count: int
    pages: torch.Tensor
    unwritten: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Longer:
    """A chunk of several tokens: rows `begin` to `end` of the step. pages: (n,) int64, those of its context."""

    begin: int
    end: int
    start: int
    pages: torch.Tensor
    slot: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The step's T tokens and B chunks.

    token_ids, positions, write_pages, write_offsets: (T,) int64 (write_pages is empty where nothing is paged). last:
    (B,) int64, the row of each chunk's last token, in the order in which the chunks were given.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    last: torch.Tensor
    ones: Ones
    longer: tuple[Longer, ...]


def make_batch(chunks: Sequence[Chunk], storage: Storage) -> Batch:
    """Lay out the step and look up its pages and slots. The chunks must have passed `check_chunks`."""
    page_size = storage.layout.page_size
    device = storage.page_table.device
    # Stable: one-token chunks first, each kind in the given order.
    order = sorted(range(len(chunks)), key=lambda index: len(chunks[index].token_ids) > 1)
    ordered = [chunks[index] for index in order]
    rows = torch.tensor([chunk.row for chunk in ordered], device=device)
    starts = torch.tensor([chunk.start for chunk in ordered], device=device)
    lengths = torch.tensor([len(chunk.token_ids) for chunk in ordered], device=device)
    ends = torch.cumsum(lengths, 0)
    begins = ends - lengths

    token_ids = torch.tensor([token for chunk in ordered for token in chunk.token_ids], device=device)
    token_rows = rows.repeat_interleave(lengths)
    positions = torch.arange(len(token_ids), device=device) + (starts - begins).repeat_interleave(lengths)
    last = torch.empty_like(ends)
    last[torch.tensor(order, device=device)] = ends - 1

    table, slots = storage.page_table, storage.row_to_slot[rows].long()
    # A model without paged state has a table without columns, and no layer that asks for a page.
    written = table[token_rows, positions // page_size] if table.shape[1] else table.new_empty(0)
    ones = sum(len(chunk.token_ids) == 1 for chunk in ordered)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        write_pages=written.long(),
        write_offsets=positions % page_size,
        last=last,
        ones=_ones(rows[:ones], starts[:ones] + 1, slots[:ones], table, page_size),
        longer=tuple(
            Longer(begin, end, chunk.start, table[chunk.row, : -(-chunk.end // page_size)].long(), slot)
            for chunk, begin, end, slot in zip(
                ordered[ones:], begins[ones:].tolist(), ends[ones:].tolist(), slots[ones:].tolist(), strict=True
            )
        ),
    )


def _ones(
    rows: torch.Tensor, contexts: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, page_size: int
) -> Ones:
    count = len(rows)
    width = min(-(-int(contexts.max()) // page_size), table.shape[1]) if count else 0
    pages = table[rows, :width].long()
    held = torch.arange(width, device=rows.device) * page_size < contexts[:, None]
    unwritten = torch.arange(width * page_size, device=rows.device) >= contexts[:, None]
    # What the table holds behind a request's pages means nothing and must not be followed.
    return Ones(count, torch.where(held, pages, pages[:, :1]), unwritten, slots)


def check_chunks(chunks: Sequence[Chunk], storage: Storage) -> None:
    """Raise ValueError for chunks that cannot be run together."""
    if not chunks:
        raise ValueError("a forward step needs at least one chunk")
    room = storage.page_table.shape[1] * storage.layout.page_size
    rows: set[int] = set()
    for chunk in chunks:
        if not chunk.token_ids or chunk.start < 0:
            raise ValueError(f"row {chunk.row}: {len(chunk.token_ids)} tokens from position {chunk.start}")
        if storage.layout.page.nbytes and chunk.end > room:
            raise ValueError(f"row {chunk.row}: {chunk.end} tokens do not fit its page table of {room} tokens")
        if chunk.row in rows:
            raise ValueError(f"row {chunk.row} has two chunks in one step")
        rows.add(chunk.row)
