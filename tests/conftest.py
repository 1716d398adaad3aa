"""No test may ask a network for anything, or find what this user has got for the lab."""

from __future__ import annotations

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ENGRAM_LAB_CACHE"] = os.path.join(tempfile.gettempdir(), "engram-lab-no-cache")
