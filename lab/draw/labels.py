"""Tokens as a person sees them: every byte visible, nothing interpreted.

A label is reversible: `spell(label(piece)) == piece` for all bytes, so the labels of a prompt join to the prompt.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_SEEN = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_MEANT = {shown: char for char, shown in _SEEN.items()}
# Characters that a label uses for something else are themselves written as ⟨U+..⟩.
_RESERVED = {*_MEANT, "⟨", "⟩", "◌"}
_BLANK = "\ufffd\u115f\u1160\u3164\uffa0\u2800\u034f\u17b4\u17b5"  # fillers of Hangul, the empty braille cell, joiners
_PART = re.compile(r"⟨U\+(?P<point>[0-9A-F]+)⟩|⟨(?P<bytes>[0-9A-F]{2}(?: [0-9A-F]{2})*)⟩|◌?(?P<char>.)", re.S)


@dataclass(frozen=True)
class Token:
    """One position: its id, its bytes, and whether it stands for no text (BOS and the like)."""

    id: int
    piece: bytes
    special: bool = False

    @property
    def label(self) -> str:
        return label(self.piece)


def label(piece: bytes) -> str:
    """The visible text of a token: spaces ·, newlines ⏎, tabs ⇥, partial characters as bytes, ⟨F0 9F⟩."""
    # Surrogates stand for the bytes that are not UTF-8.
    text = piece.decode("utf-8", "surrogateescape")
    out: list[str] = []
    for run in re.findall(r"[\udc80-\udcff]+|[^\udc80-\udcff]", text):
        if "\udc80" <= run[0] <= "\udcff":
            out.append(f"⟨{' '.join(f'{ord(c) - 0xDC00:02X}' for c in run)}⟩")
        else:
            out.append(_visible(run, first=not out))
    return "".join(out)


def _visible(char: str, first: bool) -> str:
    if char in _SEEN:
        return _SEEN[char]
    kind = unicodedata.category(char)
    # Controls, formats, other spaces, unassigned; and letters that are drawn as nothing.
    if kind[0] in "CZ" or char in _RESERVED or char in _BLANK:
        return f"⟨U+{ord(char):04X}⟩"
    # A lone combining mark would sit on the character before it, which belongs to another token.
    return f"◌{char}" if first and kind[0] == "M" else char


def spell(text: str) -> bytes:
    """The bytes that a label, or several joined, stand for: the inverse of `label`."""
    out = bytearray()
    for part in _PART.finditer(text):
        if part["point"]:
            out += chr(int(part["point"], 16)).encode()
        elif part["bytes"]:
            out += bytes.fromhex(part["bytes"])
        else:
            out += _MEANT.get(part["char"], part["char"]).encode()
    return bytes(out)


def gives_back(tokens: Iterable[Token], prompt: str) -> bool:
    """Whether the labels of the tokens, special ones left out, spell exactly the prompt."""
    return spell("".join(token.label for token in tokens if not token.special)) == prompt.encode()


def tokens_of(
    prompt: str, ids: Sequence[int], start: Sequence[int], end: Sequence[int], texts: Sequence[str]
) -> list[Token]:
    """The tokens [pos] of a prompt from their byte offsets; one that covers no byte is special, named by its text."""
    raw = prompt.encode()
    return [
        Token(int(i), raw[a:b] if b > a else text.encode(), special=b <= a)
        for i, a, b, text in zip(ids, start, end, texts, strict=True)
    ]


def tokens_at(source: Any, prompt: int, prompts: Sequence[str]) -> list[Token]:
    """The tokens [pos] of one of several prompts, of a result over the positions of all of them."""
    at = [n for n, index in enumerate(source.prompt_index) if index == prompt]
    ids, start, end = (field[at].tolist() for field in (source.token_ids, source.char_start, source.char_end))
    return tokens_of(prompts[prompt], ids, start, end, [source.token_texts[n] for n in at])


def short(text: str, width: int) -> str:
    """The label cut to `width` characters, the cut shown as …"""
    return text if len(text) <= width else text[: width - 1] + "…"


def plotly(text: str) -> str:
    """Text that Plotly shows literally: neither its pseudo-HTML nor, by way of dollars, LaTeX."""
    return html.escape(text, quote=False).replace("$", "&#36;")


def markdown(text: str) -> str:
    """Text that Streamlit's Markdown (emphasis, LaTeX, :directives:, HTML) shows literally."""
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|<>~$:&@/])", r"\\\1", text).replace("\n", " ")


class Look(NamedTuple):
    """How a chip looks: what its hint says behind position and id, its CSS and a CSS class."""

    hint: str = ""
    style: str = ""
    kind: str = ""


def chips(tokens: Sequence[Token], look: Callable[[int], Look] | None = None) -> str:
    """HTML with a chip for each position, looking as `look` says; without it the id and, on hover, the bytes."""
    made = []
    for position, token in enumerate(tokens):
        if look is None:
            what = "special, stands for no text" if token.special else f"bytes {token.piece.hex(' ').upper()}"
            hint, style, kind, below = what, "", "", f"<sub>{token.id}</sub>"
        else:
            hint, style, kind, below = *look(position), ""
        title = " · ".join(part for part in (f"position {position}", f"id {token.id}", hint) if part)
        names = " ".join(part for part in ("chip", "special" if token.special else "", kind) if part)
        made.append(
            f'<span class="{names}" role="listitem" style="{style}" title="{html.escape(title)}">'
            f"{html.escape(token.label)}{below}</span>"
        )
    return f'<div class="chips" role="list">{"".join(made)}</div>'
