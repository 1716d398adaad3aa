"""Where two models are compared: texts with their entities, from files, and the positions that stand for them.

An entity is a span of characters [start, end) of its text. Files, also packed as .xz or .gz, are
    plain:      UTF-8, one text a line, without entities;
    BIO/CoNLL:  one token a line with its tag as the last column, separated by tabs or spaces, a blank line between
                sentences; tags O, B-type, I-type (also IOB1, and BIOES or BILOU with E-/L- and S-/U-);
    JSON lines: {"text": ..., "entities": [[start, end], ...]} a line, which keeps a text exactly as it is.
The tokens of a BIO file are joined by spaces, except where English has none: before closing punctuation, after an
opening bracket or currency sign, inside quotation marks, before clitics ('s, n't). Penn's -LRB-, `` and '' become (
and ". The spans are those of the joined text.
"""

from __future__ import annotations

import json
import lzma
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engram_lab.models.errors import AlignmentError, DataError, LabError
from engram_lab.models.files import load_json
from engram_lab.models.handle import Handle
from engram_lab.probes.spans import Spans, align, spans_of

ENTITY, ALL, LAST = "entity", "all", "last"
POINTS = (ENTITY, ALL, LAST)
MAX_BYTES = 2**28  # of an unpacked file
_TAG = re.compile(r"O|[BIESLU](?:-\S+)?")
_PENN = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}", "``": '"', "''": '"'}
_NO_SPACE_BEFORE = re.compile(r"[.,;:!?%)\]}’”»…]+|['’](?:s|m|d|re|ve|ll|t)|n['’]t", re.IGNORECASE)
_NO_SPACE_AFTER = re.compile(r"[(\[{“«‘$£€]+")


@dataclass(frozen=True)
class Sentence:
    """A text and its entities, spans of characters [start, end) in the order of the text."""

    text: str
    entities: tuple[tuple[int, int], ...] = ()


def read_sentences(raw: bytes, name: str) -> tuple[Sentence, ...]:
    """The sentences of a file of any kind above, told apart by what it holds.

    DataError for one that is not text, holds none, or has a line that does not fit the others.
    """
    try:
        text = _unpacked(raw, name).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text (byte {error.start}): save it as UTF-8.") from error
    lines = re.split(r"\r\n|\r|\n", text)  # splitlines would also split at characters that a token may hold
    filled = [line for line in lines if line.strip()]
    if not filled:
        raise DataError(f"{name} holds no text: put one text, or one token and its tag, on each line.")
    if re.match(r'\s*\{\s*"', filled[0]):
        return tuple(_from_json(line, n, name) for n, line in enumerate(lines, 1) if line.strip())
    first = [line for line in filled[:1000] if not _is_comment(line)] or filled[:1]
    if 10 * sum(_row(line) is not None for line in first) < 9 * len(first):
        return tuple(Sentence(line.strip()) for line in filled)
    return tuple(_from_bio(_unnumbered(lines), name))


def _unpacked(raw: bytes, name: str) -> bytes:
    """The bytes of a file that may be packed as .xz or .gz, told by how it begins."""
    packed: Any = None
    if raw.startswith(b"\x1f\x8b"):
        packed = zlib.decompressobj(wbits=31)
    elif raw.startswith(b"\xfd7zXZ\x00"):
        packed = lzma.LZMADecompressor()
    whole = True
    if packed is not None:
        try:
            # A small file may unpack to a very large one: no more than is allowed.
            raw, whole = packed.decompress(raw, MAX_BYTES + 1), packed.eof
        except (lzma.LZMAError, zlib.error):
            raw, whole = b"", False
    if not whole and len(raw) <= MAX_BYTES:
        raise DataError(f"{name} is a packed file that is damaged or cut short: pack it again.")
    if len(raw) > MAX_BYTES:
        raise DataError(f"{name} is larger than {MAX_BYTES >> 20} MB unpacked: cut it.")
    return raw


def _is_comment(line: str) -> bool:
    """Whether a line says something of a sentence, as "# text = ..." does; a token "#" has its tag and nothing else."""
    return line.startswith("#") and (len(re.split(r"[ \t]+", line.strip())) > 2 or _row(line) is None)


