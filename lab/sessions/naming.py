"""What a session may be called, and the text that a search looks through."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from engram_lab.lab.sessions.errors import SessionNameError

LONGEST_NAME, LONGEST_TAG, LONGEST_NOTE, MOST_TAGS = 120, 60, 100_000, 40  # characters, and tags of a session
LONGEST_MODEL, LONGEST_SEARCH = 300, 200_000  # what of it is searched
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")  # control characters, lone surrogates, line and paragraph separators


def clean_name(name: str, what: str = "The name of a session", longest: int = LONGEST_NAME) -> str:
    """One line without space around it, its letters composed (NFC); SessionNameError for what is none."""
    line = unicodedata.normalize("NFC", name).strip()
    if not 1 <= len(line) <= longest or any(unicodedata.category(letter) in _CONTROLS for letter in line):
        raise SessionNameError(f'{what} is one line of 1 to {longest} characters, which "{shown(line, 40)}" is not.')
    return line


def clean_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Each tag once, in order; SessionNameError for what is none."""
    found = tuple(dict.fromkeys(clean_name(tag, "A tag", LONGEST_TAG) for tag in tags))
    if len(found) > MOST_TAGS:
        raise SessionNameError(f"A session has at most {MOST_TAGS} tags, not {len(found)}.")
    return found


def clean_note(note: str) -> str:
    """The note; SessionNameError for one that is too long or holds what no database takes."""
    if len(note) > LONGEST_NOTE:
        raise SessionNameError(f"A note has at most {LONGEST_NOTE:,} characters; this one has {len(note):,}.")
    if storable(note) != note:
        raise SessionNameError("A note is text, and this one holds a NUL or half a character: take it out.")
    return note


def shown(text: str, most: int = 120) -> str:
    """Any text as it may stand in a sentence."""
    cut = text[:most] + "..." * (len(text) > most)
    return "".join("\ufffd" if unicodedata.category(letter) in _CONTROLS else letter for letter in cut)


def storable(text: str) -> str:
    """Text that every database takes: NUL and lone surrogates become U+FFFD."""
    return text.replace("\0", "\ufffd").encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def folded(texts: Iterable[str]) -> str:
    """What is searched: the texts a line each, without the difference of capitals, cut to what is bearable."""
    found: list[str] = []
    left = LONGEST_SEARCH
    for text in texts:
        found.append(unicodedata.normalize("NFC", storable(text[:left])).casefold())
        left -= len(text) + 1
        if left <= 0:
            break
    return "\n".join(found)


def texts_of(plain: Any) -> Iterator[str]:
    """Every string of plain JSON, in order, keys left out."""
    if isinstance(plain, str):
        yield plain
    elif isinstance(plain, dict | list):
        for item in plain.values() if isinstance(plain, dict) else plain:
            yield from texts_of(item)
