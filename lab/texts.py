"""The prompts and text sets that the lens page starts with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

TEXTS = Path(__file__).resolve().parent.parent / "assets" / "texts"
HELD_OUT = "held_out.txt"
ONE, SET = "one prompt", "text set"  # the modes of the lens page, as they stand in the URL


@cache
def examples() -> list[dict[str, str]]:
    """Our prompts: title, prompt, and why it is worth a look."""
    found: list[dict[str, str]] = json.loads((TEXTS / "prompts.json").read_text(encoding="utf-8"))
    return found


@cache
def held_out() -> tuple[str, ...]:
    """The sentences that we wrote and no model of ours was trained on."""
    return lines_of((TEXTS / HELD_OUT).read_bytes(), HELD_OUT)


def lines_of(raw: bytes, name: str) -> tuple[str, ...]:
    """The texts of a file, one a line, blank lines left out; DataError if it is not UTF-8 or holds none."""
    from models.errors import DataError  # brings torch with it, which the command line's --help need not wait for

    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text (byte {error.start}): save it as UTF-8.") from error
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise DataError(f"{name} holds no text: put one text on each line.")
    return lines
