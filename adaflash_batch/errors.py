"""The one exception tree: what a person did wrong, in words that say how to mend it."""

from __future__ import annotations


class AdaflashError(Exception):
    """A mistake of the user's, or of the world's, with a hint; never a bug of ours.

    Attributes:
        message: what is wrong, naming the file, row, column or option. No full stop at the end.
        hint: what to do about it, or None.
        exit_code: what the process exits with (README, "Exit codes").
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(AdaflashError):
    """Usage, configuration, model or fingerprint: running the same again cannot help."""

    exit_code = 2


class InputError(AdaflashError):
    """An input file cannot be read."""

    exit_code = 5


class LockedError(AdaflashError):
    """Another process is at work there: running the same again, later, can help."""

    exit_code = 75


def first_line(error: Exception) -> str:
    """The message of an error, for a line of ours: without a full stop, never empty."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
