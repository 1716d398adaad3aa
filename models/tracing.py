"""What every file with an nnsight trace needs: the text that nnsight compiles is the one that was imported."""

from __future__ import annotations

import linecache
from pathlib import Path

from nnsight.tracing.globals import BLOCKS, SOURCES


def pin_source(file: str) -> None:
    """Give nnsight the text of a module at its import: call `pin_source(__file__)` in every file with a trace.

    nnsight would read the file at the first trace, keep it for good, and run another body if it was edited before.
    """
    linecache.checkcache(file)
    for key in [key for key in BLOCKS if key[0] == file]:
        del BLOCKS[key]
    SOURCES[file] = Path(file).read_text(encoding="utf-8")