def _row(line: str) -> tuple[str, str] | None:
    """(token, tag) of a line of a BIO file, or None; a token may hold any space but a blank and a tab."""
    columns = [part.strip(" ") for part in line.split("\t")] if "\t" in line else re.findall(r"[^ ]+", line)
    if len(columns) < 2 or not columns[0] or not _TAG.fullmatch(columns[-1]):
        return None
    return columns[0], columns[-1]


def _unnumbered(lines: Sequence[str]) -> list[str]:
    """The lines without a first column that counts the tokens of each sentence, as CoNLL-U's and GermEval's have it."""
    place, found = 0, []
    for line in lines:
        number, _, rest = (part.strip(" ") for part in re.sub(r"\t| +", "\t", line.strip(" "), count=1).partition("\t"))
        if not line.strip() or _is_comment(line):
            place, rest = (0 if not line.strip() else place), line
        else:
            place += 1
            if number != str(place) or _row(rest) is None:
                return list(lines)
        found.append(rest)
    return found


def _from_json(line: str, number: int, name: str) -> Sentence:
    try:
        held = load_json(line)
        text = held["text"] if "text" in held else held["prompt"]
        spans = tuple((int(start), int(end)) for start, end in held.get("entities", ()))
        if not isinstance(text, str) or not text:
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise DataError(
            f'Line {number} of {name} is no {{"text": ..., "entities": [[start, end], ...]}}: correct it.'
        ) from None
    return Sentence(text, spans)


def _from_bio(lines: Sequence[str], name: str) -> Iterable[Sentence]:
    tokens: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        row = None if _is_comment(line) else _row(line)
        if row is not None and row[0] != "-DOCSTART-":
            tokens.append(row[0])
            tags.append(row[1])
        elif row is None and line.strip() and not _is_comment(line):
            raise DataError(f"Line {number} of {name} is no token with a tag such as O, B-person or I-person.")
        elif not line.strip() and tokens:
            yield joined(tokens, tags)
            tokens, tags = [], []


def joined(tokens: Sequence[str], tags: Sequence[str]) -> Sentence:
    """The text of tokens [token] as the module says, with the entities of their tags [token]."""
    text, starts, ends = "", [], []
    glued, quoted = True, False  # no space before the first token; whether a quotation is open
    for token in tokens:
        piece = _PENN.get(token, token)
        closing = _NO_SPACE_BEFORE.fullmatch(piece) is not None or (piece == '"' and quoted)
        if not glued and not closing:
            text += " "
        starts.append(len(text))
        text += piece
        ends.append(len(text))
        if piece == '"':
            quoted = not quoted
        glued = _NO_SPACE_AFTER.fullmatch(piece) is not None or (piece == '"' and quoted)
    return Sentence(text, tuple((starts[a], ends[b]) for a, b in _entities(tags)))


def _entities(tags: Sequence[str]) -> list[tuple[int, int]]:
    """(first, last) token of each entity.

    A tag that continues nothing begins one, as in IOB1, where so does one of another type; an entity that a B- began
    goes on whatever the type, as the B- of IOB2 begin all of them.
    """
    found: list[tuple[int, int]] = []
    begun = None  # the tag that began the entity that the token before leaves open
    for n, tag in enumerate(tags):
        part, _, kind = tag.partition("-")
        if part in "IEL" and begun is not None and (begun[0] == "B" or begun.partition("-")[2] == kind):
            found[-1] = (found[-1][0], n)
        elif part != "O":
            found.append((n, n))
            begun = tag
        if part in "OELSU":
            begun = None
    return found


def take(
    sentences: Sequence[Sentence], kind: str, limit: int | None = None
) -> tuple[tuple[str, ...], tuple[tuple[tuple[int, int], ...], ...] | None]:
    """(texts, entities) of the first `limit` sentences that can have points of a kind; entities only for "entity"."""
    fit = [s for s in sentences if s.entities or kind != ENTITY][:limit]
    return tuple(s.text for s in fit), tuple(s.entities for s in fit) if kind == ENTITY else None


