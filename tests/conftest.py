"""No test may ask a network for anything, or find what this user has got for the lab or kept in it."""

from __future__ import annotations

import os
import tempfile

from tests.children import hear_signals

hear_signals()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch comes: sums as the apps that tests start have them
os.environ["ENGRAM_LAB_CACHE"] = os.path.join(tempfile.gettempdir(), "engram-lab-no-cache")
os.environ.pop("ENGRAM_LAB_STORE", None)
pytest_plugins = ["tests.tiny_lab"]
_data = tempfile.TemporaryDirectory(prefix="engram-lab-tests-")  # gone when the tests end
os.environ["ENGRAM_LAB_DATA"] = _data.name
