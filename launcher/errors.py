"""What can go wrong at the launcher.

LaunchError   a click error: shown as one line, exit code 1
"""

from __future__ import annotations

import click


class LaunchError(click.ClickException):
    """Something that the user can mend; the text says what was wrong and what to do."""
