"""The state machines: what their tables allow, and that no state is a trap."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

import decode.request
import prefill.request
import transfer.handoff
from wire.life import IllegalMove, Life

TABLES: dict[str, Mapping[Enum, frozenset[Enum]]] = {
    "prefill": prefill.request.ALLOWED,  # type: ignore[dict-item]
    "decode": decode.request.ALLOWED,  # type: ignore[dict-item]
    "hand-off": transfer.handoff.ALLOWED,  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_in_the_table(name: str) -> None:
    table = TABLES[name]
    assert set(table) == set(type(next(iter(table))))


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_reached_and_leads_to_an_end(name: str) -> None:
    table = TABLES[name]
    start = next(iter(table))

    def reachable(state: Enum) -> set[Enum]:
        seen, open_states = {state}, [state]
        while open_states:
            for following in table[open_states.pop()] - seen:
                seen.add(following)
                open_states.append(following)
        return seen

    assert reachable(start) == set(table)
    ends = {state for state, moves in table.items() if not moves}
    assert ends
    for state in table:
        assert reachable(state) & ends
        # No way back: a life is a straight line, so that each stamp is made once.
        assert not any(state in reachable(following) for following in table[state])


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_request_can_be_aborted_and_can_fail_in_every_state(name: str) -> None:
    table = TABLES[name]
    for moves in table.values():
        if moves:
            assert {"ABORTED", "FAILED"} <= {state.name for state in moves}


@given(st.sampled_from(sorted(TABLES)), st.data())
def test_moves_follow_the_table_and_are_stamped(name: str, data: st.DataObject) -> None:
    table = TABLES[name]
    states = list(table)
    life: Life[Enum] = Life(table, states[0], 0.0)
    for now in range(1, 12):
        to = data.draw(st.sampled_from(states))
        before = life.state
        if to in table[before]:
            life.move(to, float(now))
            assert life.state is to
            assert life.stamps[to] == now
        else:
            with pytest.raises(IllegalMove, match=f"{before.name} to {to.name}"):
                life.move(to, float(now))
            assert life.state is before
        assert life.ended == (not table[life.state])
