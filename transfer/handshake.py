"""May these two workers hand requests over? Compared before the first byte; a mismatch is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

from pools.spec import PagedGroup, SlotGroup, StateSpec
from wire.messages import PROTOCOL_VERSION, PeerHello


def mismatch(hello: PeerHello, fingerprint: str, spec: StateSpec) -> str | None:
    """What differs between a prefill worker's `hello` and this decode worker, in words; None when all agrees."""
    differences = [
        *_differ("protocol version", hello.protocol, PROTOCOL_VERSION),
        *_spec_differences(hello.spec, spec),
        *_differ("model fingerprint (weights, config and tokenizer)", hello.fingerprint, fingerprint),
    ]
    return "; ".join(differences) or None


def _differ(what: str, prefill: object, decode: object) -> Iterator[str]:
    if prefill != decode:
        yield f"{what}: prefill has {prefill}, decode has {decode}"


def _spec_differences(prefill: StateSpec, decode: StateSpec) -> Iterator[str]:
    yield from _group_differences("paged", prefill.paged, decode.paged)
    yield from _group_differences("slot", prefill.slots, decode.slots)


def _group_differences(
    kind: str,
    prefill: tuple[PagedGroup, ...] | tuple[SlotGroup, ...],
    decode: tuple[PagedGroup, ...] | tuple[SlotGroup, ...],
) -> Iterator[str]:
    ours = {group.name: group for group in decode}
    theirs = {group.name: group for group in prefill}
    yield from _differ(f"{kind} state groups", sorted(theirs), sorted(ours))
    for name in sorted(theirs.keys() & ours.keys()):
        there, here = theirs[name], ours[name]
        if there == here:
            continue
        yield from _differ(f"layers of {name}", list(there.layers), list(here.layers))
        their_tensors = {tensor.name: tensor for tensor in there.tensors}
        our_tensors = {tensor.name: tensor for tensor in here.tensors}
        yield from _differ(f"tensors of {name}", sorted(their_tensors), sorted(our_tensors))
        for tensor_name in sorted(their_tensors.keys() & our_tensors.keys()):
            a, b = their_tensors[tensor_name], our_tensors[tensor_name]
            what = f"{name}.{tensor_name}"
            yield from _differ(f"dtype of {what}", a.dtype.value, b.dtype.value)
            yield from _differ(f"shape of {what}", list(a.shape), list(b.shape))
            yield from _differ(f"sharding of {what}", (a.axis, a.segments), (b.axis, b.segments))
        if isinstance(there, PagedGroup) and isinstance(here, PagedGroup):
            yield from _differ(f"window of {name}", there.window, here.window)
