"""Experiment sessions on disk or in PostgreSQL: named sets of runs, each a report with what it takes to see it again.

What is listed stands in the database (`schema`), every report in a compressed file addressed by its hash (`blobs`,
`packing`). A file is complete and on disk before the row that names it is committed.
"""

from engram_lab.lab.sessions.errors import DamagedBlobError, SessionNameError, StoreError, UnknownSessionError
from engram_lab.lab.sessions.infos import NewRun, RunInfo, SessionInfo, environment, run_request
from engram_lab.lab.sessions.store import Store, open_store

__all__ = [
    "DamagedBlobError",
    "NewRun",
    "RunInfo",
    "SessionInfo",
    "SessionNameError",
    "Store",
    "StoreError",
    "UnknownSessionError",
    "environment",
    "open_store",
    "run_request",
]
