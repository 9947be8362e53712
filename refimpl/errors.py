"""The one error that means: what the user gave cannot work, and here is the cure."""


class UsageError(ValueError):
    """Bad input; the message holds the value and the cure. Command lines exit with code 2."""
