"""Pages of requests that have ended, kept for requests that begin with the same tokens.

A page is known by a hash over all tokens up to its end, so that equal keys mean equal prefixes. Pages are given up
oldest first; a prefix counts as used after what follows it, so that it always outlives it. Pages that a lease reads
are pinned and stay.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

HOLDER = "the prefix cache"


def chain_of(token_ids: Sequence[int], page_size: int, known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """The keys of all whole pages of these tokens, in order, by a hash that nobody can find collisions of.

    `known`: those of the first pages, if they have been computed before.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    keys = list(known)
    key = keys[-1] if keys else b""
    for start in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        key = hashlib.blake2b(key + tokens[start : start + page_size].tobytes(), digest_size=16).digest()
        keys.append(key)
    return tuple(keys)


class PrefixCache:
    """Which pages are kept under which keys. Knows numbers only; `pools.pools` owns them in its name."""

    def __init__(self) -> None:
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        self._pins: Counter[int] = Counter()

    @property
    def pages(self) -> Sequence[int]:
        """All that is kept."""
        return tuple(self._pages.values())

    @property
    def pins(self) -> Counter[int]:
        """How many leases read each page that is being read."""
        return self._pins.copy()

    @property
    def spare(self) -> int:
        """Pages that can be given up now."""
        return len(self._pages) - len(self._pins)

    def match(self, chain: Sequence[bytes]) -> tuple[int, ...]:
        """The pages of the longest prefix that is kept. Changes nothing."""
        return tuple(self._pages[key] for key in takewhile(self._pages.__contains__, chain))

    def spare_without(self, pages: Sequence[int]) -> int:
        """`spare`, once these are pinned."""
        return self.spare - sum(page not in self._pins for page in pages)

    def pin(self, chain: Sequence[bytes]) -> tuple[int, ...]:
        """Take `match(chain)` into use."""
        pages = self.match(chain)
        self._pins.update(pages)
        self._touch(chain[: len(pages)])
        return pages

    def unpin(self, pages: Sequence[int]) -> None:
        """One reader less of each."""
        self._pins.subtract(pages)
        self._pins = +self._pins

    def keep(self, chain: Sequence[bytes], pages: Sequence[int]) -> tuple[int, ...]:
        """Keep those pages, of the end of the chain, whose keys are new; returns them."""
        new = {key: page for key, page in zip(chain[len(chain) - len(pages) :], pages, strict=True)
               if key not in self._pages}  # fmt: skip
        self._pages.update(new)
        self._touch([key for key in chain if key in self._pages])
        return tuple(new.values())

    def evict(self, count: int) -> tuple[int, ...]:
        """Give up that many spare pages, the longest unused first. Raises ValueError when there are fewer."""
        if count > self.spare:
            raise ValueError(f"cannot give up {count} pages of {self.spare}")
        keys: list[bytes] = []
        for key, page in self._pages.items():
            if len(keys) == count:
                break
            if page not in self._pins:
                keys.append(key)
        return tuple(self._pages.pop(key) for key in keys)

    def _touch(self, chain: Sequence[bytes]) -> None:
        for key in reversed(chain):
            self._pages.move_to_end(key)
