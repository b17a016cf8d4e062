"""NIXL: RDMA and friends by UCX, where the extra `nixl` is installed. The prefill worker writes decode's pools.

Descriptors of all pages and slots are prepared once per pool and connection; a write then names them by number. What
is not made of whole records (other page or tensor-parallel sizes) is described range by range.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from pools.layout import PoolLayout
from transfer.errors import MediumUnusable, PeerGone, TransferError
from transfer.medium import SILENCE_S, never
from transfer.plan import LeasedMemory, Range
from wire.messages import AttemptId

_POLL_S = 0.00005
_MEMORY = "DRAM"


def unusable() -> str | None:
    """Why NIXL cannot be used here; None when it can."""
    if importlib.util.find_spec("nixl") is None:
        return "the package nixl is not installed (pip install 'tandem-serve[nixl]')"
    try:
        _agent("probe")
    except MediumUnusable as error:
        return str(error)
    return None


def _agent(name: str) -> Any:
    """A NIXL agent with UCX. Raises MediumUnusable."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it would speak on standard output
    try:
        from nixl._api import nixl_agent, nixl_agent_config

        return nixl_agent(f"{name}-{secrets.token_hex(6)}", nixl_agent_config(backends=["UCX"]))
    except Exception as error:  # whatever the library or its plugins raise, it cannot be used
        raise MediumUnusable(f"NIXL does not work here: {error}") from error


@dataclass(frozen=True, slots=True)
class _Reach:
    """A registered block: NIXL's own description of its agent, and where the block lies."""

    metadata: str
    address: int
    nbytes: int

    @classmethod
    def from_json(cls, text: str) -> _Reach:
        try:
            fields = json.loads(text)
            return cls(str(fields["metadata"]), int(fields["address"]), int(fields["nbytes"]))
        except (ValueError, KeyError, TypeError) as error:
            raise MediumUnusable(f"the peer's memory is described by {text[:200]!r}") from error


class NixlLanding:
    """Decode side: the pools are registered, and that is all there is to do. `block`: uint8, `(nbytes,)`."""

    peer_writes = True

    def __init__(self, block: np.ndarray) -> None:
        self._agent = _agent("landing")
        self._block = block  # must outlive its registration
        self._memory = self._agent.register_memory([(block.ctypes.data, block.nbytes, 0, "")], _MEMORY)
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self._reach = json.dumps(asdict(_Reach(metadata, block.ctypes.data, block.nbytes)))

    @property
    def reach(self) -> str:
        """How to write to the block."""
        return self._reach

    def open(self, attempt: AttemptId, memory: LeasedMemory) -> None:
        """Nothing to do: the peer keeps to what `Reserved` told it."""

    def close_attempt(self, attempt: AttemptId) -> int | None:
        """Nothing can be closed and nothing is seen: the fence does the rest."""
        return None

    def close(self) -> None:
        """Nobody may write any more."""
        self._agent.deregister_memory(self._memory)


