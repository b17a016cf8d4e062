"""What every kind of worker tells the gateway of itself."""

from __future__ import annotations

from models.serving import Served
from pools.pools import Pools
from wire.capacity import Capacity
from wire.messages import PROTOCOL_VERSION, Hello, Incarnation, Load, Role


def hello_of(served: Served, worker: str, incarnation: Incarnation, role: Role, peer_endpoint: str = "") -> Hello:
    """Who this worker is and what it serves. Its tensor-parallel size does not matter to the gateway."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        worker=worker,
        incarnation=incarnation,
        role=role,
        model=served.name,
        fingerprint=served.fingerprint,
        spec_digest=served.spec.digest(),
        peer_endpoint=peer_endpoint,
        capacity=Capacity.of(served.plan),
    )


def load_of(
    worker: str,
    incarnation: Incarnation,
    pools: Pools,
    *,
    waiting: int,
    running: int,
    handoffs: int = 0,
    handoff_bytes: int = 0,
    damaged_handoffs: int = 0,
    oldest_s: float = 0.0,
) -> Load:
    """How busy this worker is."""
    stats = pools.stats()
    return Load(
        worker=worker,
        incarnation=incarnation,
        waiting=waiting,
        running=running,
        free_rows=stats.rows.free,
        free_pages=stats.pages.free + stats.kept,
        free_slots=stats.slots.free,
        handoffs=handoffs,
        handoff_bytes=handoff_bytes,
        damaged_handoffs=damaged_handoffs,
        fenced=stats.rows.fenced,
        oldest_s=oldest_s,
    )
