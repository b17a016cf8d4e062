"""What a request sends to its decode worker, and when: whole pages as chunks complete, the rest with the last."""

from __future__ import annotations

from pools.layout import PoolLayout
from prefill.request import PrefillRequest
from transfer.handoff import HandoffState
from transfer.plan import plan_slots, plan_tokens


def send_computed(request: PrefillRequest, layout: PoolLayout, now: float) -> None:
    """Send what a chunk has completed. `layout` is that of this worker's pools.

    A page leaves when it is whole, so that nothing is sent twice and no page is read while it is being written; with
    the prompt's last chunk the last page goes, and the recurrent state, which is only then what decode needs.
    """
    target, sender = request.peer.route
    lease = request.held
    at_end = not request.remaining
    whole = request.computed - request.computed % layout.page_size
    stop = request.computed if at_end else whole
    ranges = []
    if lease.pages and stop > request.sent:
        ranges = plan_tokens(layout, target, lease.pages, request.pages, request.sent, stop)
        request.sent = stop
    if at_end:
        ranges += plan_slots(layout, target, lease.slots, request.slots)
    if not ranges:
        return
    if request.handoff.state is HandoffState.RESERVED:
        request.handoff.move(HandoffState.MOVING, now)
    sender.write(request.attempt, ranges)
    if at_end:
        sender.finish(request.attempt)
