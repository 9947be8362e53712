"""Errors that every rank raises alike; a command line prints them as one line."""


class UsageError(ValueError):
    """Bad input; the message holds the value and the cure. Exit code 2."""


class Diverged(ArithmeticError):
    """Loss or gradient is not finite, on all ranks by common decision. Exit code 1."""
