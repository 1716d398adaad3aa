"""The prompts and text sets that the pages start with, and how a user's own are read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from engram_lab.models.files import load_json

if TYPE_CHECKING:
    from engram_lab.probes.sensitivity import Item, TextSet

TEXTS = Path(__file__).resolve().parents[2] / "assets" / "texts"
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
    """The lines of a file without white space at their ends, blank ones left out; DataError if it holds none.

    Lines end where editors end them. A form feed, a vertical tab or U+2028 is part of a text: pdftotext leaves them.
    """
    from engram_lab.models.errors import (
        DataError,  # brings torch with it, which the command line's --help need not wait for
    )

    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text (byte {error.start}): save it as UTF-8.") from error
    lines = tuple(line.strip() for line in re.split(r"\r\n|\r|\n", text) if line.strip())
    if not lines:
        raise DataError(f"{name} holds no text: put one text on each line.")
    return lines


def texts_of(raw: bytes, name: str) -> tuple[str, ...]:
    """The texts of a file, one a line, or the "prompt" of each line of a .jsonl, which keeps a text exactly.

    Raises DataError.
    """
    from engram_lab.models.errors import DataError

    lines = lines_of(raw, name)
    if not name.endswith(".jsonl"):
        return lines
    prompts = []
    for n, line in enumerate(lines, 1):
        try:
            prompts.append(load_json(line)["prompt"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DataError(f'{name} has no JSON object with a "prompt" as its text {n}.') from None
        if not isinstance(prompts[-1], str):
            raise DataError(f"{name} has a prompt that is no text as its text {n}.")
    return tuple(prompts)


def file_of(texts: Sequence[str], stem: str = "texts") -> tuple[str, str]:
    """(name, content) of a file that `texts_of` reads back as these texts: plain where that does, else JSON lines."""
    plain = "".join(f"{text}\n" for text in texts)
    if all(text and text == text.strip() and not re.search("[\r\n\ufeff]", text) for text in texts):
        return f"{stem}.txt", plain
    return f"{stem}.jsonl", "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in texts)


def items_of(raw: bytes, name: str) -> tuple[Item, ...]:
    """Items of a .jsonl with "prompt", "answer" and maybe "context", or whole texts, one a line. Raises DataError.

    An answer stands behind its prompt as probes.answers.behind has it, or with "space": false exactly as it is; an
    empty one scores the whole text.
    """
    from engram_lab.models.errors import DataError
    from engram_lab.probes.answers import behind
    from engram_lab.probes.sensitivity import Item

    lines = lines_of(raw, name)
    if not name.endswith(".jsonl"):
        return tuple(Item(line) for line in lines)
    items = []
    for n, line in enumerate(lines, 1):
        try:
            stored = load_json(line)
            parts, space = [stored.get("context", ""), stored["prompt"], stored["answer"]], stored.get("space", True)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            parts, space = [None], True
        if not all(isinstance(part, str) for part in parts) or not isinstance(space, bool):
            raise DataError(f'{name} has no JSON object with the texts "prompt" and "answer" as its item {n}.')
        context, prompt, answer = (str(part) for part in parts)
        text = f"{context} {prompt}".strip() if context else prompt
        items.append(Item(text, behind(text, answer) if space else answer))
    return tuple(items)


@cache
def shipped_sets() -> tuple[TextSet, ...]:
    """Facts to complete from memory, answers to read from the text before, and whole sentences; all written by us."""
    from engram_lab.probes.sensitivity import TextSet

    files = {"facts": "facts.jsonl", "reading": "reading.jsonl", "sentences": HELD_OUT}
    return tuple(TextSet(name, items_of((TEXTS / file).read_bytes(), file)) for name, file in files.items())
