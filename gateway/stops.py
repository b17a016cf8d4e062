"""Stop strings over a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Cuts a text before a stop string, wherever the pieces of the text divide.

    Text that may still turn out to be the beginning of a stop string is held back. The one that is complete first
    counts (of two that end together, the longer), as if the text came letter by letter; no part of it gets out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """Take in more text; returns what is certain to be part of the answer. Sets `hit`."""
        if not self._stops:
            return text
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.hit = self.hit or bool(found)
        split = min(found)[1] if found else len(self._held) - max(map(self._begun, self._stops))
        piece = self._held[:split]
        self._held = "" if found else self._held[split:]
        return piece

    def flush(self) -> str:
        """No more text comes: what was held back is part of the answer."""
        piece, self._held = self._held, ""
        return piece

    def _begun(self, stop: str) -> int:
        """The length of the longest beginning of `stop` that the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((length for length in range(longest, 0, -1) if self._held.endswith(stop[:length])), 0)
