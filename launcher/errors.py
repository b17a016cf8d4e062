"""What can go wrong at the launcher.

LaunchError        a click error: shown as one line, exit code 1
└── AlreadySaid    a process that was started has said it in its own line
"""

from __future__ import annotations

from typing import IO, Any

import click


class LaunchError(click.ClickException):
    """Something that the user can mend; the text says what was wrong and what to do."""


class AlreadySaid(LaunchError):  # noqa: N818 - named by what happened
    """A process that was started has ended with a line of its own; saying more would hide it."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Nothing to add."""