def to_json_lines(texts: Sequence[str], entities: Sequence[Sequence[Sequence[int]]] | None) -> str:
    """The texts as a file that `read_sentences` reads back unchanged."""
    spans = entities or ((),) * len(texts)
    rows = ({"text": t, "entities": [list(s) for s in e]} for t, e in zip(texts, spans, strict=True))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@dataclass(frozen=True)
class Chosen:
    """The points: sentence, pos_a, pos_b [point]; how many entities ended inside a token, and were left out.

    `first` counts those left out because they are a model's first position, where no special token leads: it attends to
    nothing but itself, and models park attention there, in a state a hundred times as long as the others.
    """

    sentence: np.ndarray
    pos_a: np.ndarray
    pos_b: np.ndarray
    dropped: int
    first: int


def choose(
    handles: Sequence[Handle],
    texts: Sequence[Sequence[str]],
    ids: Sequence[Sequence[Sequence[int]]],
    kind: str,
    entities: Sequence[Sequence[Sequence[int]]] | None = None,
) -> Chosen:
    """The points of two models on texts [model][sentence] with ids [model][sentence][pos].

    Positions of the two models are at the same point of the text: the last token of an entity, or every token that
    ends where one of the other does (all but a leading special one), or the last that stands for text. AlignmentError
    if a tokenizer changes the text, so that this cannot be told.
    """
    spans = [
        [spans_of(handle, *each) for each in zip(own, got, strict=True)]
        for handle, own, got in zip(handles, texts, ids, strict=True)
    ]
    found: list[tuple[int, int, int]] = []
    dropped = 0
    if kind == ALL:
        aligned = align(handles, ids, spans)
        counted = [np.concatenate([s.counted for s in own]) for own in spans]
        chosen = counted[0][aligned.pos_a] & counted[1][aligned.pos_b]
        sentence = np.repeat(np.arange(len(ids[0])), [len(own) for own in ids[0]])[aligned.pos_a]
        first = [np.concatenate([[0], np.cumsum([len(own) for own in model])]) for model in ids]
        pos = [at - offset[sentence] for at, offset in zip((aligned.pos_a, aligned.pos_b), first, strict=True)]
        return _behind_first(sentence[chosen], pos[0][chosen], pos[1][chosen], 0)
    for n, pair in enumerate(zip(*spans, strict=True)):
        if kind == LAST:
            last_a, last_b = (int(np.flatnonzero(s.end > s.start)[-1]) for s in pair)
            found.append((n, last_a, last_b))
            continue
        assert entities is not None
        at = [_token_ends(handle, s, n) for handle, s in zip(handles, pair, strict=True)]
        text = texts[0][n]
        for end in sorted({int(end) for _, end in entities[n]}):  # nested ones may share it
            byte = len(text[:end].encode())
            if byte in at[0] and byte in at[1]:
                found.append((n, at[0][byte], at[1][byte]))
            else:
                dropped += 1
    if not found:
        raise LabError(
            f"No entity ends where a token of {handles[0].name} and of {handles[1].name} does, so there is no point "
            "to compare: choose all tokens."
        )
    sentences, pos_a, pos_b = (column.copy() for column in np.array(found, dtype=np.int64).T)
    return _behind_first(sentences, pos_a, pos_b, dropped)


def _behind_first(sentence: np.ndarray, pos_a: np.ndarray, pos_b: np.ndarray, dropped: int) -> Chosen:
    """The points that are no model's first position."""
    behind = (pos_a > 0) & (pos_b > 0)
    return Chosen(sentence[behind], pos_a[behind], pos_b[behind], dropped, int((~behind).sum()))


def _token_ends(handle: Handle, spans: Spans, sentence: int) -> dict[int, int]:
    """Byte of the text -> the position whose token ends there; tokens that stand for no text have none."""
    if not spans.lossless:
        raise AlignmentError(
            f"The tokenizer of {handle.name} changes the text of sentence {sentence + 1}, so where an entity ends in "
            "its tokens cannot be told: choose last or all points, or a model whose tokenizer keeps the text."
        )
    ends = zip(spans.start.tolist(), spans.end.tolist(), strict=True)
    return {end: pos for pos, (start, end) in enumerate(ends) if end > start}
