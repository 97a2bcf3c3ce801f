"""Errors a user can cause, and warnings. Each message names the field, the value, and what is allowed."""

import warnings


class KVFoldError(ValueError):
    """Base of every error that a wrong input can cause; the command line turns it into exit status 2."""


class OutputError(KVFoldError):
    """A result could not be written where it was asked for; the command line exits with status 1.

    Attributes
    ----------
    result
        What could not be written, for whoever can still show it.
    """

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class MethodError(KVFoldError):
    """A method's name, option or value is not one of the allowed ones, or does not fit the model's shapes.

    Attributes
    ----------
    field, allowed
        The option and the values (a list, or an interval) that the message names; None where it names none.
    reason
        What a format said, where one refused.
    """

    def __init__(
        self, message: str, field: str | None = None, allowed: object = None, reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.field, self.allowed, self.reason = field, allowed, reason


class UnsupportedModelError(KVFoldError):
    """The model, or what it asks of its attention, is something kvfold does not fold."""


class CacheStateError(KVFoldError):
    """A cache was used in a way that would read or write the wrong tokens."""


class CacheFileError(KVFoldError):
    """A saved cache cannot be found, read or written, is damaged, or belongs to another model or method."""


class KVFoldWarning(UserWarning):
    """Something works otherwise than one might expect: layers that are not folded, a call that was taken back."""


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn, the first time only."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, KVFoldWarning, stacklevel=3)
