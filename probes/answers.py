"""How an answer stands behind its prompt: one rule for facts, caches and losses."""

from __future__ import annotations

import unicodedata

OPEN = "([{<\"'\u201c\u2018\u00ab\u300c\u300e\uff08/-$\u20ac\u00a3\u00a5#@_"  # no space goes behind one of these
CLOSE = ".,;:!?%)]}\u2019\u201d\u00bb\u2026\u3001\u3002\uff0c\uff1b\uff1a\uff1f\uff01\uff09\u300d\u300f"  # nor before
# Scripts that put no space between words, by the beginning of the names of their letters.
_UNSPACED = (
    "CJK ",
    "HIRAGANA",
    "KATAKANA",
    "THAI ",
    "LAO ",
    "KHMER ",
    "MYANMAR ",
    "TIBETAN ",
    "FULLWIDTH",
    "IDEOGRAPHIC",
)


def behind(text: str, answer: str) -> str:
    """The answer as it follows the text: with one space before it where it has none and English would have one.

    None goes before closing punctuation, behind an opening sign or in scripts without spaces between words; behind
    white space an answer loses its own. An empty answer stays empty.
    """
    if not answer or not text:
        return answer
    if text[-1].isspace():
        return answer.lstrip(" ")
    if answer[0].isspace() or answer[0] in CLOSE or text[-1] in OPEN:
        return answer
    if any(unicodedata.name(letter, "").startswith(_UNSPACED) for letter in (text[-1], answer[0])):
        return answer
    return f" {answer}"
