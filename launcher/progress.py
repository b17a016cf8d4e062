"""How far processes have come with loading, as bars on a terminal and nowhere else."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Bars:
    """One bar for each process that has reported; gone when all is loaded."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        self._progress = Progress(*columns, TimeElapsedColumn(), transient=True, disable=not sys.stdout.isatty())
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, name: str, percent: int) -> None:
        """A process has come this far."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(f"{name}: loading", total=100)
        self._progress.update(self._tasks[name], completed=percent)
