"""The one exception that stands for a mistake of the person who runs the lab."""

from __future__ import annotations


class UserError(Exception):
    """A mistake of the user, or of the place the lab runs in: a missing file, no network, ...

    The message is one line that says what was given, what is accepted and what to do. The command
    line prints it without a traceback and exits with code 2. A caller's mistake in code is a
    ValueError or TypeError instead.
    """
