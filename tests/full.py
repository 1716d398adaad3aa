"""Whether the long form of the tests is asked for: ENGRAM_LAB_FULL=1 make test-all."""

from __future__ import annotations

import os

FULL = os.environ.get("ENGRAM_LAB_FULL") == "1"
