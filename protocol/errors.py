"""The errors a person sees. Each is one line that says what is wrong, where, and what to do.

Every process ends on a `HeadraceError` with its message on stderr and its `exit_code`, never with
a traceback.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Something a person can act on; `str(error)` is the one line shown to them."""

    exit_code = 1


class UsageError(HeadraceError):
    """An option or a request that cannot be carried out as given."""

    exit_code = 2


class CheckpointError(HeadraceError):
    """A checkpoint file that is missing, damaged, or not what its config says."""

    exit_code = 3


class ResourceError(HeadraceError):
    """The machine lacks what was asked for (memory, locked memory, a writable directory)."""

    exit_code = 4


class ProcessDied(HeadraceError):
    """A process of the group ended when it should not have."""

    exit_code = 5


class StallError(HeadraceError):
    """A bounded wait ran out; the message names what was waited for."""

    exit_code = 6


class ReadError(HeadraceError):
    """A tensor's bytes could not be read; the request fails and the engine lives on."""

    exit_code = 7
