"""Whether the long form of the tests is asked for: ENGRAM_LAB_FULL=1 make test-all."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

FULL = os.environ.get("ENGRAM_LAB_FULL") == "1"


def examples(**options: Any) -> settings:
    """How many cases hypothesis makes up: 25, always the same; in the long form many, each time others."""
    return settings(max_examples=300 if FULL else 25, derandomize=not FULL, deadline=None, **options)
