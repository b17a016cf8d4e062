"""What arrives by a hand-off: whether it is whole, the report of it, and the count of all."""

from __future__ import annotations

from decode.peers import PrefillPeer
from decode.request import DecodeRequest
from wire.messages import HandedOver, Incarnation, Landed


class Handovers:
    """Hand-offs since start: how many, their bytes, and how many were `damaged` on their way."""

    def __init__(self, worker: str, incarnation: Incarnation, page_size: int) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._page_size = page_size
        self.count = 0
        self.nbytes = 0
        self.damaged = 0

    def problem(self, request: DecodeRequest, peer: PrefillPeer, landed: Landed) -> str | None:
        """Close the hand-off, and say what is wrong with it; None when all is here."""
        arrived = peer.landing.close_attempt(landed.attempt)
        if not landed.intact or landed.incarnation != peer.incarnation:
            return "the hand-off's record is damaged"
        if landed.prompt_tokens != request.prompt_tokens or arrived not in (None, landed.nbytes):
            return f"the hand-off is incomplete: {arrived} of {landed.nbytes} bytes, {landed.prompt_tokens} tokens"
        if damage := peer.landing.damage(landed.digests):
            self.damaged += 1
            return f"the hand-off was damaged on its way: {damage}"
        return None

    def take(self, request: DecodeRequest, landed: Landed) -> HandedOver:
        """Count a whole one; returns what the gateway is told of it."""
        self.count += 1
        self.nbytes += landed.nbytes
        return HandedOver(
            worker=self._worker,
            incarnation=self._incarnation,
            attempt=landed.attempt,
            nbytes=landed.nbytes,
            cached_tokens=len(request.held.shared) * self._page_size,
            wire_s=landed.wire_s,
            unhidden_s=landed.unhidden_s,
        )