class NixlChannel:
    """Prefill side. `source` is this worker's pool memory, uint8, `(nbytes,)`; the layouts are both sides'."""

    def __init__(self, source: np.ndarray, reach: str, here: PoolLayout, there: PoolLayout) -> None:
        peer = _Reach.from_json(reach)
        if peer.nbytes != there.nbytes:
            raise MediumUnusable(f"the peer's memory has {peer.nbytes} bytes, its pools {there.nbytes}")
        self._agent = _agent("channel")
        self._source = source
        self._bases = source.ctypes.data, peer.address
        self._memory = self._agent.register_memory([(source.ctypes.data, source.nbytes, 0, "")], _MEMORY)
        try:
            self._peer = self._agent.add_remote_agent(base64.b64decode(peer.metadata))
            self._ours = self._agent.prep_xfer_dlist("", self._described(here, self._bases[0]), _MEMORY)
            self._theirs = self._agent.prep_xfer_dlist(self._peer, self._described(there, peer.address), _MEMORY)
        except Exception as error:  # the library's own kinds
            raise MediumUnusable(f"NIXL cannot reach the peer: {error}") from error
        self._layouts = here, there
        self._moving: dict[AttemptId, list[Any]] = {}

    @staticmethod
    def _described(layout: PoolLayout, base: int) -> list[tuple[int, int, int]]:
        pages = [(base + layout.page_offset(page), layout.page.nbytes, 0) for page in range(layout.num_pages)]
        slots = [(base + layout.slot_offset(slot), layout.slot.nbytes, 0) for slot in range(layout.num_slots)]
        return [record for record in (*pages, *slots) if record[1]]

    def write(self, attempt: AttemptId, ranges: Sequence[Range], cancelled: Callable[[], bool] = never) -> None:
        """Begin to move; all of a call's ranges go as one transfer of NIXL's."""
        if not ranges:
            return
        records = _records(*self._layouts, ranges)
        try:
            if records is not None:
                handle = self._agent.make_prepped_xfer("WRITE", self._ours, records[0], self._theirs, records[1])
            else:
                pieces = [piece for item in ranges for piece in _pieces(item)]
                ours, theirs = (
                    self._agent.get_xfer_descs([(base + piece[side], piece[2], 0) for piece in pieces], _MEMORY)
                    for side, base in enumerate(self._bases)
                )
                handle = self._agent.initialize_xfer("WRITE", ours, theirs, self._peer)
            self._moving.setdefault(attempt, []).append(handle)
            self._agent.transfer(handle)
        except Exception as error:
            raise TransferError(f"NIXL cannot write: {error}") from error

    def wait(self, attempt: AttemptId, cancelled: Callable[[], bool] = never) -> None:
        """Until NIXL says that all is there."""
        deadline = time.monotonic() + SILENCE_S
        for handle in self._moving.get(attempt, []):
            while not cancelled() and not self._is_done(handle):
                if time.monotonic() > deadline:
                    raise PeerGone(f"NIXL has not finished a write for {SILENCE_S:g} s")
                time.sleep(_POLL_S)

    def _is_done(self, handle: Any) -> bool:
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise PeerGone(f"NIXL's write failed: {error}") from error
        if state == "ERR":
            raise PeerGone("NIXL's write failed")
        return bool(state == "DONE")

    def abandon(self, attempt: AttemptId) -> None:
        """Let what is on its way end, well or not, for as long as it takes: it may be in the peer's memory."""
        for handle in self._moving.pop(attempt, []):
            try:
                while not self._is_done(handle):
                    time.sleep(_POLL_S)
            except PeerGone:
                pass  # it has ended
            self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Let go of the peer and of the descriptors."""
        for attempt in list(self._moving):
            self.abandon(attempt)
        for prepared in (self._ours, self._theirs):
            self._agent.release_dlist_handle(prepared)
        self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._memory)


def _records(here: PoolLayout, there: PoolLayout, ranges: Sequence[Range]) -> tuple[list[int], list[int]] | None:
    """The ranges as numbers of prepared descriptors here and there; None when they are not made of whole records."""
    found: tuple[list[int], list[int]] = ([], [])
    for item in ranges:
        if item.repeats:
            return None
        for numbers, layout, offset in zip(found, (here, there), (item.source, item.target), strict=True):
            at = layout.record_at(offset)
            count, rest = divmod(item.nbytes, at.layout.nbytes)
            if rest or at.start != offset:
                return None
            # Pages stand before slots, where there are any.
            first = at.number + (layout.num_pages if at.kind == "slot" and layout.page.nbytes else 0)
            numbers.extend(range(first, first + count))
    return found if len(found[0]) == len(found[1]) else None


def _pieces(item: Range) -> Iterator[tuple[int, int, int]]:
    """(source, target, bytes) of every stretch of a range."""
    for at in product(*(range(repeat.times) for repeat in item.repeats)):
        source = item.source + sum(n * repeat.source_step for n, repeat in zip(at, item.repeats, strict=True))
        target = item.target + sum(n * repeat.target_step for n, repeat in zip(at, item.repeats, strict=True))
        yield source, target, item.nbytes
