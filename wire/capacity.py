"""What a worker can hold, as it tells the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Planned(Protocol):
    """The part of a worker's memory plan that others need to know."""

    @property
    def max_running_requests(self) -> int:  # noqa: D102
        ...

    @property
    def max_request_tokens(self) -> int:  # noqa: D102
        ...

    @property
    def num_rows(self) -> int:  # noqa: D102
        ...

    @property
    def num_pages(self) -> int:  # noqa: D102
        ...

    @property
    def num_slots(self) -> int:  # noqa: D102
        ...

    @property
    def page_size(self) -> int:  # noqa: D102
        ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a worker can hold. `max_request_tokens`: the longest prompt plus answer it could ever serve."""

    max_running_requests: int
    max_request_tokens: int
    num_rows: int
    num_pages: int
    num_slots: int
    page_size: int

    @classmethod
    def of(cls, plan: Planned) -> Capacity:
        """What a worker with this memory plan can hold."""
        return cls(
            max_running_requests=plan.max_running_requests,
            max_request_tokens=plan.max_request_tokens,
            num_rows=plan.num_rows,
            num_pages=plan.num_pages,
            num_slots=plan.num_slots,
            page_size=plan.page_size,
        )
