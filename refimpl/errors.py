"""Errors that mean something to a user; a command line prints them without a traceback."""


class UsageError(ValueError):
    """Bad input; the message holds the value and the cure. Raised alike on all ranks. Exit code 2."""


class Diverged(ArithmeticError):
    """Loss or weights are not finite, on all ranks by common decision. Exit code 1."""


class BadImage(ValueError):
    """An image that cannot be used, with its path and why. Exit code 1."""


class LoaderFailed(RuntimeError):
    """Loader processes died or found no memory; the message has the cure. Exit code 1."""


class CannotWrite(RuntimeError):
    """A file that was open cannot be written on; the message has path and cure. Exit code 1."""
