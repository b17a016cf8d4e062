"""What a request sends to its decode worker, and when: whole pages as chunks complete, the rest with the last."""

from __future__ import annotations

from pools.layout import PoolLayout
from prefill.request import PrefillRequest
from transfer.handoff import HandoffState


def send_computed(request: PrefillRequest, layout: PoolLayout, now: float) -> None:
    """Send what a chunk has completed. `layout` is that of this worker's pools.

    A page leaves when it is whole, so that nothing is sent twice and no page is read while it is being written; with
    the prompt's last chunk the last page goes, and the recurrent state, which is only then what decode needs.
    """
    _, route = request.peer.route
    lease = request.held
    at_end = not request.remaining
    stop = request.computed if at_end else request.computed - request.computed % layout.page_size
    tokens = bool(lease.pages) and stop > request.sent
    if not tokens and not at_end:
        return
    if request.handoff.state is HandoffState.RESERVED:
        request.handoff.move(HandoffState.MOVING, now)
    if tokens:
        route.send_tokens(request.attempt, lease.pages, request.pages, request.sent, stop)
        request.sent = stop
    if at_end:
        if lease.slots:
            route.send_slots(request.attempt, lease.slots, request.slots)
        route.finish(request.attempt)
