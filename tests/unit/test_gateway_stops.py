from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.stops import Stops

TEXTS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def whole_text_oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read letter by letter; the first stop string that is complete ends the answer."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(st.lists(TEXTS, max_size=8), STOPS)
def test_equals_the_search_in_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    running = Stops(stops)
    got = ""
    for piece in pieces:
        got += running.feed(piece)
        if running.hit:
            break
    got += running.flush()
    assert (got, running.hit) == whole_text_oracle("".join(pieces), stops)


@given(st.lists(TEXTS, max_size=8), STOPS)
def test_holds_back_no_more_than_may_be_a_beginning(pieces: list[str], stops: list[str]) -> None:
    running = Stops(stops)
    seen = got = ""
    for piece in pieces:
        seen += piece
        got += running.feed(piece)
        if running.hit:
            return
        held = seen[len(got) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_stop_string_split_over_pieces() -> None:
    stops = Stops(["</end>"])
    assert [stops.feed(piece) for piece in ("Hello <", "/en", "d", "> more")] == ["Hello ", "", "", ""]
    assert stops.hit
    assert stops.flush() == ""


def test_false_alarm_is_given_back() -> None:
    stops = Stops(["</end>"])
    assert stops.feed("a</e") == "a"
    assert stops.feed("lse") == "</else"
    assert stops.feed("<") == ""
    assert stops.flush() == "<"
