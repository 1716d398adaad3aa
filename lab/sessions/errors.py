"""What a store refuses, each in one sentence that names the input and the way out."""

from __future__ import annotations

from engram_lab.models.errors import LabError


class StoreError(LabError):
    """A store that cannot be opened, read or written."""


class DamagedBlobError(StoreError):
    """Arrays that are missing, or no longer those that were kept."""


class UnknownSessionError(LabError):
    """No session of that name or id, or no such run or attachment."""


class SessionNameError(LabError):
    """A name, note or tag that a session cannot have, or a name that is taken."""
